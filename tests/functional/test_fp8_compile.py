"""torch.compile over Megatron-Core's layers in FP8: graphs, eager bits, tensor parallelism, experts; and offloading."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.fp8_gpt import MOE, fp8_config
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.backends import emulated
from megatron_fp8.mcore.iteration import CapturedIteration
from megatron_fp8.mcore.runtime import runtime_of, state_of
from megatron_fp8.mcore.sites import prepare
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
from megatron_fp8.state.iteration import IterationCounts
from tests.support.long_cases import some

TOKENS, HIDDEN = 128, 128
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "ffn_hidden_size": 256, "num_layers": 1}


def make_layer(layout: Layout, recipe: str, **fields: Any) -> Any:
    """A Llama-like transformer layer whose sites are named, with a main_grad for each weight."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.spec_utils import build_module

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    config = fp8_config(layout, recipe, **SIZES, **fields)
    layer = build_module(get_gpt_layer_fp8_spec(config), config=config, layer_number=1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        parameter.main_grad = torch.zeros(parameter.shape)
        parameter.grad_added_to_main_grad = False
    for module in layer.modules():  # eager and traced code ask for them in another order
        if hasattr(type(module), "bind_fp8_site"):
            module.make_sites()
    return layer


def steps(layer: Any, run: Callable[..., Any], rows: int) -> tuple[list[torch.Tensor], list[IterationCounts]]:
    """Three iterations of two microbatches: results, gradients, amaxes and what was counted."""
    state = state_of(layer.config)
    tensors, counts = [], []
    for iteration in range(3):
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(10 * iteration + microbatch)
            x = torch.randn(rows, 1, HIDDEN, generator=generator).bfloat16().requires_grad_()
            y = run(x)
            y.backward(y.detach())
            tensors += [y.detach(), x.grad]
        tensors += [p.main_grad.clone() for p in layer.parameters()]
        counts.append(state.finish_iteration())
        tensors += [amaxes.clone() for arena in state.arenas for amaxes in (arena.last_amax, arena.scale)]
    return tensors, counts


def forward_of(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: layer(x, attention_mask=None)[0]


def compare(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[str]:
    """What differs, by place."""
    return [
        f"tensor {i}: {int((a != b).sum())} of {a.numel()} differ"
        for i, (a, b) in enumerate(zip(found, expected, strict=True))
        if not torch.equal(a, b)
    ]


def compiled_layer() -> dict[str, Any]:
    """A rank case: a layer eager, and its twin compiled without a graph break."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with model_parallel():
        eager, twin = (make_layer(Layout(), "delayed") for _ in range(2))
        expected, counts = steps(eager, forward_of(eager), TOKENS)
        run = torch.compile(forward_of(twin), backend="aot_eager", fullgraph=True)
        found, counts_found = steps(twin, run, TOKENS)
        finite = all(bool(t.isfinite().all()) for t in expected)
    return {
        "differ": compare(found, expected),
        "counts": (counts_found, counts),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "finite": finite,
    }


def test_a_layer_is_one_graph_with_eager_modes_bits(ranks: RankPool):
    (found,) = ranks(1).run(compiled_layer)
    assert found["finite"] and found["graphs"] == 1
    assert found["differ"] == []
    assert found["counts"][0] == found["counts"][1]
    assert found["counts"][0][-1].fp8_gemms == 2 * 4 * 3


FEW = 5  # tokens for two of four experts each: how many one gets changes from call to call, and sometimes it is none
MOE_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def compiled_layer_of_experts() -> dict[str, Any]:
    """A rank case: Megatron-Core's layer of experts, recomputed, eager and its twin compiled; ``calls``: of how many
    experts each was that the backend made products of, in compiled code."""
    torch._dynamo.reset()
    calls: list[int] = []
    real = emulated.grouped_gemm

    def counted(a: Any, b: Any, outs: Any, **options: Any) -> None:
        calls.append(len(outs))
        real(a, b, outs, **options)

    def forward_of_experts(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: layer(x)[0]

    with model_parallel():
        # Dispatch by all-to-all has the same bits, and twice as many graphs to make.
        fields = {**MOE, "moe_grouped_gemm": True, **MOE_RECOMPUTED, "moe_token_dispatcher_type": "allgather"}
        eager, twin = (make_layer(Layout(), "delayed", **fields).mlp for _ in range(2))
        expected, counts = steps(eager, forward_of_experts(eager), FEW)
        run = torch.compile(forward_of_experts(twin), backend="aot_eager")
        with mock.patch.object(emulated, "grouped_gemm", counted):
            found, counts_found = steps(twin, run, FEW)
    return {"differ": compare(found, expected), "counts": (counts_found, counts), "calls": calls}


def test_a_layer_of_experts_has_eager_modes_bits(ranks: RankPool) -> None:
    """Graphs break around Megatron-Core's routing; experts in one call stay one call."""
    (found,) = ranks(1).run(compiled_layer_of_experts)
    assert found["differ"] == []
    assert found["counts"][0] == found["counts"][1]
    assert {3, 4} <= set(found["calls"])


def compiled_experts(recipe: str, how: str) -> dict[str, Any]:
    """A rank case: experts of a layer by themselves, at least one without tokens, eager and their twin compiled.

    ``how``: 'in turn', 'grouped', or 'heard': grouped, with a hook before one linear, as DistributedDataParallel sets.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    grouped, heard = how != "in turn", []
    splits = [[9, 0, 20, 11], [3, 17, 0, 20], [5, 0, 0, 0], [0, 19, 11, 1]] if grouped else [[9, 0, 20, 11]]

    def whole(experts: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = experts(x[:, 0] * 2, tokens, x[:, 0, 0].detach().float().sigmoid())[0]
        return y[:, None] * 2

    def calls_of(layer: Any, call: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        turns = itertools.cycle(splits)

        def run(x: torch.Tensor) -> torch.Tensor:
            tokens = torch.tensor(next(turns))
            rows = int(tokens.sum())
            y = call(layer.experts, x[:rows].clone(), tokens)  # views are guarded by what they are views of
            return torch.cat([y, x[rows:] * 0])

        return run

    with model_parallel():
        eager, twin = (make_layer(Layout(), recipe, **MOE, moe_grouped_gemm=grouped).mlp for _ in range(2))
        for layer in (eager, twin) if how == "heard" else ():
            linear = layer.experts.local_experts[2].linear_fc2
            linear.register_forward_pre_hook(lambda _, inputs: heard.append(len(inputs[0])))
        expected, counts = steps(eager, calls_of(eager, whole), 40)
        options = {"fullgraph": how == "grouped", "dynamic": grouped}
        compiled = torch.compile(whole, backend="aot_eager", **options)
        found, counts_found = steps(twin, calls_of(twin, compiled), 40)
        graphs, refused = torch._dynamo.utils.counters["stats"]["unique_graphs"], ""
        if how == "heard":
            in_one = torch.compile(whole, backend="eager", fullgraph=True)
            with pytest.raises(torch._dynamo.exc.Unsupported) as told:
                in_one(twin.experts, torch.ones(4, 1, HIDDEN).bfloat16(), torch.ones(4, dtype=torch.int64))
            refused = str(told.value)
    return {
        "differ": compare(found, expected),
        "counts": (counts_found, counts),
        "graphs": graphs,
        "refused": refused,
        "heard": heard,
    }


@pytest.mark.parametrize(
    ("recipe", "how"),
    some(
        [("delayed", "grouped"), ("mxfp8", "heard"), ("blockwise", "in turn")],
        ("delayed", "grouped"),
        ("mxfp8", "heard"),
    ),
)
def test_experts_in_compiled_code(ranks: RankPool, recipe: str, how: str) -> None:
    """In one call they are one graph for all numbers of tokens, and break it where somebody listens to one. One after the
    other they are operators of graphs, which Megatron-Core breaks where it reads the numbers."""
    (found,) = ranks(1).run(compiled_experts, recipe, how)
    assert found["differ"] == []
    assert found["counts"][0] == found["counts"][1]
    if how == "grouped":
        assert found["graphs"] == 1
    if how == "heard":
        assert found["graphs"] == 2 and found["heard"] == 2 * [20, 0, 0, 11, 20, 0]
        assert "one is called apart" in found["refused"] and "without fullgraph" in found["refused"]


def compiled_linears(layout: Layout, recipe: str) -> dict[str, Any]:
    """A rank case: column- and row-parallel linears, whose collectives are inside the operators."""
    torch._dynamo.reset()
    with model_parallel(layout):
        rows = TOKENS // (layout.tp if layout.sp else 1)
        found = []
        for compiled in (False, True):
            mlp = make_layer(layout, recipe).mlp

            def pair(x: torch.Tensor, mlp: Any = mlp) -> torch.Tensor:
                y, _ = mlp.linear_fc1(x)
                y, _ = mlp.linear_fc2(y[..., : mlp.linear_fc2.weight.shape[1]])
                return y

            run = torch.compile(pair, backend="aot_eager", fullgraph=True) if compiled else pair
            found.append(steps(mlp, run, rows))
    return {"differ": compare(found[1][0], found[0][0]), "counts": (found[1][1], found[0][1])}


@pytest.mark.parametrize(("recipe", "sp"), some([("mxfp8", True), ("delayed", False)], ("mxfp8", True)))
def test_tensor_parallel_linears_communicate_inside_the_graph(ranks: RankPool, recipe: str, sp: bool):
    for found in ranks(2).run(compiled_linears, Layout(tp=2, sp=sp), recipe):
        assert found["differ"] == []
        assert found["counts"][0] == found["counts"][1]


def captured_iterations() -> list[Any]:
    """A rank case: what would be captured of two models runs once, with a NaN in one of them; who of them is ill then, as
    the captured iteration says, and as their optimizers ask."""
    found = []
    with model_parallel():
        layers = [make_layer(Layout(), "delayed") for _ in range(2)]
        x = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
        for layer in layers:
            forward_of(layer)(x).sum().backward()
            state_of(layer.config).finish_iteration()
        for ill, order in ((None, (0, 1)), (0, (0, 1)), (0, (1, 0)), (1, (0, 1)), (1, (1, 0))):
            counts = {}
            for which in order:
                bad = x.clone()
                bad[0, 0, 0] = torch.nan if which == ill else 0
                captured = CapturedIteration([layers[which]])
                with captured:
                    forward_of(layers[which])(bad).sum().backward()
                counts[which] = captured.replayed()
            said = [counts[which].nonfinite > 0 for which in (0, 1)]
            asked = [runtime_of(layer.config).found_nonfinite for layer in layers]
            found.append((ill, said, asked, counts[0].fp8_gemms))
    return found


def test_a_captured_iteration_tells_its_own_optimizer(ranks: RankPool):
    (found,) = ranks(1).run(captured_iterations)
    for ill, said, asked, fp8_gemms in found:
        assert said == asked == [which == ill for which in (0, 1)] and fp8_gemms == 12, found


def breaks_of_a_model() -> dict[str, Any]:
    """A rank case: a whole GPT traced; where its graph breaks."""
    from megatron.core.models.gpt import GPTModel

    torch._dynamo.reset()
    with model_parallel():
        config = fp8_config(Layout(), "mxfp8", **SIZES)
        model = GPTModel(
            config,
            get_gpt_layer_fp8_spec(config),
            vocab_size=64,
            max_sequence_length=32,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        ).bfloat16()
        prepare([model])
        tokens, positions = torch.zeros(1, 32, dtype=torch.int64), torch.arange(32)[None]
        found = torch._dynamo.explain(model)(tokens, positions, None, labels=tokens)
    return {
        "where": {reason.user_stack[-1].filename for reason in found.break_reasons},
        "operators": sum(
            str(node.target).startswith("megatron_fp8.linear")
            for graph in found.graphs
            for node in graph.graph.nodes
        ),
    }


def test_a_whole_model_breaks_only_in_megatrons_own_code(ranks: RankPool):
    """The rotary embedding asks which GPU this is, which a stand-in answers here; make_viewless_tensor makes a leaf."""
    (found,) = ranks(1).run(breaks_of_a_model)
    assert all("/megatron/core/" in file for file in found["where"]), found["where"]
    assert found["operators"] == 4
