"""What was converted to FP8 and back is converted again: the values stay, though codes and scales may be others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8 import Format, quantize
from megatron_fp8.backends import emulated
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Recipe,
)

HYBRID: Any = {"fp8_format": Format.HYBRID}
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(margin=1),
    "tensorwise": Float8CurrentScaling(),
    "tensorwise, powers of two": Float8CurrentScaling(use_power_2_scales=True),
    "rowwise": Float8RowwiseScaling(**HYBRID),
    "blockwise": Float8BlockScaling(**HYBRID),
    "blockwise, float32 scales": Float8BlockScaling(use_f32_scales=True, **HYBRID),
    "mxfp8": MXFP8BlockScaling(**HYBRID),
}
ROWS, COLS = 160, 320  # two blocks of 128 and a part of one


def drawn(scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(seed)) * scale


def matrices() -> Iterator[tuple[str, torch.Tensor]]:
    """Names and BF16 matrices."""
    yield "normal", drawn().bfloat16()
    exponents = torch.randint(-60, 60, (ROWS, COLS), generator=torch.Generator().manual_seed(1))
    yield "of all sizes", (drawn() * torch.exp2(exponents.float())).bfloat16()
    yield "large", drawn(2.0**120).bfloat16()
    yield "partly subnormal", drawn(2.0**-125).bfloat16()
    yield "subnormal", drawn(2.0**-131).bfloat16()
    zeros = drawn().bfloat16()
    zeros[:32], zeros[:, 64:256], zeros[40, 40] = 0.0, -0.0, 2.0**-133
    yield "blocks of zeros", zeros


def converted(
    x: torch.Tensor, recipe: Recipe, role: str, direction: Any, dtype: torch.dtype
) -> tuple[Any, torch.Tensor]:
    found = quantize(x, recipe, role, direction)
    return getattr(found, direction), found.dequantize(dtype)


@pytest.mark.parametrize("name", RECIPES)
def test_values_stay(name: str) -> None:
    """-0 and 0 too. Some recipe's codes do not: a block whose largest value was rounded down to a power of two times
    the format's largest has twice the scale the next time."""
    for what, x in matrices():
        for role in ("input", "weight", "grad_output"):
            for direction in ("rowwise", "columnwise"):
                _, once = converted(x, RECIPES[name], role, direction, torch.bfloat16)
                assert bool(once.isfinite().all()) and (once != 0).any(), what
                _, twice = converted(once, RECIPES[name], role, direction, torch.bfloat16)
                assert_same_bytes(twice, once, f"{what}, {role}, {direction}")


def test_codes_need_not_stay() -> None:
    x = drawn().bfloat16()
    first, once = converted(x, RECIPES["mxfp8"], "input", "rowwise", torch.bfloat16)
    second, _ = converted(once, RECIPES["mxfp8"], "input", "rowwise", torch.bfloat16)
    changed = (first.codes.view(torch.uint8) != second.codes.view(torch.uint8)).float().mean()
    assert 0 < changed < 0.1
    ratio = first.scale_inv.float() / second.scale_inv.float()
    assert set(ratio.unique().tolist()) == {1.0, 2.0}


ALL = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)  # every finite magnitude
BY_ROW = {
    "rowwise": Float8RowwiseScaling(**HYBRID),
    "blockwise": Float8BlockScaling(**HYBRID),
    "blockwise, float32 scales": Float8BlockScaling(use_f32_scales=True, **HYBRID),
    "mxfp8": MXFP8BlockScaling(**HYBRID),
}


@pytest.mark.parametrize("role", ["input", "grad_output"])
@pytest.mark.parametrize("name", BY_ROW)
def test_values_stay_whatever_the_largest_one_is(name: str, role: str) -> None:
    """A row for every BF16 magnitude, which is its largest. Scales that are powers of two cannot hold the very largest:
    what rounds up to 2^128 is decoded as Inf."""
    parts = torch.rand(len(ALL), 32, generator=torch.Generator().manual_seed(2)) * 2 - 1
    x = (parts * ALL[:, None].float()).bfloat16()
    x[:, 5] = ALL
    _, once = converted(x, BY_ROW[name], role, "rowwise", torch.bfloat16)
    bits = 4 if role == "input" else 3  # significant ones of E4M3 and E5M2
    too_large = ALL.float() >= 2.0**127 * (2 - 2.0**-bits)
    if name == "blockwise, float32 scales":
        assert bool(once.isfinite().all())
        divided = ALL.float() > 2.0**-110  # below, the scale would be above the largest float32
        assert_same_bytes(once[divided, 5], ALL[divided])
    else:
        assert torch.equal(~once[:, 5].isfinite(), too_large) and int(too_large.sum()) == 2 ** (7 - bits)
        x, once = x[~too_large], once[~too_large]
    _, twice = converted(once, BY_ROW[name], role, "rowwise", torch.bfloat16)
    assert_same_bytes(twice, once)


@pytest.mark.parametrize("scale", [3.3, 448.0 / 3.0, 2.0**-40 / 3.0])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_values_stay_under_a_scale_of_earlier_iterations(scale: float, fmt: Any) -> None:
    """Those that saturate and those that become zero too; codes as well."""
    rule = DelayedScaling(fp8_format=Format.E4M3 if fmt is E4M3 else Format.HYBRID).rule("grad_output")
    given = torch.tensor(scale, dtype=torch.float32)
    largest, smallest = fmt.max / scale, fmt.smallest / scale
    x = (drawn() * torch.logspace(-1, 1, ROWS)[:, None] * (largest * smallest) ** 0.5).bfloat16()
    x[0, :4] = torch.tensor([10 * largest, -2 * largest, smallest / 8, 0.0])
    once = emulated.quantize(x, rule, "rowwise", scale=given).tensor.rowwise
    values = once.dequantize(torch.bfloat16)
    assert float(values[0, 0]) == pytest.approx(largest, rel=2**-8) and values[0, 2] == 0
    twice = emulated.quantize(values, rule, "rowwise", scale=given).tensor.rowwise
    assert_same_bytes(twice.codes, once.codes)


@pytest.mark.parametrize("role", ["input", "weight"])
def test_float32_values_under_float32_scales_settle_in_bf16_after_once_more(role: str) -> None:
    """The largest value is no BF16 number, so the second conversion has another scale: a quarter of the values move by a
    BF16 unit in the last place. The codes stay, and from then on the values."""
    moved = []
    for name in ("tensorwise", "blockwise, float32 scales"):
        for seed in range(4):
            first, once = converted(drawn(seed=seed), RECIPES[name], role, "rowwise", torch.bfloat16)
            second, twice = converted(once, RECIPES[name], role, "rowwise", torch.bfloat16)
            _, thrice = converted(twice, RECIPES[name], role, "rowwise", torch.bfloat16)
            assert_same_bytes(second.codes, first.codes)
            assert_same_bytes(thrice, twice)
            changes = twice.float() / torch.where(once == 0, torch.ones_like(once), once).float() - 1
            assert bool((changes.abs() <= 2**-7)[once != 0].all())
            moved.append(float((once != twice).float().mean()))
    by_tensor, by_block = moved[:4], moved[4:]
    assert 0.1 < sum(by_block) / 4 < 0.4, by_block
    assert max(by_tensor) > 0, by_tensor  # about a third of a tensor's values, or none
