"""train.cuda_graphs: what is refused before a run, and what happens where an iteration cannot be captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.gemm_site import GemmSite, is_zeros
from megatron_fp8.plan.site_plan import fp8_site
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.cuda_graph import CapturedStep
from megatron_fp8.state.fp8_state import Fp8State
from megatron_fp8.train import cuda_graph
from megatron_fp8.train.config import run_config
from megatron_fp8.train.stop import TrainingFailed
from tests.support.cuda_graph_stub import new_graph
from tests.support.sites import make_site, randn

ON = [
    "--train.cuda_graphs=true",
    "--model.num_layers=2",
    "--model.hidden_size=64",
    "--model.num_attention_heads=2",
]
FP8 = ["--model.fp8=hybrid", "--model.fp8_recipe=delayed"]
MLA = ["--model.multi_latent_attention=true", "--model.num_layers=32"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model.pipeline_model_parallel_size=2"], "model.pipeline_model_parallel_size=2: a stage's order"),
        (["--model.num_moe_experts=4"], "model.num_moe_experts=4: the host reads"),
        (
            ["--model.recompute_granularity=selective"],
            "model.recompute_granularity='selective': a recomputation",
        ),
        ([*FP8, "--model.fp8_interval=2"], "model.fp8_interval=2: the host decides"),
        (
            [*FP8, "--model.fp8_high_precision_warmup=0.1"],
            "model.fp8_high_precision_warmup=0.1: the precision",
        ),
        (["--data.loss=assistant"], "data.loss='assistant': the host reads"),
        (["--model.fp16=true"], "model.fp16=True with a dynamic loss scale: the host changes"),
        (["--telemetry.every=5"], "telemetry: a replay calls no observer"),
        ([*FP8, "--model.fp8_backend=transformer_engine"], "'transformer_engine': its layers update"),
        (["--model.fp4=e2m1"], "NVFP4: its emulation copies"),
        ([*FP8, "--model.fp8_overrides={'*': nvfp4}"], "NVFP4: its emulation copies"),
        (
            [*MLA, "--model.context_parallel_size=2", "--model.num_layers=33"],
            "num_layers=33 with multi-latent attention and context parallelism: Megatron-Core caches 32",
        ),
    ],
)
def test_what_a_replay_would_leave_out_is_refused(options: list[str], words: str) -> None:
    run = run_config.parse([*ON, *options])
    with pytest.raises(ValueError, match=r"^train\.cuda_graphs=True excludes ") as caught:
        cuda_graph.check_options(run)
    assert words in str(caught.value) and ". Leave out train.cuda_graphs, or " in str(caught.value)
    run.train.cuda_graphs = False
    cuda_graph.check_options(run)


@pytest.mark.parametrize("more", [[], ["--model.context_parallel_size=2"], ["--model.num_layers=33"]])
def test_layers_whose_position_embeddings_stay_cached_are_taken(more: list[str]) -> None:
    cuda_graph.check_options(run_config.parse([*ON, *MLA, *more]))


def test_layers_that_read_scales_back_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    site = GemmSite(
        fp8_site("layers.0.linear_fc1", 0, DelayedScaling(), "emulated", "test"), Fp8State(), None
    )
    monkeypatch.setattr(cuda_graph, "fp8_linears", lambda chunks: [SimpleNamespace(fp8_site=site)])
    run = run_config.parse(ON)
    cuda_graph.check_backends(run, [])
    monkeypatch.setattr(cuda_graph.host_sync, "read_waits", lambda device: True)
    with pytest.raises(ValueError, match=r"backend, which runs layers\.0\.linear_fc1: the host reads"):
        cuda_graph.check_backends(run, [])
    run.train.cuda_graphs = False
    cuda_graph.check_backends(run, [])


def test_a_constant_loss_scale_and_dropout_are_taken() -> None:
    cuda_graph.check_options(
        run_config.parse(
            [*ON, "--model.fp16=true", "--optimizer.loss_scale=1024", "--model.hidden_dropout=0.1"]
        )
    )


def test_every_option_is_a_key_whose_default_is_taken() -> None:
    assert set(cuda_graph._NOT_WITH_GRAPHS) <= set(run_config.known_keys())
    cuda_graph.check_options(run_config.parse(ON))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_a_gpu_is_refused_before_the_ranks_meet() -> None:
    with pytest.raises(ValueError, match=r"^train\.cuda_graphs=True needs a CUDA device.*leave it out"):
        cuda_graph.check_device(run_config.parse(ON))


def graph_of(
    state: Fp8State, monkeypatch: pytest.MonkeyPatch, run_passes: Any = None, parameters: Any = ()
) -> cuda_graph.IterationGraph:
    monkeypatch.setattr(cuda_graph, "state_of", lambda config: state)
    monkeypatch.setattr(cuda_graph, "CapturedIteration", lambda chunks: CapturedStep(state))
    return cuda_graph.IterationGraph(
        SimpleNamespace(config=None, parameters=lambda: parameters), run_passes, 1
    )


def test_iterations_are_eager_until_every_tensor_has_a_scale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = Fp8State()
    site, _ = make_site("delayed", state=state)
    graph = graph_of(state, monkeypatch)
    assert [graph.ready() for _ in range(cuda_graph.EAGER_ITERATIONS)] == [False] * 3
    assert not capsys.readouterr().err
    assert not graph.ready() and not graph.ready()
    assert (
        capsys.readouterr().err.count("iterations run eagerly as long as 3 tensors have no delayed scale")
        == 1
    )
    x, w = (randn(rows, 64, seed=rows).requires_grad_() for rows in (40, 48))
    fp8_linear(x, w, None, site).sum().backward()
    state.finish_iteration()
    assert graph.ready()


def test_a_capture_begins_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """So wgrad overwrites each main_grad in the graph, whatever eager iterations left in it."""
    weight: Any = torch.nn.Parameter(torch.zeros(4, 8))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(4, 8), False
    marked = []

    def passes(batches: Any) -> list[torch.Tensor]:
        marked.append(is_zeros(weight, captured=True))
        return [batch["tokens"] for batch in batches]

    monkeypatch.setattr(cuda_graph, "new_graph", new_graph)
    graph = graph_of(Fp8State(), monkeypatch, passes, [weight])
    graph.run(iter([{"tokens": torch.ones(2, 4)}]))
    assert marked == [True] and not is_zeros(weight, captured=False)


def test_an_iteration_that_cannot_be_captured_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting(batches: Any) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ...")

    monkeypatch.setattr(cuda_graph, "new_graph", new_graph)
    state = Fp8State()
    graph = graph_of(state, monkeypatch, waiting)
    words = r"\(CUDA error: operation not permitted when stream is capturing\). Leave out train.cuda_graphs"
    with pytest.raises(TrainingFailed, match=words):
        graph.run(iter([{"tokens": torch.zeros(2, 4)}]))
    assert not state.capturing
