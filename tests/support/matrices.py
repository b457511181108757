"""Matrices that hold every kind of number, and comparison with the emulated backend."""

from __future__ import annotations

import math

import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.backends.base import CastResult
from megatron_fp8.kernels.fused_quantize import RmsNorm, row_rstd
from megatron_fp8.kernels.quantize import Record, Sides

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where kernels run: compiled, or interpreted (tests/conftest.py)."""
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (7, 33), (200, 129), (1, 200), (129, 7)]
BYTES = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
EVERY_16_BITS = torch.arange(65536, dtype=torch.int32).to(torch.int16)


def random_bits(n: int) -> torch.Tensor:
    """float32 of random bits: every kind of number, NaN payloads included."""
    bits = torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(1))
    return bits.to(torch.int32).view(torch.float32)


def amaxes() -> torch.Tensor:
    """Zero, Inf, the extremes, random numbers, and each power of two times fp8 maxima with its neighbours."""
    special = [0.0, math.inf, 2.0**-149, 2.0**-126, 3.4028234663852886e38, 448.0, 57344.0, 1.0]
    powers = torch.exp2(torch.arange(-126, 118).float())
    edges = torch.cat([powers, 448 * powers[:230]])
    near = torch.cat([(edges.view(torch.int32) + d).view(torch.float32) for d in (-1, 0, 1)])
    any_bits = random_bits(20_000).abs()
    every_bfloat16 = EVERY_16_BITS[:0x7F80].view(torch.bfloat16).float()
    return torch.cat([torch.tensor(special), near, any_bits[~any_bits.isnan()], every_bfloat16])


def mixed(shape: tuple[int, int], dtype: torch.dtype, special: bool = False, seed: int = 0) -> torch.Tensor:
    """Normals over 24 octaves, zeros of both signs, blocks of zeros and of subnormals; NaN and Inf if special."""
    generator = torch.Generator().manual_seed(seed)

    def chosen(share: float) -> torch.Tensor:
        return torch.rand(shape, generator=generator) < share

    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-12, 12, shape, generator=generator).float())
    x[chosen(0.05)] = 0
    x[chosen(0.05)] = -0.0
    x[:, 128:] *= 1e-40  # float32 and bfloat16 subnormals, zeros in float16
    x[128:, :3] *= 1e-36
    x[:2, 32:64] = 0
    if special:
        for value in (float("nan"), float("inf"), -float("inf")):
            x[chosen(0.004)] = value
        x[0, 0] = float("nan")
        x[-1, -1] = -float("inf")
    x = x.to(dtype)
    if special:  # a NaN with its sign set, which no torch operation makes
        x.view(BYTES[dtype])[0, -1] = -1
    return x.to(DEVICE)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same matrix as a view of a wider one: rows are not adjacent."""
    wide = torch.full((x.shape[0], x.shape[1] + 5), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, 3:-2] = x
    return wide[:, 3:-2]


def assert_quantized(sides: Sides, expected: CastResult, what: str) -> None:
    """Codes and scales of the same directions, in all bytes; columnwise codes contiguous."""
    for name in ("rowwise", "columnwise"):
        mine, theirs = getattr(sides, name), getattr(expected.tensor, name)
        assert (mine is None) == (theirs is None), f"{what} {name}"
        if mine is not None:
            assert mine.codes.dtype == theirs.codes.dtype and mine.codes.is_contiguous(), f"{what} {name}"
            assert mine.scale_inv.dtype == theirs.scale_inv.dtype, f"{what} {name}"
            assert_same_bytes(mine.codes, theirs.codes, f"{what} {name} codes")
            assert_same_bytes(_packed(mine.scale_inv), _packed(theirs.scale_inv), f"{what} {name} scales")


def _packed(scale: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of its shape, which a dimension of 1 need not have."""
    return torch.empty(scale.shape, dtype=scale.dtype, device=scale.device).copy_(scale)


def assert_recorded(record: Record, expected: CastResult, what: str) -> None:
    """The same amax, in all bits, and count."""
    assert_same_bytes(record.amax, expected.amax, f"{what} amax")
    assert int(record.nonfinite) == int(expected.nonfinite or 0), f"{what} count"


def normalized(x: torch.Tensor, weight: torch.Tensor, zero_centered: bool = False) -> RmsNorm:
    """RMSNorm of x [rows, hidden], left to be computed by who quantizes it."""
    return RmsNorm(x, row_rstd(x, 1e-5), weight, float(zero_centered))
