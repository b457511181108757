"""Experts whose products are made in one call (moe_grouped_gemm) train as experts that are called one after the other."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from benchmarks.support.gpt import gpt_config, train
from benchmarks.support.ranks import Layout, RankPool, model_parallel

SEQUENCE = 128
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
    hooked: bool = False,
) -> dict[str, Any]:
    """A rank case. ``hooked``: after the first step the last expert's second linear has a forward hook.

    Returns losses, norms, gemms, sites; calls: of how many experts each made products; heard: what the hook heard.
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

    def listen(step: int, run: Any) -> None:
        if hooked and step == 0:
            last = fp8_linears(run.chunks)[-1]
            last.register_forward_hook(lambda *args: heard.append(last.fp8_site.plan.name))

    fp8 = {"fp8": "hybrid", "fp8_format": recipe, "moe_grouped_gemm": grouped}
    options: dict[str, Any] = {
        "sequence": SEQUENCE,
        "micro_batch": 1,
        "global_batch": 4,
        "ddp": ddp,
        "on_step": listen,
    }
    with model_parallel(layout), mock.patch.object(emulated, "grouped_gemm", counted):
        config = gpt_config(layout, cls=TransformerConfig, **{**MOE, **fp8, **fields})
        run = train(config, spec=get_gpt_layer_fp8_spec, steps=3, **options)
        return {
            "losses": run.losses,
            "norms": run.grad_norms,
            "gemms": iteration_counts()["fp8_gemms"],
            "sites": [linear.fp8_site.plan.name for linear in fp8_linears(run.chunks)],
            "calls": calls,
            "heard": heard,
        }


CASES: dict[str, tuple[int, Layout, str, dict[str, Any], dict[str, Any]]] = {
    **{name: (1, Layout(), name, {}, {}) for name in ("delayed", "tensorwise", "blockwise", "mxfp8")},
    "etp2": (2, Layout(tp=2, sp=True), "rowwise", {"moe_token_dispatcher_type": "allgather"}, {}),
    "ep2-distributed": (2, Layout(ep=2), "blockwise", {}, DISTRIBUTED),
    # Small buckets, each gathered when a hook of its first linear asks: without the hook its weights would be old.
    "dp2-buckets": (2, Layout(), "blockwise", {}, {**DISTRIBUTED, "bucket_size": 10_000}),
    "fp8-param": (2, Layout(ep=2), "delayed", {"fp8_param": True}, DISTRIBUTED),
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


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_experts_in_turn_do(ranks: RankPool, case: str) -> None:
    world, layout, *setting = CASES[case]
    grouped, in_turn = (ranks(world).run(run_case, grouped, layout, *setting)[0] for grouped in (True, False))
    for what in ("losses", "norms", "gemms", "sites"):
        assert grouped[what] == in_turn[what], what
    assert max(grouped["calls"]) == 4 // layout.ep and not in_turn["calls"]


def test_who_listens_to_one_expert_hears_it(ranks: RankPool) -> None:
    """It is then called by itself, with the same losses."""
    world, *setting = CASES["blockwise"]
    hooked, plain = (ranks(world).run(run_case, True, *setting, listens)[0] for listens in (True, False))
    assert hooked["losses"] == plain["losses"]
    assert sum(plain["calls"]) - sum(hooked["calls"]) == 2 * 4 * 3  # steps, microbatches, products
    assert set(hooked["heard"]) == {"decoder.layers.1.mlp.experts.local_experts.3.linear_fc2"}
    assert len(hooked["heard"]) == 2 * 4
