"""Experts' codes and scales in two tensors: their sizes are known before the numbers of tokens, and nothing overlaps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.backends import reference
from megatron_fp8.backends.base import CastRequest
from megatron_fp8.linear.saved_operands import InputLayout, SavedInput, SideLayout
from megatron_fp8.numerics.rule import Rule
from megatron_fp8.tensor import QuantizedSide
from tests.support.sites import ALL_RECIPES, randn

K = 150
CPU = torch.device("cpu")
RULES = {
    name: rule
    for name in ("tensorwise", "rowwise", "blockwise", "blockwise-fp32", "mxfp8")
    for rule in [ALL_RECIPES[name].rule("input")]
    if rule is not None
} | {"squares": ALL_RECIPES["blockwise-fp32"].rule("weight")}


def sides(rule: Rule, numbers: tuple[int, ...]) -> list[QuantizedSide | None]:
    found: list[QuantizedSide | None] = []
    for e, count in enumerate(numbers):
        x = randn(count, K, seed=e)
        found.append(
            reference.quantize(CastRequest(x, rule, "columnwise")).tensor.columnwise if count else None
        )
    return found


def strides(shape: Sequence[int], of: Sequence[int]) -> list[int]:
    """Those that tell where an element lies: of one element along a dimension the stride says nothing."""
    return [stride for size, stride in zip(shape, of, strict=True) if size > 1]


@pytest.mark.parametrize("turned", [True, False], ids=["turned", "in row order"])
@pytest.mark.parametrize("name", RULES)
def test_what_was_packed_comes_out(name: str, turned: bool) -> None:
    """Whatever the numbers: none, one, a block, one more; nobody writes past the end, where memory ends."""
    rule = RULES[name]
    assert rule is not None
    layout = InputLayout(SideLayout.of(rule, turned), K)
    for numbers in [(0, 0, 0), (1, 1, 1, 1), (129, 0, 128, 1, 33), (257,), (5, 127, 300, 0)]:
        given = sides(rule, numbers)
        packed = layout.pack(given, numbers, CPU)
        for tensor, room in zip(packed, layout.empty(sum(numbers), len(numbers), CPU), strict=True):
            assert tensor.shape == room.shape and (len(numbers) == 1 or tensor.is_contiguous())
        for found, side in zip(layout.unpack(packed, numbers), given, strict=True):
            assert (found is None) == (side is None)
            if found is None or side is None:
                continue
            assert_same_bytes(found.codes, side.codes)
            assert_same_bytes(found.scale_inv, side.scale_inv)
            assert found.granularity == side.granularity and found.pow2 == side.pow2
            alone = layout.of.codes(*side.codes.shape), layout.of.scales(*side.codes.shape)
            for part, lies in zip((found.codes, found.scale_inv), alone, strict=True):
                assert strides(part.shape, part.stride()) == strides(part.shape, lies.strides)
                assert turned or part.storage_offset() % 16 == 0


def test_what_hooks_give_back_is_looked_at() -> None:
    rule, numbers = RULES["blockwise"], (5, 0, 7)
    assert rule is not None
    layout = InputLayout(SideLayout.of(rule, True), K)
    codes, scales = layout.pack(sides(rule, numbers), numbers, CPU)
    for wrong in (
        SavedInput(codes[:-1], scales),
        SavedInput(codes, scales[1:]),
        SavedInput(codes, scales.double()),
    ):
        with pytest.raises(ValueError, match="came back from a hook for saved tensors, where torch"):
            layout.unpack(wrong, numbers)
    gaps = torch.stack([codes, codes], 1)[:, 0]
    for one, other in zip(
        layout.unpack(SavedInput(gaps, scales), numbers),
        layout.unpack(SavedInput(codes, scales), numbers),
        strict=True,
    ):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert_same_bytes(one.codes, other.codes)


@pytest.mark.parametrize("name", RULES)
def test_codes_and_scales_that_are_a_part_of_other_memory(name: str) -> None:
    """As hooks that offload bring them back: views into one large tensor."""
    numbers, layout = (5, 0, 40), InputLayout(SideLayout.of(RULES[name], True), K)
    packed = layout.pack(sides(RULES[name], numbers), numbers, CPU)
    within = SavedInput(*(torch.cat([tensor[:3], tensor])[3:] for tensor in packed))
    assert all(tensor.storage_offset() == 3 for tensor in within)
    for found, wanted in zip(layout.unpack(within, numbers), layout.unpack(packed, numbers), strict=True):
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert_same_bytes(found.codes, wanted.codes)
            assert_same_bytes(found.scale_inv, wanted.scale_inv)
