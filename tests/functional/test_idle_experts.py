"""An expert to which no token comes, and a rank none of whose experts have any: training goes on, in any dispatcher, and
what their tensors were scaled by is kept until tokens come back."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.support.fp8_gpt import DEEPSEEK, fp8_config
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from tests.support.long_cases import some

IDLE = 3  # iterations without a token, more than a history remembers
HISTORY = {"fp8_amax_history_len": 2, "fp8_amax_compute_algo": "max"}
OPTIONS: dict[str, Any] = {"sequence": 64, "micro_batch": 2, "global_batch": 4}
FIXED = {
    "moe_router_bias_update_rate": 0.0,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "none",
}


def idles(recipe: str, idle: tuple[int, ...], fields: dict[str, Any]) -> dict[str, Any]:
    """A rank case of two expert parallel ranks: a step, IDLE ones in which a bias keeps tokens from the
    ``idle`` experts, and one more. Returns losses; of this rank's idle experts the delayed scales by slot before and
    after; and this rank's products in the last step of each kind."""
    from megatron.core import parallel_state

    from megatron_fp8.mcore.iteration import iteration_counts
    from megatron_fp8.mcore.runtime import state_of
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    with model_parallel(Layout(ep=2)):
        config = fp8_config(Layout(ep=2), recipe, **{**DEEPSEEK, **FIXED, **fields})
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=OPTIONS["sequence"])
        optimizer = build_optimizer(config, chunks)
        biases = [buffer for name, buffer in chunks[0].named_buffers() if name.endswith("expert_bias")]
        here = [
            f".local_experts.{e}." for e in idle if e // 2 == parallel_state.get_expert_model_parallel_rank()
        ]
        losses, products = [], []

        def steps(count: int, bias: float) -> dict[str, float]:
            for each in biases:
                each[list(idle)] = bias
            for _ in range(count):
                losses.append(train_step(config, chunks, optimizer, len(losses), **OPTIONS)[0])
            products.append(iteration_counts()["fp8_gemms"])
            return {
                slot.name: float(slot.scale)
                for slot in state_of(config).slots()
                if slot.delayed is not None and any(part in slot.name for part in here)
            }

        busy, kept, _ = steps(1, 0.0), steps(IDLE, -10.0), steps(1, 0.0)
        return {"losses": losses, "busy": busy, "kept": kept, "products": products}


EXPERT, RANK = (1,), (2, 3)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "an expert": (EXPERT, {}),
    "a rank": (RANK, {}),
    "a rank, one at a time": (RANK, {"moe_grouped_gemm": False}),
    "a rank, all-gather": (RANK, {"moe_token_dispatcher_type": "allgather"}),
}


@pytest.mark.parametrize("name", some(CASES, "an expert", "a rank"))
def test_nobody_waits_and_scales_are_kept(ranks: RankPool, name: str) -> None:
    idle, fields = CASES[name]
    everyone = ranks(2).run(idles, "delayed", idle, {**HISTORY, **fields})
    one, other = everyone
    assert one["losses"] == other["losses"] and all(map(math.isfinite, one["losses"]))
    assert one["losses"][-1] < one["losses"][0]
    seen = {**one["busy"], **other["busy"]}
    assert seen and set(seen.values()) != {1.0}
    for found in everyone:
        for name, scale in found["kept"].items():
            if not name.endswith(".weight"):
                assert scale == found["busy"][name], name


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "blockwise": ("blockwise", {}),
    "tokens in fp8": ("blockwise", {"moe_fp8_dispatch": True}),
    "tokens in fp8, all-gather": (
        "mxfp8",
        {"moe_fp8_dispatch": True, "moe_token_dispatcher_type": "allgather"},
    ),
}


@pytest.mark.parametrize("name", some(OTHERS, "tokens in fp8"))
def test_other_recipes(ranks: RankPool, name: str) -> None:
    """What an idle expert does not multiply is seen in the count of products; afterwards it multiplies again."""
    recipe, fields = OTHERS[name]
    everyone = ranks(2).run(idles, recipe, RANK, fields)
    assert everyone[0]["losses"] == everyone[1]["losses"]
    assert all(map(math.isfinite, everyone[0]["losses"]))
    before, without, after = everyone[1]["products"]
    assert before == after > without
