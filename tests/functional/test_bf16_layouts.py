"""Megatron-Core 0.16 on the CPU engine, without FP8: every parallel layout trains the same model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.support.gpt import gpt_config, train
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from tests.support.long_cases import some

MOE = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 256,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
}
SHARED = {"moe_shared_expert_intermediate_size": 256, "moe_shared_expert_overlap": True}
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
NARROW = {"hidden_size": 128, "ffn_hidden_size": 256}  # nothing here has blocks of 128 on each rank
FP32 = {"bf16": False, "params_dtype": torch.float32}

# Two microbatches a step, on each of two replicas too: one to add to, one to be added.
OPTIONS = {"micro_batch": 2, "global_batch": 4, "sequence": 32}
REPLICAS = {"micro_batch": 1, "global_batch": 4}
FOUR = {"micro_batch": 1, "global_batch": 4}
"""Interleaved, two fill the stages and two more come before those are through."""
ROUTED = {"micro_batch": 2, "global_batch": 8, "sequence": 64}
"""On each of two replicas too. In BF16 a token may go to another expert than on one rank: one of few is seen."""

IN_BF16 = ("tp2-sp", "dp2-overlap", "gpt-pp2-tied")
"""Layouts trained in BF16 too, which gathers and reduces in another dtype: one for each kind of parallelism."""

# (loss, gradient norm), relative. FP32 leaves only the order of sums; BF16 rounds partial sums, once a rank.
TOLERANCE = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (1e-4, 1e-3)}


def run_case(
    layout: Layout, fields: dict[str, Any], options: dict[str, Any]
) -> tuple[list[float], list[float]]:
    if not fields.get("bf16", True) and layout.pp > 1:
        fields = {**fields, "pipeline_dtype": torch.float32}
    with model_parallel(layout):
        run = train(gpt_config(layout, **{**NARROW, **fields}), steps=2, **{**OPTIONS, **options})
        return run.losses, run.grad_norms


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool) -> Any:
    """(losses, norms) of a model on one rank, computed once for each set of fields."""
    known: dict[str, Any] = {}

    def get(fields: dict[str, Any], options: dict[str, Any]) -> Any:
        model = {k: v for k, v in options.items() if k not in ("ddp", "micro_batch")}
        key = repr((sorted(fields.items(), key=str), sorted(model.items(), key=str)))
        if key not in known:
            known[key] = ranks(1).run(run_case, Layout(), fields, model)[0]
        return known[key]

    return get


LAYOUTS: dict[str, tuple[int, Layout, dict[str, Any], dict[str, Any]]] = {
    "tp2-sp": (2, Layout(tp=2, sp=True), {}, {}),
    "dp2-overlap": (2, Layout(), {}, {**REPLICAS, "ddp": OVERLAP}),
    "pp2-vpp2-overlap": (2, Layout(pp=2, vpp=2), {"num_layers": 4}, {**FOUR, "ddp": OVERLAP}),
    "cp2": (2, Layout(cp=2), {}, {}),
    "ep2-alltoall": (2, Layout(ep=2), {**MOE, "moe_token_dispatcher_type": "alltoall"}, ROUTED),
    "ep2-allgather": (2, Layout(ep=2), {**MOE, "moe_token_dispatcher_type": "allgather"}, ROUTED),
    "ep2-shared-expert-overlap": (
        2,
        Layout(ep=2),
        {**MOE, **SHARED, "moe_token_dispatcher_type": "alltoall"},
        ROUTED,
    ),
    "gpt-tp2-sp-tied": (2, Layout(tp=2, sp=True), {"llama": False}, {**FOUR, "tied": True}),
    "gpt-pp2-tied": (2, Layout(pp=2), {"llama": False}, {**FOUR, "tied": True}),
    "tp2-sp-pp2": (4, Layout(tp=2, sp=True, pp=2), {}, {}),
}


HERE = ("tp2-sp", "dp2-overlap", "pp2-vpp2-overlap", "cp2", "ep2-alltoall", "gpt-pp2-tied")


@pytest.mark.parametrize(
    ("name", "dtype"),
    some(
        [*((name, torch.float32) for name in LAYOUTS), *((name, torch.bfloat16) for name in IN_BF16)],
        *((name, torch.float32) for name in HERE),
        ("tp2-sp", torch.bfloat16),
    ),
)
def test_layout_trains_as_one_rank_does(
    ranks: RankPool, one_rank: Any, name: str, dtype: torch.dtype
) -> None:
    world, layout, fields, options = LAYOUTS[name]
    fields = {**fields, **(FP32 if dtype == torch.float32 else {})}
    losses, norms = ranks(world).run(run_case, layout, fields, options)[-1]
    want_losses, want_norms = one_rank(fields, options)
    loss_tolerance, norm_tolerance = TOLERANCE[dtype]
    assert losses[0] == pytest.approx(want_losses[0], rel=loss_tolerance)
    assert norms[0] == pytest.approx(want_norms[0], rel=norm_tolerance)
    # An update later: what was not updated alike on all ranks shows here.
    assert losses[1] == pytest.approx(want_losses[1], rel=10 * loss_tolerance)
    assert losses[1] < losses[0]


RECOMPUTE: dict[str, dict[str, Any]] = {
    "full-uniform": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def run_cases(layout: Layout, cases: list[dict[str, Any]]) -> list[tuple[list[float], list[float]]]:
    """A rank case. One microbatch a step: what a recomputation leaves of the streams is seen in the second step."""
    return [run_case(layout, fields, {"global_batch": 2}) for fields in cases]


def test_recompute_is_bit_identical_with_dropout(ranks: RankPool) -> None:
    """Dropout draws from Megatron-Core's tracked streams; recomputation must draw the same numbers again."""
    layout, model = Layout(tp=2, sp=True), {"llama": False}
    cases = [model, *({**model, **DROPOUT, **fields} for fields in ({}, *RECOMPUTE.values()))]
    for without, want, *found in ranks(layout.model_ranks).run(run_cases, layout, cases):
        assert want != without
        assert dict(zip(RECOMPUTE, found, strict=True)) == dict.fromkeys(RECOMPUTE, want)
