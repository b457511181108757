"""From the largest magnitude to a scale. Every number here is bit-exact on every device; the traps are named below.

``scale`` multiplies on the way in (code = cast(x * scale)), ``scale_inv`` on the way out. An amax is float32, ignores
NaN (the health counts see those), can be Inf, and is 0 for an empty tensor.

Traps avoided: ``448.0 / tensor`` in torch multiplies by a reciprocal and differs from IEEE division in 27 % of cases, so
the numerator is a tensor; a power of two below x is found by clearing mantissa bits, never by floor(log2(x)), which is
wrong one ulp below a power of two.
"""

from __future__ import annotations

import torch

from .cast import magnitude_bits
from .formats import FloatFormat

FLT_MAX = torch.finfo(torch.float32).max
_EXPONENT_MASK = 0x7F800000


def finite_magnitudes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What every amax of x is made from, after one look at x.

    Returns:
        bits: integers, x's shape, that sort like |x|; a NaN has become 0.
        amax: float32 [], of all of x: NaN ignored, Inf kept, 0 if empty.
        nonfinite: int64 [], how many elements are NaN or Inf; None if none is.
    """
    bits, inf = magnitude_bits(x)
    if x.numel() == 0:
        return bits, torch.zeros((), device=x.device), None
    largest = bits.amax()
    nonfinite = None
    if bool(largest >= inf):
        nonfinite = (bits >= inf).sum()
        bits = bits.masked_fill(bits > inf, 0)
        largest = bits.amax()
    return bits, largest.view(x.dtype).to(torch.float32), nonfinite


def reduce_magnitudes(bits: torch.Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """float32 amax over dims (dropped) of finite_magnitudes' bits of a tensor of this dtype; 0 where dims are empty."""
    if any(bits.shape[d] == 0 for d in dims):
        shape = [n for d, n in enumerate(bits.shape) if d not in dims]
        return torch.zeros(shape, device=bits.device)
    return bits.amax(dims).view(dtype).to(torch.float32)


def compute_amax(x: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Largest |x| over the elements that are not NaN.

    Args:
        x: float32, bfloat16 or float16.
        dim: dimension(s) to reduce (dropped from the shape); None reduces all to shape [].

    Returns:
        float32. Inf if an Inf is there; 0 where every element is NaN or none is left to reduce.
    """
    bits, amax, _ = finite_magnitudes(x)
    if dim is None:
        return amax
    dims = (dim,) if isinstance(dim, int) else dim
    return reduce_magnitudes(bits, tuple(d % x.ndim for d in dims), x.dtype)


def round_down_to_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two <= x, for positive normal float32 x: the mantissa bits are cleared."""
    return (x.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)


def compute_scale(
    amax: torch.Tensor, fmt: FloatFormat, *, margin: int = 0, epsilon: float = 0.0, pow2: bool = False
) -> torch.Tensor:
    """scale = fmt.max / max(amax, epsilon) * 2^-margin, in IEEE float32.

    Args:
        amax: float32, any shape, >= 0.
        fmt: the format whose range is to be filled.
        margin: powers of two of headroom left below fmt.max.
        epsilon: amax is taken to be at least this (0: off).
        pow2: round the scale down to a power of two.

    Returns:
        float32, amax's shape. 1 where amax is 0 or Inf; FLT_MAX (2^127 with pow2) where the quotient overflows.
    """
    if epsilon:
        amax = amax.clamp(min=epsilon)
    scale = torch.full_like(amax, fmt.max) / amax
    if margin:
        scale = scale * 2.0**-margin
    scale = scale.clamp(max=FLT_MAX)
    if pow2:
        scale = round_down_to_power_of_two(scale)
    return torch.where((amax == 0) | amax.isinf(), torch.ones_like(scale), scale)


def compute_scale_inv(scale: torch.Tensor) -> torch.Tensor:
    """IEEE float32 1 / scale; it may be subnormal and is not flushed."""
    return torch.ones_like(scale) / scale


def compute_e8m0(amax: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """MX block scale, rounded UP so that no element saturates (arXiv 2506.08027; OCP's reference rounds down).

    Args:
        amax: float32, any shape, >= 0; Inf is taken as the largest scale.
        fmt: element format.

    Returns:
        uint8, amax's shape: ceil(log2(amax / fmt.max)) + 127, clamped to [0, 254]; 0 for amax 0.
    """
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - fmt.max_exponent + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    exponent = torch.where(amax.isinf(), torch.full_like(exponent, 254), exponent)
    return exponent.clamp_(0, 254).to(torch.uint8)


def e8m0_to_scale_inv(e8m0: torch.Tensor) -> torch.Tensor:
    """float32 2^(e8m0 - 127) of uint8 exponents, exactly (2^-127 is subnormal)."""
    return _power_of_two(e8m0.to(torch.int32) - 127)


def e8m0_to_scale(e8m0: torch.Tensor) -> torch.Tensor:
    """float32 2^(127 - e8m0) of uint8 exponents, exactly (2^-127 is subnormal)."""
    return _power_of_two(127 - e8m0.to(torch.int32))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    # Built from bits: exp2 may be off by an ulp; -127 is float32's subnormal 0x00400000.
    bits = torch.where(exponent > -127, (exponent + 127) << 23, torch.full_like(exponent, 0x00400000))
    return bits.view(torch.float32)
