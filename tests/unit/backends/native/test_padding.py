"""Codes with zeros behind the matrix: products take them as they lie, with the bits of codes that end with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.backends.native import backend as native
from megatron_fp8.backends.native import placement, products
from megatron_fp8.backends.native.backend import padded_length
from megatron_fp8.backends.native.placement import place_codes
from megatron_fp8.backends.native.products import pad_to_same_length
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.recipe import CustomRecipe, Granularity, Rule
from megatron_fp8.tensor import Float8Tensor
from tests.support.native_casts import as_column_cast
from tests.support.products import operands
from tests.support.scaled_mm import fake_torch
from tests.support.sites import NATIVE_RECIPES as RECIPES

WHOLE = {"delayed": 16, "tensorwise": 16, "rowwise": 16, "blockwise": 128, "blockwise-fp32": 128, "mxfp8": 32}
"""As the table in docs/no_speed_up.md has it."""


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of all codes that were placed for a product, whether they were copied."""
    found: list[bool] = []

    def watched(codes: torch.Tensor, rows: int, k: int) -> torch.Tensor:
        placed = place_codes(codes, rows, k)
        found.append(placed.data_ptr() != codes.data_ptr())
        return placed

    for module in (products, placement):
        monkeypatch.setattr(module, "place_codes", watched)
    yield found


@pytest.mark.parametrize("name", WHOLE)
def test_products_take_them_as_they_lie(name: str, copied: list[bool]) -> None:
    """Also this package's own, and those of experts; codes that end with the matrix are copied by torch's."""
    every = WHOLE[name]
    assert all(padded_length(side.granularity) == every for side in operands("wgrad", RECIPES[name], 1, 4, 4))
    experts = [
        operands("wgrad", RECIPES[name], tokens, 48, 64) for tokens in (1, every - 1, every, every + 1)
    ]
    for ours in (False, True) if "blockwise" in name else (False,):
        with fake_torch(refuse={"block": "none", "block 1d": "none", "mx": "none"} if ours else {}):
            for out in (torch.float32, torch.bfloat16):
                plain, padded = ([torch.empty(48, 64, dtype=out) for _ in experts] for _ in "ab")
                native.grouped_gemm(*zip(*experts, strict=True), plain)
                copied.clear()
                native.grouped_gemm(
                    [as_column_cast(a) for a, _ in experts], [as_column_cast(b) for _, b in experts], padded
                )
                older = name == "blockwise-fp32" and not ours  # E5M2's, which wants two blocks
                assert copied.count(True) == (6 if older else 0), (copied, ours)
                assert_all_same_bytes(padded, plain)


@pytest.mark.parametrize("name", WHOLE)
def test_beside_codes_that_end_with_the_matrix_those_are_copied(name: str, copied: list[bool]) -> None:
    a, b = operands("wgrad", RECIPES[name], WHOLE[name] + 3, 48, 64)
    # As MX a product of blocks sums over whole 32s, of which one has fewer than a whole block.
    for refused in ({}, {"block": "none", "block 1d": "none"}) if name == "blockwise" else ({},):
        with fake_torch(refuse=refused):
            expected = native.gemm(a, b)
            for pair in ((as_column_cast(a), b), (a, as_column_cast(b))):
                first, second = pad_to_same_length(*pair)
                assert first.codes.shape[1] == second.codes.shape[1] == 2 * WHOLE[name]
                assert first.shape[1] == second.shape[1] == WHOLE[name] + 3
                copied.clear()
                assert_same_bytes(native.gemm(*pair), expected)
                assert copied.count(True) == 1


@pytest.mark.parametrize("other", [Granularity(0, 0), Granularity(1, 0)], ids=str)
def test_rules_that_fill_up_otherwise(other: Granularity) -> None:
    """A recipe of one's own, of which one operand reaches to whole 128s and the other to whole 16s."""
    for first, second in ((Granularity(1, 128), other), (other, Granularity(1, 128))):
        by_role = {"input": first, "grad_output": second, "weight": second}
        recipe = CustomRecipe(lambda role, by_role=by_role: Rule(E4M3, by_role[role], "pow2"))
        for tokens in (1, 17, 128, 130):
            with fake_torch():
                a, b = operands("wgrad", recipe, tokens, 48, 64)
                assert_same_bytes(native.gemm(as_column_cast(a), as_column_cast(b)), native.gemm(a, b))


def test_rows_that_are_lacking_are_what_lies_behind_them(copied: list[bool]) -> None:
    """Block-scaled products take rows in 4s. Those of no token may be NaN: they give rows that are cut off."""
    a, b = operands("fprop", RECIPES["blockwise"], 7, 48, 256)
    codes = torch.full((8, 256), 0x7F, dtype=torch.uint8).view(a.codes.dtype)
    scale = torch.full((2, 8), torch.nan)
    codes.view(torch.uint8)[:7], scale[:, :7] = a.codes.view(torch.uint8), a.scale_inv.t()
    roomy = replace(a, codes=codes[:7], scale_inv=scale[:, :7].t())
    with fake_torch():
        expected = native.gemm(a, b)
        copied.clear()
        assert_same_bytes(native.gemm(roomy, b), expected)
        assert copied == [False, False]
        native.gemm(a, b)
        assert copied[2:] == [True, False]


def test_other_matrices_are_refused_whatever_their_lengths() -> None:
    """Zeros make lengths equal, and contractions that differ stay different."""
    a, _ = operands("wgrad", RECIPES["tensorwise"], 13, 48, 64)
    _, b = operands("wgrad", RECIPES["tensorwise"], 14, 48, 64)
    with fake_torch():
        for pair in ((as_column_cast(a), as_column_cast(b)), (as_column_cast(a), b)):
            with pytest.raises(ValueError, match=r"contracts the last dimensions, \(48, 13\) and \(64, 14\)"):
                native.gemm(*pair)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8"])
def test_who_reads_values_does_not_see_them(name: str) -> None:
    _, side = operands("wgrad", RECIPES[name], 21, 48, 70)
    found = as_column_cast(side)
    assert (
        found.padding
        and found.shape == (70, 21)
        and Float8Tensor(None, found, torch.float32).shape == (21, 70)
    )
    assert_same_bytes(found.dequantize(), side.dequantize())
    assert_same_bytes(found.plain().codes, side.codes)
    assert_same_bytes(found.float_scale_inv(), side.float_scale_inv())
    assert repr(found) == repr(replace(found.plain(), scale_inv=found.scale_inv))
