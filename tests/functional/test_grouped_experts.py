"""Experts whose products are made in one call (moe_grouped_gemm) train as experts that are called one after the other."""

from __future__ import annotations

from typing import Any

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


def run_case(grouped: bool, layout: Layout, recipe: str, fields: dict[str, Any], ddp: dict[str, Any]) -> Any:
    """A rank case: losses, gradient norms, what ran, and how many calls made products of several experts."""
    from megatron_fp8 import TransformerConfig
    from megatron_fp8.backends import emulated
    from megatron_fp8.mcore.iteration import iteration_counts
    from megatron_fp8.mcore.sites import fp8_linears
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    calls, real = [], emulated.grouped_gemm

    def counted(a: Any, b: Any, outs: Any, **options: Any) -> None:
        calls.append(len(outs))
        real(a, b, outs, **options)

    emulated.grouped_gemm = counted
    try:
        with model_parallel(layout):
            fp8 = {"fp8": "hybrid", "fp8_format": recipe, "moe_grouped_gemm": grouped} if recipe else {}
            config = gpt_config(layout, cls=TransformerConfig, **{**MOE, **fp8, **fields})
            run = train(
                config, spec=get_gpt_layer_fp8_spec, steps=3, sequence=SEQUENCE, micro_batch=1, ddp=ddp
            )
            sites = [linear.fp8_site.plan.name for linear in fp8_linears(run.chunks)]
            return run.losses, run.grad_norms, iteration_counts()["fp8_gemms"], sites, calls
    finally:
        emulated.grouped_gemm = real


CASES: dict[str, tuple[int, Layout, str, dict[str, Any], dict[str, Any]]] = {
    **{
        name: (1, Layout(), name, {}, {})
        for name in ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
    },
    "ep2-distributed": (2, Layout(ep=2), "blockwise", {}, DISTRIBUTED),
    "fp8-param": (2, Layout(ep=2), "delayed", {"fp8_param": True}, DISTRIBUTED),
    "recomputed": (
        1,
        Layout(),
        "delayed",
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        {},
    ),
    "first-last-bf16": (1, Layout(), "delayed", {"first_last_layers_bf16": True, "num_layers": 3}, {}),
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
    world, *setting = CASES[case]
    (losses, norms, gemms, sites, calls), *_ = ranks(world).run(run_case, True, *setting)
    (expected, expected_norms, expected_gemms, expected_sites, none), *_ = ranks(world).run(
        run_case, False, *setting
    )
    assert sites == expected_sites and gemms == expected_gemms and not none
    assert losses == expected and norms == expected_norms
    assert max(calls) == 4 // world  # an expert without tokens is left out
