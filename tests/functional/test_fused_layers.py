"""Norm and SwiGLU fused with quantization in Megatron's layer: which kernels are launched, and the same bits as apart."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks.support.ranks import Layout, RankPool
from tests.support.long_cases import some
from tests.support.native_gpt import HOW, Seen, evaluated, gpu_checks, native_trainings

ONE = Layout()
# What casts one operand, for each kind of scale: amaxes first where the scale needs them.
PASSES = {"delayed": ("cast_tensor",), "rowwise": ("find_amaxes", "cast_rows"), "mxfp8": ("quantize_tiles",)}
QUANTISING = {"find_amaxes", "cast_tensor", "cast_rows", "quantize_tiles"}
# Of a layer's 4 x (x, w, dy): linear_qkv's and linear_fc1's x, linear_fc2's x, linear_fc1's dy; and all others.
OPERANDS = {"norm": 2, "swiglu": 1, "swiglu_grad": 1, "plain": 8}


_known: dict[str, list[Seen]] = {}


def trained(ranks: RankPool, layout: Layout, *cases: tuple[Any, ...]) -> list[list[Seen]]:
    """For each rank, what each case saw; a case is trained once."""
    keys = [repr((layout, *case)) for case in cases]
    new = {key: case for key, case in zip(keys, cases, strict=True) if key not in _known}
    if new:
        everyone = ranks(layout.model_ranks).run(native_trainings, layout, list(new.values()), timeout=300)
        _known.update(zip(new, map(list, zip(*everyone, strict=True)), strict=True))
    return [list(seen) for seen in zip(*(_known[key] for key in keys), strict=True)]


def named(kernel: str, source: str) -> str:
    if (kernel, source) == ("find_amaxes", "swiglu_grad"):
        return "find_gradient_amaxes"  # of both halves in one pass
    return kernel if source == "plain" else f"{kernel} of {source}"


@pytest.mark.parametrize("recipe", some(PASSES, "delayed", "mxfp8"))
def test_every_kernel_is_launched_and_nothing_is_written(ranks: RankPool, recipe: str) -> None:
    """A step of a layer that has its scales: each operand by its passes, each statistic once, no BF16 in between."""
    steps = 2 if recipe == "delayed" else 1
    ((fused, written),) = trained(ranks, ONE, *((recipe, how, {}, {}, steps) for how in HOW[:2]))
    expected = Counter(
        {named(kernel, source): n for source, n in OPERANDS.items() for kernel in PASSES[recipe]}
    )
    expected["_row_rstd"] = 3  # the final norm too
    if recipe == "delayed":
        expected["_update"] = 2  # one for each format
    assert fused.calls[-1] == expected
    # Written first: as many passes, all over matrices in memory, four of which were written for them.
    assert sum(written.calls[-1][kernel] for kernel in QUANTISING) == 12 * len(PASSES[recipe])
    assert written_sources(written) == {source: n for source, n in OPERANDS.items() if source != "plain"}
    assert computed(written) == set()
    assert fused.digests == written.digests and fused.losses == written.losses
    assert fused.counts == written.counts
    assert fused.counts[-1]["fp8_gemms"] == fused.counts[-1]["casts"] == 12


def written_sources(seen: Seen) -> dict[str, int]:
    """How many results of each kind were written to be read, in the last step."""
    prefix = "write_values of "
    return {
        kernel.removeprefix(prefix): n for kernel, n in seen.calls[-1].items() if kernel.startswith(prefix)
    }


def computed(seen: Seen) -> set[str]:
    """Kinds of what quantizing kernels computed as they read it, in the last step."""
    return {
        k.partition(" of ")[2] for k in seen.calls[-1] if " of " in k and not k.startswith("write_values")
    }


MOE = {
    "num_moe_experts": 2,
    "moe_ffn_hidden_size": 64,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
GROUPED = {**MOE, "moe_grouped_gemm": True}
ALL = {"norm", "swiglu", "swiglu_grad"}
RECOMPUTED = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
}


def test_recomputed_as_computed(ranks: RankPool) -> None:
    """What is computed by its reader is computed again by it; but for a norm that is recomputed by itself."""
    cases = [("mxfp8", "fused", fields, {}, 1) for fields in ({}, *RECOMPUTED.values())]
    ((plain, *found),) = trained(ranks, ONE, *cases)
    for name, seen in zip(RECOMPUTED, found, strict=True):
        assert seen.digests == plain.digests, name
        assert computed(seen) == (ALL - {"norm"} if name == "layernorm" else ALL), name
        assert not written_sources(seen), name


# Fields, what is computed by those that quantize it, and what is written all the same.
LAYERS: dict[str, tuple[dict[str, Any], set[str], dict[str, int]]] = {
    "stored input": ({"activation_func_fp8_input_store": True}, ALL, {}),
    # A router reads its norm; each expert's SwiGLU is weighted.
    "grouped experts": (GROUPED, ALL, {}),
    # linear_fc1 in BF16: its norm is Megatron's business, its gradient is needed as it is.
    "fc1 in BF16": ({"fp8_overrides": {"*linear_fc1": "bf16"}}, {"norm", "swiglu"}, {"swiglu_grad": 1}),
}
APART: dict[str, tuple[dict[str, Any], set[str]]] = {
    "fc2 in BF16": ({"fp8_overrides": {"*linear_fc2": "bf16"}}, {"norm"}),
    "wgrad in BF16": ({"fp8_wgrad": False}, set()),
    "biases, LayerNorm": ({"add_bias_linear": True, "normalization": "LayerNorm"}, set()),
}


def test_layers_of_all_kinds(ranks: RankPool) -> None:
    """What can be computed is, what cannot is not; the bits are those of results written first."""
    cases = [("mxfp8", how, fields, {}, 1) for fields, *_ in LAYERS.values() for how in HOW[:2]]
    cases += [("mxfp8", "fused", fields, {}, 1) for fields, _ in APART.values()]
    (found,) = trained(ranks, ONE, *cases)
    both = 2 * len(LAYERS)
    for name, fused, written in zip(LAYERS, found[:both:2], found[1:both:2], strict=True):
        _, by_reader, in_memory = LAYERS[name]
        assert computed(fused) == by_reader and written_sources(fused) == in_memory, name
        assert fused.digests == written.digests and fused.losses == written.losses, name
        assert computed(written) == set() and len(written_sources(written)) == len(by_reader | set(in_memory))
    for name, seen in zip(APART, found[both:], strict=True):
        assert computed(seen) == APART[name][1] and not written_sources(seen), name


HOOKED = {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True}
# Fields, options, and what is written all the same where experts are called as one.
EXPERTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, int]]] = {
    # Its SwiGLU is Megatron-Core's, which rounds otherwise: then all are called in turn.
    "one fc2 in BF16": ({"fp8_overrides": {"*experts.0.linear_fc2": "bf16"}}, {}, {}),
    # Hooks before each linear, which wait for gathered weights, are handed what it reads.
    "hooked": ({}, {"ddp": HOOKED}, {}),
}


@pytest.mark.parametrize("name", some(EXPERTS, "hooked"))
def test_experts_in_one_call_are_those_in_turn(ranks: RankPool, name: str) -> None:
    """To the bit, and as much is computed for each by those that quantize it."""
    fields, options, written = EXPERTS[name]
    cases = [("mxfp8", "fused", moe | fields, options, 1) for moe in (GROUPED, MOE)]
    ((grouped, in_turn),) = trained(ranks, ONE, *cases)
    assert grouped.digests == in_turn.digests and grouped.losses == in_turn.losses
    assert written_sources(grouped) == written
    kernel = "quantize_tiles of swiglu"
    assert grouped.calls[-1][kernel] == in_turn.calls[-1][kernel] > 0


def test_producers_that_do_not_know(ranks: RankPool) -> None:
    """Beside Megatron's own operations: a norm is the same to the bit; SwiGLU, there, rounds silu to BF16 too."""
    apart = {"bias_activation_fusion": False}
    cases = [("mxfp8", how, fields, {}, 1) for fields in ({}, apart) for how in ("fused", "apart")]
    ((fused, other, norm, other_norm),) = trained(ranks, ONE, *cases)
    assert computed(fused) == ALL and computed(norm) == {"norm"}
    assert computed(other) == computed(other_norm) == set() and not written_sources(other)
    assert norm.digests == other_norm.digests and norm.losses == other_norm.losses
    assert fused.counts == other.counts
    assert abs(fused.losses[0] - other.losses[0]) < 2e-3 * other.losses[0]


@pytest.mark.parametrize(
    ("recipe", "layout", "gathered"),
    [
        ("tensorwise", Layout(tp=2, sp=True), {}),
        # Shards of 32 tokens are no blocks of 128: gathered in BF16, which the norm writes for it.
        ("blockwise", Layout(tp=2, sp=True), {"norm": 2}),
    ],
)
def test_tensor_parallel(ranks: RankPool, recipe: str, layout: Layout, gathered: dict[str, int]) -> None:
    for fused, written in trained(ranks, layout, *((recipe, how, {}, {}, 1) for how in HOW[:2])):
        assert fused.digests == written.digests and fused.losses == written.losses
        assert written_sources(fused) == gathered
        assert computed(fused) == ALL - set(gathered)


def test_fp8_parameters(ranks: RankPool) -> None:
    """With fp8_param the step ends in one amax pass and one cast for each weight, and no weight is cast in forwards."""
    distributed = {"ddp": {"use_distributed_optimizer": True}}
    cases = [
        ("blockwise", "fused", {"fp8_param": bool(k)}, o, 2) for k, o in enumerate(({}, {}, distributed))
    ]
    ((without, *both),) = trained(ranks, ONE, *cases)
    for seen in both:
        assert seen.losses == without.losses
        assert (seen.calls[1]["_piece_amax"], seen.calls[1]["_piece_cast"]) == (4, 4)
        assert seen.calls[1]["quantize_tiles"] == without.calls[1]["quantize_tiles"] - 4 == 4
        assert seen.calls[1]["quantize_tiles of norm"] == 2


def test_evaluation_writes_nothing(ranks: RankPool) -> None:
    """Without gradients only codes for fprop are made."""
    (seen,) = ranks(1).run(evaluated, "mxfp8")
    assert written_sources(seen) == {} and computed(seen) == {"norm", "swiglu"}


def test_the_gpu_check_sees_what_is_launched(ranks: RankPool) -> None:
    (right,) = ranks(1).run(gpu_checks, "fused")
    assert right.startswith("1 layers, 4 launches compute"), right
    (wrong,) = ranks(1).run(gpu_checks, "written")
    assert wrong.startswith("FAIL nothing is written between"), wrong
