"""Experts' codes and scales in two tensors: their sizes are known before the numbers of tokens, and nothing overlaps."""

from __future__ import annotations

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.backends import reference
from megatron_fp8.kernels.cpu import emulation
from megatron_fp8.linear import cpu_expert_batch
from megatron_fp8.linear.linear_ops import Call
from megatron_fp8.linear.saved_expert_activations import SavedExperts, SavedExpertsLayout
from megatron_fp8.linear.saved_tensor_layout import SideLayout
from megatron_fp8.linear.tensor_parallel import ALONE
from megatron_fp8.numerics.rule import Rule
from megatron_fp8.state.fp8_state import Fp8State
from megatron_fp8.tensor import QuantizedSide
from tests.support.sites import ALL_RECIPES, make_site, randn

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
        found.append(reference.quantize(x, rule, "columnwise").tensor.columnwise if count else None)
    return found


@pytest.mark.parametrize("turned", [True, False], ids=["turned", "in row order"])
@pytest.mark.parametrize("name", RULES)
def test_what_was_packed_comes_out(name: str, turned: bool) -> None:
    """Whatever the numbers: none, one, a block, one more; nobody writes past the end, where memory ends."""
    rule = RULES[name]
    assert rule is not None
    layout = SavedExpertsLayout(SideLayout.of(rule, turned), K)
    for numbers in [(0, 0, 0), (1, 1, 1, 1), (129, 0, 128, 1, 33), (257,), (5, 127, 300, 0)]:
        given = sides(rule, numbers)
        packed = layout.pack(given, numbers, CPU)
        for tensor, room in zip(packed, layout.empty(sum(numbers), len(numbers), CPU), strict=True):
            assert tensor.shape == room.shape and tensor.is_contiguous()
        for found, side in zip(layout.unpack(packed, numbers), given, strict=True):
            assert (found is None) == (side is None)
            if found is None or side is None:
                continue
            assert_same_bytes(found.codes, side.codes)
            assert_same_bytes(found.scale_inv, side.scale_inv)
            assert found.granularity == side.granularity and found.pow2 == side.pow2
            alone = layout.of.codes(*side.codes.shape), layout.of.scales(*side.codes.shape)
            for part, lies in zip((found.codes, found.scale_inv), alone, strict=True):
                assert part.stride() == lies.strides
                assert turned or part.storage_offset() % 16 == 0


@pytest.mark.skipif(emulation.inner_loop() is None, reason="no inner loop for products")
@pytest.mark.parametrize("name", ["delayed", "rowwise", "blockwise", "mxfp8"])
def test_a_stack_lies_as_if_it_were_packed(name: str) -> None:
    """An expert without tokens has scales in a stack too, where they do not go by blocks."""
    state, numbers = Fp8State(), (40, 0, 129, 0)
    calls = [
        Call(make_site(name, state=state, recording=False)[0], ALONE, True, True, False, False)
        for _ in numbers
    ]
    x, weights = randn(sum(numbers), K, seed=1), [randn(96, K, seed=e) for e in range(len(numbers))]
    kept = cpu_expert_batch.weights_of(x, weights, calls, [True])
    _, operands, _ = cpu_expert_batch.forward(x, weights, calls, numbers, kept, needs_wgrad=True)
    assert kept and operands is not None
    each = [operands.side(operands.columnwise, e) for e in range(len(numbers))]
    wanted = SavedExpertsLayout(SideLayout.of(operands.rule, True), K).pack(each, numbers, CPU)
    for found, one in zip(cpu_expert_batch.packed(operands), wanted, strict=True):
        assert_same_bytes(found, one)


def test_what_hooks_give_back_is_looked_at() -> None:
    rule, numbers = RULES["blockwise"], (5, 0, 7)
    assert rule is not None
    layout = SavedExpertsLayout(SideLayout.of(rule, True), K)
    codes, scales = layout.pack(sides(rule, numbers), numbers, CPU)
    for wrong in (
        SavedExperts(codes[:-1], scales),
        SavedExperts(codes, scales[1:]),
        SavedExperts(codes, scales.double()),
    ):
        with pytest.raises(ValueError, match="came back from a hook for saved tensors, where torch"):
            layout.unpack(wrong, numbers)
    gaps = torch.stack([codes, codes], 1)[:, 0]
    for one, other in zip(
        layout.unpack(SavedExperts(gaps, scales), numbers),
        layout.unpack(SavedExperts(codes, scales), numbers),
        strict=True,
    ):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert_same_bytes(one.codes, other.codes)


@pytest.mark.parametrize("name", RULES)
def test_codes_and_scales_that_are_a_part_of_other_memory(name: str) -> None:
    """As hooks that offload bring them back: views into one large tensor."""
    numbers, layout = (5, 0, 40), SavedExpertsLayout(SideLayout.of(RULES[name], True), K)
    packed = layout.pack(sides(RULES[name], numbers), numbers, CPU)
    within = SavedExperts(*(torch.cat([tensor[:3], tensor])[3:] for tensor in packed))
    assert all(tensor.storage_offset() == 3 for tensor in within)
    for found, wanted in zip(layout.unpack(within, numbers), layout.unpack(packed, numbers), strict=True):
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert_same_bytes(found.codes, wanted.codes)
            assert_same_bytes(found.scale_inv, wanted.scale_inv)
