"""Recompute, gradient accumulation and the weight cache: the same numbers, with FP8 in every GEMM that had it."""

from __future__ import annotations

import functools
from itertools import count
from typing import Any

import pytest
import torch

from benchmarks.support.fp8_gpt import (
    MOE,
    NARROW,
    Watched,
    fp8_config,
    training,
    watched_gemms,
    watched_training,
)
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.mcore.iteration import iteration_counts
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
from megatron_fp8.plan.autocast_state import fp8_disabled
from tests.support.long_cases import some

ONE, TP_SP, PP, VPP = Layout(), Layout(tp=2, sp=True), Layout(pp=2), Layout(pp=2, vpp=2)
DISTRIBUTED = {"use_distributed_optimizer": True}
SMALL = {"sequence": 64, "micro_batch": 2, "global_batch": 4}
MICROBATCHES = 2
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


# fields, and how many linears of a layer run their fprop again (None: all four, in the layers that FULL recomputes).
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "full-uniform": ({**FULL, "recompute_method": "uniform"}, 4),
    "full-block": ({**FULL, "recompute_method": "block"}, 4),
    "core_attn": (selective("core_attn"), 0),
    "mlp": (selective("mlp"), 2),
    "layernorm": (selective("layernorm"), 0),
}
BF16_ENDS = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}


def steps_of(recipe: str, fields: dict[str, Any]) -> int:
    """Two where something but the weights goes over to the second step: amaxes, and codes that the weights are."""
    return 2 if recipe == "delayed" or fields.get("fp8_param") else 1


def microbatches_of(recipe: str, ends: bool = False) -> int:
    """Two where an amax is of both; in pipelines every recipe has more."""
    return 2 if recipe == "delayed" and not ends else 1


def trainings(
    layout: Layout,
    recipe: str,
    fields: dict[str, Any],
    variants: dict[str, dict[str, Any]],
    microbatches: int,
) -> dict[str, Watched]:
    """A rank case: each variant."""
    options = {**SMALL, "global_batch": 2 * microbatches}
    return {
        name: watched_training(layout, recipe, {**fields, **variant}, options, steps_of(recipe, fields))
        for name, variant in variants.items()
    }


@pytest.mark.parametrize(
    ("layout", "recipe", "ends"),
    [
        (ONE, "delayed", False),
        (TP_SP, "delayed", False),
        (ONE, "blockwise", True),
        pytest.param(ONE, "mxfp8", False, marks=pytest.mark.long),
        (ONE, "nvfp4", False),
    ],
    ids=["delayed", "delayed-tp2-sp", "blockwise-ends", "mxfp8", "nvfp4"],
)
def test_recompute_is_bit_identical(ranks: RankPool, layout: Layout, recipe: str, ends: bool) -> None:
    """Losses, and every byte of parameters and gradients; what runs again runs in FP8 again."""
    layers = 3 if ends else 2
    fields = {"num_layers": layers, **NARROW, **(BF16_ENDS if ends else {})}
    # Which layers are recomputed, and what has no linear in it, is the same in every recipe and layout.
    ways = WAYS if recipe == "delayed" and layout is ONE else ("full-uniform", "mlp", "layernorm")
    variants = {"none": {}, **{name: WAYS[name][0] for name in ways}}
    microbatches = microbatches_of(recipe, ends)
    for seen in ranks(layout.tp).run(trainings, layout, recipe, fields, variants, microbatches):
        plain = seen.pop("none")
        fp8_layers = len(plain.layers_in_fp8())
        assert fp8_layers == (1 if ends else layers)
        for name, got in seen.items():
            assert got.losses == plain.losses and got.digests == plain.digests, name
            assert got.records == plain.records > 0, f"{name}: an amax was recorded twice"
            again = WAYS[name][1] * (1 if name == "full-block" else fp8_layers)  # 'block': the first layer
            before, after = plain.counts[-1], got.counts[-1]
            assert after["fp8_gemms"] == before["fp8_gemms"] + again * microbatches, name
            # The weight's codes are kept; a norm that is recomputed leaves its output to be cast again for wgrad.
            casts = 2 * fp8_layers if name == "layernorm" else again
            assert after["casts"] == before["casts"] + casts * microbatches, name


# Megatron-Core has 'moe_act' for grouped GEMM only.
MOE_WAYS = {
    "none": {},
    "moe": selective("moe"),
    "shared_experts": selective("shared_experts"),
    "layernorm": selective("layernorm"),
    "full": {**FULL, "recompute_method": "uniform"},
}


def test_recompute_of_experts_is_bit_identical(ranks: RankPool) -> None:
    recipe = "delayed"
    fields = {**NARROW, **MOE, "moe_shared_expert_intermediate_size": 256}
    microbatches = microbatches_of(recipe)
    seen = ranks(1).run(trainings, ONE, recipe, fields, MOE_WAYS, microbatches)[0]
    plain = seen.pop("none")
    again = {"moe": 2 * 5, "shared_experts": 2, "layernorm": 0, "full": 2 * 5 + 2}
    for name, got in seen.items():
        assert got.losses == plain.losses and got.digests == plain.digests, name
        assert got.records == plain.records > 0, name
        more = got.counts[-1]["fp8_gemms"] - plain.counts[-1]["fp8_gemms"]
        assert more == again[name] * 2 * microbatches, name


# With pipelines, three microbatches, so that one is recomputed between the forwards of others (interleaved, four): every
# way, both schedules, BF16 weights and FP8 ones (with Megatron's plain optimizer and the distributed one). Recipes are
# above.
PIPELINED: dict[str, tuple[Layout, str, dict[str, Any], list[str]]] = {
    "mxfp8-interleaved": (VPP, "mxfp8", {}, ["full-block", "layernorm"]),
    "delayed-fp8-weights": (PP, "delayed", {"fp8_param": True}, ["full-uniform", "mlp"]),
    "blockwise-fp8-weights-sharded": (PP, "blockwise", {"fp8_param": True, "ddp": DISTRIBUTED}, ["mlp"]),
}


def in_pipeline(layout: Layout) -> int:
    """Microbatches of a step: whole rounds of the stages where chunks are interleaved."""
    return 4 if layout.vpp else 3


def layers_of(layout: Layout, ways: list[str]) -> int:
    """Two a stage where they differ: a chunk each, or recomputed and not ('block')."""
    return 4 if layout.vpp or "full-block" in ways else 2


def pipelined(layout: Layout, recipe: str, fields: dict[str, Any], ways: list[str]) -> list[Watched]:
    """A rank case: steps of several microbatches, without recompute and in each way."""
    fields = {"num_layers": layers_of(layout, ways), **NARROW, **fields}
    options = {**SMALL, "global_batch": 2 * in_pipeline(layout), "ddp": fields.pop("ddp", None)}
    steps = steps_of(recipe, fields)
    variants: list[dict[str, Any]] = [{}, *(WAYS[way][0] for way in ways)]
    return [watched_training(layout, recipe, {**fields, **variant}, options, steps) for variant in variants]


@pytest.mark.parametrize("name", some(PIPELINED, "mxfp8-interleaved", "delayed-fp8-weights"))
def test_recompute_in_a_pipeline(ranks: RankPool, name: str) -> None:
    """Recomputations of one microbatch come between the forwards of others; each stage answers for itself."""
    layout, _, _, ways = PIPELINED[name]
    for plain, *others in ranks(2).run(pipelined, *PIPELINED[name]):
        for way, got in zip(ways, others, strict=True):
            assert got.losses == plain.losses and got.digests == plain.digests, way
            assert got.records == plain.records > 0, f"{way}: an amax was recorded twice"
            # 'block' recomputes the first of each chunk.
            layers = (layout.vpp or 1) if way == "full-block" else layers_of(layout, ways) // 2
            more = got.counts[-1]["fp8_gemms"] - plain.counts[-1]["fp8_gemms"]
            assert more == WAYS[way][1] * layers * in_pipeline(layout), way


def disabled_by_user(fields: dict[str, Any], every: int = 1) -> Watched:
    """A rank case: one step, the forwards of which (or every other one of which) run inside a user's fp8_disabled."""
    from unittest import mock

    from megatron.core.models.gpt import GPTModel

    seen, forward, calls = Watched(), GPTModel.forward, count()

    def forward_without_fp8(self: Any, *args: Any, **kwargs: Any) -> Any:
        with fp8_disabled("a test says so" if next(calls) % every == 0 else None):
            return forward(self, *args, **kwargs)

    with model_parallel(), watched_gemms(seen), mock.patch.object(GPTModel, "forward", forward_without_fp8):
        config = fp8_config(ONE, "delayed", **NARROW, **fields)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=64)
        train_step(config, chunks, build_optimizer(config, chunks), 0, **SMALL)
        seen.counts.append(iteration_counts())
    return seen


@pytest.mark.parametrize("name", ["full-uniform", "layernorm"])
def test_disabled_region_is_disabled_in_recompute_too(ranks: RankPool, name: str) -> None:
    """The recomputation runs in the backward, where the user's context has long been left."""
    seen = ranks(1).run(disabled_by_user, WAYS[name][0])[0]
    assert seen.gemms.total() == 0 and seen.counts[0]["fp8_gemms"] == 0
    recomputed = {"full-uniform": 8}.get(name, 0)
    assert seen.counts[0]["hp_gemms"] == ((2 * 4 + 1) * 3 + recomputed) * MICROBATCHES


def test_each_recomputation_is_as_its_own_forward(ranks: RankPool) -> None:
    """Of two microbatches the first runs with FP8 switched off, the second with it."""
    seen = ranks(1).run(disabled_by_user, WAYS["mlp"][0], 2)[0]
    recomputed = 2 * WAYS["mlp"][1]
    assert seen.counts[0]["fp8_gemms"] == seen.gemms.total() == 2 * 4 * 3 + recomputed
    assert seen.counts[0]["hp_gemms"] == 2 * 4 * 3 + recomputed + MICROBATCHES * 3


# ------------------------------------------------------------------------------------------------ gradient accumulation


def gradients(recipe: str | None, micro_batch: int, clip: float = 0.0) -> tuple[torch.Tensor, int, float]:
    """A rank case: (all float32 gradients, casts, gradient norm) of a step after one that changed no weight.

    That first step is the same for every ``micro_batch``: delayed scaling has its scales from there.
    """
    with model_parallel():
        config = fp8_config(ONE, recipe, **NARROW)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=128)
        optimizer = build_optimizer(config, chunks, optim={"lr": 0.0, "clip_grad": clip})
        for rows in (4, micro_batch):
            _, norm = train_step(config, chunks, optimizer, 0, micro_batch=rows, global_batch=4, sequence=128)
        linears = [p for name, p in chunks[0].named_parameters() if "linear" in name]
        assert len(linears) == 8
        for parameter in linears:
            assert parameter.main_grad.dtype == torch.float32 and parameter.grad is None
        return torch.cat([p.main_grad.flatten() for p in linears]).clone(), iteration_counts()["casts"], norm


@pytest.fixture(scope="module")
def found_gradients(ranks: RankPool) -> Any:
    """``gradients``, of each recipe and microbatch found once."""
    return functools.cache(lambda recipe, rows: ranks(1).run(gradients, recipe, rows)[0])


@pytest.mark.parametrize("recipe", some(["delayed", "mxfp8"], "mxfp8"))
def test_accumulation_equals_one_big_microbatch(found_gradients: Any, recipe: str) -> None:
    """Four microbatches of one sequence against one of four.

    With delayed scaling, once warm, every code is the same. A power of two moves no code but the smallest, so it does not
    matter either that blocks hold other tokens. Only the order of float32 sums differs: 1e-7.
    """
    many, many_casts, _ = found_gradients(recipe, 1)
    once, once_casts, _ = found_gradients(recipe, 4)
    assert 0 < (many - once).norm() <= 1e-5 * once.norm()
    # A linear casts its input and its grad_output in every microbatch, its weight once in an iteration.
    assert many_casts == 8 * (2 * 4 + 1) and once_casts == 8 * (2 * 1 + 1)


def test_wgrad_accumulates_in_float32(found_gradients: Any) -> None:
    """Without apex: the sum of four microbatches has bits that bfloat16 does not."""
    many, _, _ = found_gradients("mxfp8", 1)
    assert float((many != many.bfloat16().float()).float().mean()) > 0.9


def test_clipping_scales_fp8_gradients(ranks: RankPool) -> None:
    whole, _, norm = ranks(1).run(gradients, "mxfp8", 2)[0]
    clipped, _, same_norm = ranks(1).run(gradients, "mxfp8", 2, clip=norm / 4)[0]
    assert same_norm == norm
    assert torch.allclose(clipped, whole / 4, rtol=1e-4, atol=0)


def test_weight_cache_follows_the_weights(ranks: RankPool) -> None:
    """Two steps with a learning rate: the second iteration multiplies the new weights, also with overlap."""
    overlap = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    plain = training(ranks, 1, ONE, "mxfp8", NARROW, {}, steps=3)[0]
    overlapped = training(ranks, 1, ONE, "mxfp8", NARROW, {"ddp": overlap}, steps=3)[0]
    assert plain.losses[2] < plain.losses[1] < plain.losses[0]
    assert overlapped.losses == pytest.approx(plain.losses, rel=3e-5)
