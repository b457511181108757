"""Experts whose products are made in one call (moe_grouped_gemm) train as experts that are called one after the other."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.fp8_gpt import DEEPSEEK, RECIPES, fp8_config
from benchmarks.support.gpt import build_chunks, build_optimizer, gpt_config, train, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from tests.support.host_syncs import waits
from tests.support.long_cases import some

SEQUENCE, STEPS = 128, 2
MOE = {
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "moe_ffn_hidden_size": 256,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
DISTRIBUTED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


def run_case(
    grouped: bool,
    layout: Layout,
    recipe: str,
    fields: dict[str, Any],
    ddp: dict[str, Any],
    change: str = "",
    microbatches: int = 1,
) -> dict[str, Any]:
    """A rank case. ``change``: one of CHANGES, made to the last expert after the first step.

    Returns losses, norms, gemms, sites; calls: of how many experts each made products; heard: calls that hooks heard.
    """
    from megatron_fp8 import TransformerConfig
    from megatron_fp8.backends import emulated
    from megatron_fp8.mcore.iteration import iteration_counts
    from megatron_fp8.mcore.sites import fp8_linears
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    calls: list[int] = []
    heard: list[str] = []
    real = emulated.grouped_gemm

    def counted(a: Any, b: Any, outs: Any, **options: Any) -> None:
        calls.append(len(outs))
        real(a, b, outs, **options)

    def make_change(step: int, run: Any) -> None:
        if change and step == 0:
            CHANGES[change](
                run.chunks[0].module.module.decoder.layers[-1].mlp.experts.local_experts[-1], heard
            )

    fp8: dict[str, Any] = {"fp8": "hybrid", "fp8_format": recipe}
    fp8 = {**({"fp4": "e2m1"} if recipe == "nvfp4" else fp8), "moe_grouped_gemm": grouped}
    replicas = dist.get_world_size() // layout.model_ranks
    options: dict[str, Any] = {
        "sequence": SEQUENCE,
        "micro_batch": 1,
        "global_batch": microbatches * replicas,
        "ddp": ddp,
        "on_step": make_change,
    }
    with model_parallel(layout), mock.patch.object(emulated, "grouped_gemm", counted):
        config = gpt_config(layout, cls=TransformerConfig, **{**MOE, **fp8, **fields})
        run = train(config, spec=get_gpt_layer_fp8_spec, steps=STEPS, **options)
        return {
            "losses": run.losses,
            "norms": run.grad_norms,
            "gemms": iteration_counts()["fp8_gemms"],
            "sites": [linear.fp8_site.plan.name for linear in fp8_linears(run.chunks)],
            "calls": calls,
            "heard": heard,
        }


CASES: dict[str, tuple[int, Layout, str, dict[str, Any], dict[str, Any]]] = {
    **{name: (1, Layout(), name, {}, {}) for name in ("delayed", "blockwise", "mxfp8", "nvfp4")},
    "etp2": (2, Layout(tp=2, sp=True), "rowwise", {"moe_token_dispatcher_type": "allgather"}, {}),
    # Small buckets, each gathered when a hook of its first linear asks: without the hook its weights would be old.
    "dp2-buckets": (2, Layout(), "blockwise", {}, {**DISTRIBUTED, "bucket_size": 10_000}),
    "fp8-param": (2, Layout(ep=2), "delayed", {"fp8_param": True}, DISTRIBUTED),
    "fp8-param-float32-scales": (
        2,
        Layout(ep=2),
        "blockwise",
        {"fp8_param": True, "fp8_pow2_scales": False},
        DISTRIBUTED,
    ),
    "fp8-param-mxfp8": (2, Layout(ep=2), "mxfp8", {"fp8_param": True}, DISTRIBUTED),
    "recomputed": (
        1,
        Layout(),
        "delayed",
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        {},
    ),
    "first-last-bf16": (1, Layout(), "delayed", {"first_last_layers_bf16": True, "num_layers": 3}, {}),
    "one-in-bf16": (1, Layout(), "delayed", {"fp8_overrides": {"*.local_experts.1.linear_fc1": "bf16"}}, {}),
    "unfused-shared": (
        1,
        Layout(),
        "blockwise",
        {"bias_activation_fusion": False, "moe_shared_expert_intermediate_size": 128},
        {},
    ),
}


LONG = ("delayed", "fp8-param-float32-scales", "fp8-param-mxfp8", "first-last-bf16")


@pytest.mark.parametrize("case", some(CASES, *(case for case in CASES if case not in LONG)))
def test_it_trains_as_experts_in_turn_do(ranks: RankPool, case: str) -> None:
    world, layout, *setting = CASES[case]
    microbatches = 2 if case in RECIPES else 1  # sums over both are each recipe's matter
    grouped, in_turn = (
        ranks(world).run(run_case, grouped, layout, *setting, microbatches=microbatches)[0]
        for grouped in (True, False)
    )
    for what in ("losses", "norms", "gemms", "sites"):
        assert grouped[what] == in_turn[what], what
    assert max(grouped["calls"]) == 4 // layout.ep and not in_turn["calls"]


def copied_by_dispatcher(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """What Megatron-Core's dispatcher has of a tensor on the host, which on a GPU it copies there for itself."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    there = tensor.cpu()
    return there.numpy() if as_numpy else there


def looks(grouped: bool) -> dict[str, int]:
    """A rank case of two expert parallel ranks: who reads a tensor's value on the host in an iteration, how often."""
    from megatron.core.transformer.moe import token_dispatcher

    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    options: dict[str, Any] = {"sequence": SEQUENCE, "micro_batch": 1, "global_batch": 4}
    as_on_a_gpu = mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", copied_by_dispatcher)
    with model_parallel(Layout(ep=2)):
        config = fp8_config(Layout(ep=2), "blockwise", **{**DEEPSEEK, "moe_grouped_gemm": grouped})
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=SEQUENCE)
        optimizer = build_optimizer(config, chunks)
        train_step(config, chunks, optimizer, 0, **options)
        with as_on_a_gpu, waits(hidden=False) as seen:
            train_step(config, chunks, optimizer, 1, **options)
    return Counter(place for place in seen.places if "scale_range" not in place)  # of C alone


def test_the_host_waits_for_no_counts_of_tokens(ranks: RankPool) -> None:
    """Megatron-Core's dispatcher copies them, with four other tensors, and waits once a layer and microbatch; grouped
    experts wait for nothing."""
    grouped, in_turn = (ranks(2).run(looks, grouped)[0] for grouped in (True, False))
    assert grouped == in_turn
    assert not any("grouped.py" in place or "experts.py" in place for place in grouped)
    of_dispatcher = [number for place, number in grouped.items() if place.startswith("token_dispatcher.py")]
    assert sum(of_dispatcher) == 5 * 3 * 2, of_dispatcher


def listen(expert: Any, heard: list[str]) -> None:
    expert.linear_fc2.register_forward_hook(lambda linear, *args: heard.append(linear.fp8_site.plan.name))


def change_input(expert: Any, heard: list[str]) -> None:
    expert.linear_fc1.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))


def change_expert_input(expert: Any, heard: list[str]) -> None:
    expert.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2, inputs[1] / 2))


def change_expert_output(expert: Any, heard: list[str]) -> None:
    expert.register_forward_hook(lambda _, inputs, output: (output[0] * 2, output[1]))


def wrap(expert: Any, heard: list[str]) -> None:
    class Adapter(torch.nn.Module):
        def __init__(self, linear: torch.nn.Module):
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor) -> Any:
            y, bias = self.linear(x)
            return y * 2, bias

    expert.linear_fc1 = Adapter(expert.linear_fc1)


CHANGES = {
    each.__name__: each for each in (listen, change_input, change_expert_input, change_expert_output, wrap)
}


@pytest.fixture(scope="module")
def plain(ranks: RankPool) -> dict[str, Any]:
    """Nobody listens, nothing is changed."""
    world, *setting = CASES["blockwise"]
    return ranks(world).run(run_case, True, *setting)[0]


def test_who_listens_to_one_expert_hears_it(ranks: RankPool, plain: dict[str, Any]) -> None:
    """It is then called by itself, with the same losses."""
    world, *setting = CASES["blockwise"]
    hooked = ranks(world).run(run_case, True, *setting, "listen")[0]
    assert hooked["losses"] == plain["losses"]
    assert sum(plain["calls"]) - sum(hooked["calls"]) == (STEPS - 1) * 3  # products
    assert set(hooked["heard"]) == {"decoder.layers.1.mlp.experts.local_experts.3.linear_fc2"}
    assert len(hooked["heard"]) == STEPS - 1


@pytest.mark.parametrize(
    "change",
    some([name for name in CHANGES if name != "listen"], "change_input", "change_expert_output", "wrap"),
)
def test_who_changes_one_expert_changes_it(ranks: RankPool, plain: dict[str, Any], change: str) -> None:
    world, *setting = CASES["blockwise"]
    grouped, in_turn = (ranks(world).run(run_case, grouped, *setting, change)[0] for grouped in (True, False))
    assert grouped["losses"] == in_turn["losses"] and grouped["losses"][1:] != plain["losses"][1:]
