"""Matrices that are cast and multiplied alike: each has the bytes that it has alone."""

from __future__ import annotations

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.kernels.cpu import batched_cast, emulation, matrix_quantize
from megatron_fp8.kernels.cpu.batched_cast import Parts, Side
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.rule import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Direction, Rule
from tests.support.sites import randn

pytestmark = pytest.mark.skipif(emulation.reason() is not None, reason="no C compiler")

ROWS, COLS, OTHER = (70, 0, 200, 1, 129), 160, 136
RULES = [
    Rule(E4M3, BLOCK_1X128, "pow2"),
    Rule(E4M3, BLOCK_128X128, "pow2"),
    Rule(E5M2, BLOCK_1X32, "e8m0"),
    Rule(E4M3, ROW, "pow2"),
    Rule(E5M2, TENSOR, "fp32"),
]


def parts(x: torch.Tensor, rule: Rule, direction: Direction, given: torch.Tensor | None) -> Parts:
    """x [sum of ROWS, cols], cut."""
    begins = [sum(ROWS[:i]) * x.shape[1] * x.element_size() + x.data_ptr() for i in range(len(ROWS))]
    scales = [None if given is None else given.data_ptr()] * len(ROWS)
    return Parts(begins, ROWS, x.shape[1], x.dtype, rule, direction, [None] * len(ROWS), scales)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("direction", ["rowwise", "columnwise", "both"])
def test_each_part_is_cast_as_alone(rule: Rule, direction: Direction) -> None:
    """In two dtypes, one part with NaN, under scales of its own and under one that was there."""
    assert batched_cast.in_c(rule, direction)
    for dtype, given in ((torch.bfloat16, None), (torch.float32, torch.tensor(3.0))):
        x = randn(sum(ROWS), COLS, seed=3).to(dtype)
        x[80, 7] = torch.nan
        scale = given if rule.granularity is TENSOR else None
        (cast,) = batched_cast.quantize([parts(x, rule, direction, scale)])
        assert cast.special == [0, 0, 1, 0, 0]
        for i, part in enumerate(x.split(ROWS)):
            for stack, (high, wide) in zip(cast.stacks, batched_cast._cuts(rule, direction), strict=True):
                codes, scale_inv = stack.part(i)
                assert codes.shape == part.shape
                if len(part):
                    (alone,) = matrix_quantize.quantize(
                        [matrix_quantize.CastInput(part, rule, [(high, wide)], scale=scale)]
                    )
                    assert_same_bytes(codes, alone.sides[0].codes)
                    assert_same_bytes(scale_inv.flatten(), alone.sides[0].scale_inv.flatten())


@pytest.mark.skipif(emulation.inner_loop() is None, reason="no inner loop for products")
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_each_product_is_that_of_the_parts_alone(rule: Rule) -> None:
    """Of parts turned, as weight gradients have them, and of parts as they lie; one has a NaN."""

    def alone(left: Side, right: Side, i: int, dtype: torch.dtype) -> torch.Tensor:
        done = emulation.multiply(*(side.operand(i)._replace(finite=False) for side in (left, right)), dtype)
        assert done is not None
        return done

    x = randn(sum(ROWS), COLS, seed=3)
    x[80, 7] = torch.nan
    other = randn(sum(ROWS), OTHER, seed=4)
    cast_x, cast_other = batched_cast.quantize(
        [parts(x, rule, "both", None), parts(other, rule, "both", None)]
    )
    assert batched_cast.taken(rule)
    these = [0, 2, 3, 4]
    a, b = (
        Side(cast_other.stacks[-1], True, rule, cast_other.special),
        Side(cast_x.stacks[-1], True, rule, cast_x.special),
    )
    for dtype, add in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
        outs = [torch.ones(OTHER, COLS, dtype=dtype) for _ in ROWS]
        missed = batched_cast.multiply(a, b, [out.data_ptr() for out in outs], dtype, these, add=add)
        assert missed == []
        for i in these:
            expected = alone(a, b, i, dtype)
            assert bool(expected.isnan().any()) == (i == 2)
            assert_same_bytes(outs[i], expected + 1 if add else expected, f"part {i}")
        assert outs[1].eq(1).all()
    rowwise = Side(cast_x.stacks[0], False, rule, cast_x.special)
    outs = [torch.empty(rows, rows, dtype=torch.float32) for rows in ROWS]
    assert (
        batched_cast.multiply(
            rowwise, rowwise, [out.data_ptr() for out in outs], torch.float32, these, add=False
        )
        == []
    )
    for i in these:
        assert_same_bytes(outs[i], alone(rowwise, rowwise, i, torch.float32), f"part {i}")


@pytest.mark.skipif(emulation.inner_loop() is None, reason="no inner loop for products")
def test_a_product_whose_scales_are_too_small_is_told() -> None:
    rule = Rule(E4M3, BLOCK_1X128, "pow2")
    x = randn(sum(ROWS), COLS, seed=3)
    x[70:270] *= 2.0**-120
    (cast,) = batched_cast.quantize([parts(x, rule, "both", None)])
    side = Side(cast.stacks[-1], True, rule, cast.special)
    outs = [torch.ones(COLS, COLS) for _ in ROWS]
    addresses = [out.data_ptr() for out in outs]
    assert batched_cast.multiply(side, side, addresses, torch.float32, [0, 2, 4], add=False) == [2]
    assert outs[2].eq(1).all() and not outs[4].eq(1).any()


def test_rules_that_are_not_for_it() -> None:
    assert not batched_cast.in_c(Rule(E4M3, TENSOR, "fp32", stochastic=True), "both")
    assert not batched_cast.taken(Rule(E4M3, BLOCK_1X128, "fp32"))
