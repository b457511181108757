"""Values of each format: all of them, spacing, rounding error by magnitude.

The input for each format is the values of its codes and how the package rounds to it. Everything else
(largest and smallest value, dynamic range, subnormals, spacing, error) is computed from these, so no number
can be mistyped.

E4M3, E5M2, E8M0 and E2M1 come from numerics/; BF16 and FP16 from torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from ..numerics import nvfp4
from ..numerics.cast import cast, decode
from ..numerics.formats import E2M1, E4M3, E5M2, E8M0, FloatFormat
from ..numerics.scaling import e8m0_to_scale_inv

_GRID = 4096  # points per power of two: includes all values and midpoints for mantissas of up to 11 bits


@dataclass(frozen=True, eq=False)
class Described:
    """A format with its values and its rounding.

    Attributes:
        name, bits, use: 'e4m3', 8, and its purpose in a few words.
        values: float64 [2^bits], by code, including NaN and Inf.
        rounded: float64 of any shape -> the nearest values, as the package (or torch) rounds; None for a
            format of scales.
    """

    name: str
    bits: int
    use: str
    values: torch.Tensor
    rounded: Callable[[torch.Tensor], torch.Tensor] | None

    @cached_property
    def positive(self) -> torch.Tensor:
        """float64, ascending: the distinct finite values above zero."""
        return self.values[self.values.isfinite() & (self.values > 0)].unique()

    @cached_property
    def mantissa_bits(self) -> int:
        """Mantissa bits: 2^bits values lie in [1, 2)."""
        return round(math.log2(int(((self.positive >= 1) & (self.positive < 2)).sum())))

    @cached_property
    def max(self) -> float:
        """The largest finite value."""
        return float(self.positive[-1])

    @cached_property
    def smallest(self) -> float:
        """The smallest value above zero."""
        return float(self.positive[0])

    @cached_property
    def smallest_normal(self) -> float:
        """The smallest value with all mantissa bits; values below it are evenly spaced (subnormal)."""
        return float(self.positive[2**self.mantissa_bits - 1])


@dataclass(frozen=True)
class Interval:
    """A format in [2^exponent, 2^(exponent + 1)).

    Attributes:
        values: number of values in the interval.
        spacing: distance between them; None without values.
        worst_relative_error, rms_relative_error: of rounding, largest and root mean square; None for scales. 1
            means that everything below the smallest value becomes 0. Above the largest value FP8 saturates,
            BF16 and FP16 overflow (Inf); an interval that contains the largest value is counted up to it.
    """

    exponent: int
    values: int
    spacing: float | None
    worst_relative_error: float | None
    rms_relative_error: float | None


@cache
def all_formats() -> tuple[Described, ...]:
    """E4M3, E5M2, E8M0, BF16, FP16, E2M1."""
    return (
        _element(E4M3, "weights and activations"),
        _element(E5M2, "gradients (hybrid)"),
        _scale(E8M0, "scales of MX blocks"),
        _torch("bf16", torch.bfloat16, "what FP8 is compared with"),
        _torch("fp16", torch.float16, "needs a loss scale"),
        _e2m1(),
    )


@cache
def by_magnitude(described: Described) -> list[Interval]:
    """Intervals from one power of two below the smallest value to one above the largest."""
    positive = described.positive
    first, last = _exponent(described.smallest) - 1, _exponent(described.max) + 1
    exponents = torch.frexp(positive)[1] - 1
    found = []
    for exponent in range(first, last + 1):
        inside = positive[exponents == exponent]
        spacing = None
        if len(inside):
            at = int((positive == inside[0]).nonzero()[0])
            spacing = float(positive[at + 1] - positive[at]) if at + 1 < len(positive) else None
        elif exponent == first and described.rounded is not None:
            spacing = described.smallest  # between 0 and the smallest value
        found.append(Interval(exponent, len(inside), spacing, *_errors(described, exponent)))
    return found


def _errors(described: Described, exponent: int) -> tuple[float | None, float | None]:
    if described.rounded is None:
        return None, None
    steps = torch.arange(_GRID, dtype=torch.float64, device="cpu") / _GRID
    x = torch.ldexp(1 + steps, torch.tensor(exponent, dtype=torch.int64, device="cpu"))
    # Only up to the format's largest value, and within float32, from which the package casts.
    x = x[x <= (described.max if x[0] <= described.max else torch.finfo(torch.float32).max)]
    if not len(x):
        return None, None
    relative = (described.rounded(x) - x).abs() / x
    return float(relative.max()), float(relative.square().mean().sqrt())


def _exponent(value: float) -> int:
    return math.frexp(value)[1] - 1


def _codes(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device="cpu")


def _element(fmt: FloatFormat, use: str) -> Described:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return decode(cast(x.to(torch.float32), None, fmt)).to(torch.float64)

    codes = _codes(256).to(torch.uint8).view(fmt.dtype)
    return Described(fmt.name, 8, use, decode(codes).to(torch.float64), rounded)


def _scale(fmt: FloatFormat, use: str) -> Described:
    return Described(fmt.name, 8, use, e8m0_to_scale_inv(_codes(256).to(torch.uint8)).to(torch.float64), None)


def _torch(name: str, dtype: torch.dtype, use: str) -> Described:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32).to(dtype).to(torch.float64)

    values = _codes(65536).to(torch.int16).view(dtype).to(torch.float64)
    return Described(name, 16, use, values, rounded)


def _e2m1() -> Described:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return values[nvfp4.encode(x.to(torch.float32)).to(torch.int64)]

    values = nvfp4.values(nvfp4.pack(_codes(16).to(torch.uint8)[None]), torch.float64)[0]
    return Described(E2M1.name, 4, "nvfp4", values, rounded)
