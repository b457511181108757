"""Sums and extremes in C: every 16 bit number, every code, lengths around the borders of pieces, and odd blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.support import reference
from megatron_fp8.kernels.cpu import stats
from tests.support.statistics import blockwise_range

EVERY_16_BITS = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
EVERY_CODE = torch.arange(256, dtype=torch.int32).to(torch.uint8)
FORMATS = {torch.float8_e4m3fn: reference.E4M3, torch.float8_e5m2: reference.E5M2}
LENGTHS = [1, 7, 31, 33, 1023, 1024, 1025, 16383, 16384, 16385, 50_001]


def plainly(x: np.ndarray) -> list[float]:
    """``stats.measure`` in numpy, from float64."""
    good = x[np.isfinite(x)]
    size = np.abs(good)
    sums = [good.size, good.sum(), size.sum(), *((good**n).sum() for n in (2, 3, 4))]
    return [*sums, good.max(), -good.min(), -size[size > 0].min()]


def of_codes(x, made, scale, block) -> list[float]:
    """Error, underflows and overflows of one side."""
    return stats.measure(x, [stats.Side(made, scale, block, torch.finfo(made.dtype).max)])[1][0][:3]


def assert_values(x: torch.Tensor, what: str) -> None:
    found, wide = stats.measure(x.reshape(1, -1))[0], x.to(torch.float64).numpy()
    expected = plainly(wide)
    assert [found[i] for i in (0, 6, 7, 8)] == [expected[i] for i in (0, 6, 7, 8)], what
    good = np.abs(wide[np.isfinite(wide)])
    for i, power in zip(range(1, 6), (1, 1, 2, 3, 4), strict=True):
        assert abs(found[i] - expected[i]) <= 1e-13 * (good**power).sum(), f"{what}: sum {i}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number(dtype):
    """NaNs, infinities, subnormals and zeros of both signs among them, in an order that mixes them."""
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(0))
    assert_values(EVERY_16_BITS[order].view(dtype), str(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lengths_around_the_borders_of_pieces(dtype):
    x = torch.randn(max(LENGTHS), generator=torch.Generator().manual_seed(0)).to(dtype)
    for length in LENGTHS:
        for first in (0, 3):  # unaligned too
            assert_values(x[first : first + length].clone(), f"{dtype}, {length}")
            assert_values(x[first : first + length], f"{dtype}, {length} from {first}")


@pytest.mark.parametrize("made", FORMATS)
def test_every_code(made):
    """Of values that are what the codes stand for: no error, except where the code is zero and the value is not."""
    values = torch.from_numpy(FORMATS[made].values()).to(torch.float32)
    finite = values.isfinite()
    x = values[finite].reshape(1, -1)
    codes = EVERY_CODE[finite].view(made).reshape(1, -1)
    one = torch.ones((), dtype=torch.float32)
    assert of_codes(x, codes, one, (0, 0)) == [0, 0, 0]
    error, *counts = of_codes(x, torch.zeros_like(codes.view(torch.uint8)).view(made), one, (0, 0))
    assert error == pytest.approx(float((x.double() ** 2).sum()), rel=1e-14)
    assert counts == [int((x != 0).sum()), 0]
    beyond = int(((2 * x).abs() > FORMATS[made].largest).sum())
    assert of_codes(2 * x, codes, one, (0, 0))[2] == beyond > 0


@pytest.mark.parametrize(
    "block", [(0, 0), (1, 0), (0, 1), (1, 32), (32, 1), (1, 128), (128, 128), (5, 3), (1, 1500)]
)
def test_codes_under_any_block(block):
    """One scale a block, at the edges too: against a scale for each element."""
    generator = torch.Generator().manual_seed(0)
    for rows, cols in ((1, 1), (37, 131), (129, 2100), (300, 64)):
        x = torch.randn(rows, cols, generator=generator)
        codes = (
            torch.randint(0, 120, (rows, cols), generator=generator).to(torch.uint8).view(torch.float8_e4m3fn)
        )
        height, width = block[0] or rows, block[1] or cols
        down, across = -(-rows // height), -(-cols // width)
        scale = torch.rand(down, across, generator=generator) * 0.01
        each = np.repeat(np.repeat(scale.double().numpy(), height, 0), width, 1)[:rows, :cols]
        wide = x.double().numpy()
        meant = reference.E4M3.values()[codes.view(torch.uint8).numpy()] * each
        error, vanished, beyond = of_codes(x, codes, scale, block)
        assert error == pytest.approx(((wide - meant) ** 2).sum(), rel=1e-12), (rows, cols)
        assert vanished == (meant == 0).sum(), (rows, cols)
        assert beyond == (np.abs(wide) > 448 * each * (1 + 2.0**-21)).sum() > 0 or rows * cols == 1, (
            rows,
            cols,
        )


@pytest.mark.parametrize("block", [(1, 32), (32, 1), (4, 4), (3, 1000), (1000, 7), (1, 1)])
def test_ranges_of_any_block(block):
    x = torch.randn(65, 1100, generator=torch.Generator().manual_seed(0))
    x[::3, ::5] = 0
    x[4, 7] = torch.nan
    x[8:16] = 0
    wide = x.double().numpy()
    assert np.log2(stats.largest_ratio(x, block)) == pytest.approx(blockwise_range(wide, *block), rel=1e-12)
    assert stats.largest_ratio(torch.zeros(3, 5), block) == 1


def test_ranges_see_every_element_of_a_block():
    for at in range(70):
        x = torch.full((1, 70), 4.0)
        x[0, at] = -0.5
        assert stats.largest_ratio(x, (1, 32)) == 8, at


def test_what_c_does_not_read():
    x = torch.ones(4, 6)
    assert stats.usable(x)
    for other in (x.t(), x[:, 1:], x.to("meta"), x.double(), x[:0], torch._neg_view(x)):
        assert not stats.usable(other)
