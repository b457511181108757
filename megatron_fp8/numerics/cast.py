"""Casts to and from 8-bit codes: saturating, stochastic, and exact decoding.

There is one form of the cast: ``code = RNE(clamp(float32(x) * float32(scale)))``, with the product in float32. NaN ->
0x7F in both formats, +-Inf -> +-max, -0 keeps its sign, overflow saturates, nothing is flushed to zero.

Rejected: ``x.to(torch.float8_e4m3fn)`` alone. Its result above 448 changed between torch releases (NaN before 2.12,
saturation after; Inf for E5M2), and its NaN code has the sign. Rejected too: ``x / scale_inv`` and products in
bfloat16, which differ from the form above in a few codes per 10,000 and in 1-3 % of codes.

Decoding is integer arithmetic: the code's bits are shifted into bfloat16's exponent and mantissa fields and rebiased
by one exact multiplication, since torch's own float8 -> bfloat16 conversion is not vectorised on CPU (10 x slower).

On a GPU no code path depends on values, since reading one waits for the GPU: NaN codes are always corrected, and
torch's own conversion, vectorised there, decodes.

This is the implementation to compare with docs/numerics.md. Kernels give the same bytes, faster; kernels/cast_dispatch.py
chooses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import host_sync
from .formats import FloatFormat, format_of
from .subnormals import keep_subnormals

NAN_CODE = 0x7F
CHUNK, GPU_CHUNK = 1 << 20, 1 << 26
"""Elements per chunk: intermediates stay in cache, and small enough for malloc to reuse. On a GPU each pass is a launch,
so only memory limits the chunk."""
_INF_BITS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
_INT_VIEW = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def check_float(x: torch.Tensor) -> None:
    """Raises ValueError unless x is float32, bfloat16 or float16: the dtypes that can be quantized."""
    if x.dtype not in _INF_BITS:
        raise ValueError(
            f"cannot quantize a tensor of dtype {x.dtype}: float32, bfloat16 or float16 is needed; convert it first"
        )


def magnitude_bits(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns |x| as integers with the same order, x's shape, and the integer of +Inf (greater ones are NaN)."""
    check_float(x)
    int_dtype = _INT_VIEW[x.dtype]
    return x.view(int_dtype) & torch.iinfo(int_dtype).max, _INF_BITS[x.dtype]


def chunks(rows: int, elements: int, device: torch.device) -> Iterator[slice]:
    """Yields slices of a first dimension of ``rows`` that split ``elements`` into runs of about CHUNK (or GPU_CHUNK)."""
    step = max(1, (GPU_CHUNK if device.type == "cuda" else CHUNK) * rows // max(elements, 1))
    for start in range(0, rows, step):
        yield slice(start, start + step)


@keep_subnormals
def cast(
    x: torch.Tensor, scale: torch.Tensor | None, fmt: FloatFormat, *, bounded: bool = False
) -> torch.Tensor:
    """Returns codes of ``x * scale``: saturating round-to-nearest-even (OFP8 section 5; the saturating mode).

    Args:
        x: any shape; float32, bfloat16 or float16.
        scale: float32, broadcastable to x, finite and positive; None means 1.
        fmt: E4M3 or E5M2.
        bounded: x is known to be finite and scale to be at most fmt.max / amax, so that a product exceeds fmt.max
            only by its rounding: nothing saturates, and the clamp is skipped.

    Returns:
        A tensor of fmt.dtype with x's shape. NaN -> 0x7F, +-Inf -> +-max, +-0 keeps its sign.

    Raises:
        ValueError: x is not a floating dtype that can be quantized.
    """
    check_float(x)
    if x.ndim == 0:
        return cast(x[None], scale, fmt, bounded=bounded)[0]
    if x.ndim > 1 and x.shape[0] == 1:  # chunks split the first dimension
        inner = scale[0] if scale is not None and scale.ndim == x.ndim else scale
        return cast(x[0], inner, fmt, bounded=bounded)[None]
    codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    scale_by_row = scale is not None and scale.ndim == x.ndim and scale.shape[0] > 1
    parts = list(chunks(x.shape[0], x.numel(), x.device))
    if not parts:
        return codes
    scratch = torch.empty(x[parts[0]].shape, dtype=torch.float32, device=x.device)
    for part in parts:
        product = x[part]
        out = scratch[: product.shape[0]]
        if x.dtype != torch.float32:
            product = out.copy_(product)
        if scale is not None:
            product = torch.mul(product, scale[part] if scale_by_row else scale, out=out)
        if not bounded:
            product = torch.clamp(product, -fmt.max, fmt.max, out=out)
        codes[part].copy_(product)
    return codes if bounded else _one_nan(codes)


def _one_nan(codes: torch.Tensor) -> torch.Tensor:
    """Replaces the NaN code 0xFF by 0x7F, in place: torch's conversion keeps the sign."""
    byte = codes.view(torch.uint8)
    if codes.numel() and (host_sync.read_waits(codes.device) or bool(byte.max() == 0xFF)):
        byte.masked_fill_(byte == 0xFF, NAN_CODE)
    return codes


@keep_subnormals
def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32, *, finite: bool = False) -> torch.Tensor:
    """Returns the exact numbers of codes. E5M2's Inf codes give Inf, 0x80 gives -0.

    NaN codes, of either sign, give the canonical quiet NaN of dtype: 0x7FC0, 0x7E00, 0x7FC00000, 0x7FF8000000000000.

    Args:
        codes: float8_e4m3fn or float8_e5m2, any shape; the result has its strides.
        dtype: bfloat16, float16 (E5M2: exact; E4M3: exact), float32 or float64.
        finite: no code is known to be NaN or Inf, so the check is skipped.
    """
    fmt = format_of(codes.dtype)
    assert fmt.signed, "E8M0 is a scale format: see scaling.e8m0_to_scale_inv"
    if codes.ndim == 0:
        return decode(codes[None], dtype, finite=finite)[0]
    if codes.ndim == 2 and not codes.is_contiguous() and codes.t().is_contiguous():
        return decode(codes.t(), dtype, finite=finite).t()
    if host_sync.read_waits(codes.device):
        return codes.to(dtype) if finite else one_nan_(codes.to(dtype))
    if not (finite or known_finite(codes, fmt)):
        return one_nan_(codes.to(torch.float32).to(dtype))
    # The sign-extended code is shifted so that its magnitude starts at the wider float's low exponent bits.
    wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    values = torch.empty(codes.shape, dtype=wide, device=codes.device)
    bits = values.view(_INT_VIEW[wide])
    shift = (7 if wide == torch.bfloat16 else 23) - fmt.mantissa_bits
    keep = (0x7F << shift) - (0x80 << (8 * wide.itemsize - 8))
    rebias = 2.0 ** (127 - fmt.bias)
    for part in chunks(codes.shape[0], codes.numel(), codes.device):
        bits[part].copy_(codes[part].view(torch.int8)).bitwise_left_shift_(shift).bitwise_and_(keep)
        values[part].mul_(rebias)
    return values.to(dtype)


def one_nan_(values: torch.Tensor) -> torch.Tensor:
    """Sets every NaN to one bit pattern, in place: the quiet NaN without sign or payload.

    Conversions and products give NaN different bits on different processors.
    """
    return values.masked_fill_(values.isnan(), math.nan)


def known_finite(codes: torch.Tensor, fmt: FloatFormat) -> bool:
    """Whether no code is NaN or Inf: all magnitudes are below the first special code. Always False on a GPU (no
    read)."""
    first = 0x7C if fmt.has_inf else 0x7F
    if host_sync.read_waits(codes.device):
        return False
    if codes.numel() == 0:
        return True
    return bool(codes.view(torch.int8).max() < first) and bool(codes.view(torch.uint8).max() < 0x80 + first)


@dataclass(frozen=True)
class RandomKey:
    """The identity of one stream of random bits. It depends on neither layout nor device, so results do not either.

    seed and site make Philox's key, iteration and microbatch the upper half of its counter; each is taken mod 2^32.
    """

    seed: int
    site: int = 0
    iteration: int = 0
    microbatch: int = 0


def philox_bits(index: torch.Tensor, key: RandomKey) -> torch.Tensor:
    """Returns 32 random bits per element, int64 in [0, 2^32): the first of ``philox_words`` at counter = index."""
    return philox_words(index, key)[0]


def philox_words(
    index: torch.Tensor, key: RandomKey
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the four words of Philox4x32-10 (Salmon et al., SC 2011) at counter = index.

    Args:
        index: int64, any shape.
        key: the stream.

    Returns:
        int64 in [0, 2^32), index's shape each.
    """
    mask = 0xFFFFFFFF
    c0, c1 = index & mask, (index >> 32) & mask
    c2 = torch.full_like(c0, key.iteration & mask)
    c3 = torch.full_like(c0, key.microbatch & mask)
    k0, k1 = key.seed & mask, key.site & mask
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product1 >> 32) & mask) ^ c1 ^ k0,
            product1 & mask,
            ((product0 >> 32) & mask) ^ c3 ^ k1,
            product0 & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


@keep_subnormals
def cast_stochastic(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    fmt: FloatFormat,
    key: RandomKey,
    *,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns codes of ``x * scale`` rounded up or down at random, so that the expected value is exact.

    Random bits are added below the last mantissa bit of the format, then the lower bits are dropped. Saturation,
    subnormals, NaN and Inf are as in ``cast``.

    Args:
        x, scale, fmt: as in ``cast``.
        key: the random stream.
        index: int64, x's shape: logical element indices; default: 0, 1, 2, ... in row-major order.
    """
    check_float(x)
    product = x.to(torch.float32) if scale is None else x.to(torch.float32) * scale
    if index is None:
        index = torch.arange(x.numel(), device=x.device, dtype=torch.int64).view(x.shape)
    magnitude = (
        product.abs().clamp_(max=fmt.max).nan_to_num_(nan=0.0).contiguous().view(torch.int32).to(torch.int64)
    )
    exponent = magnitude >> 23
    mantissa = (magnitude & 0x7FFFFF) | ((exponent > 0).to(torch.int64) << 23)
    exponent = exponent.clamp_(min=1) - 127
    # Below the smallest normal exponent the grid step is constant, so more bits are dropped.
    grid = exponent.clamp(min=1 - fmt.bias)
    dropped = 23 - fmt.mantissa_bits + grid - exponent
    # A random word has 32 bits: bits below 2^-32 of a grid step are dropped first.
    mantissa = mantissa >> (dropped - 32).clamp_(0, 62)
    dropped = dropped.clamp_(max=32)
    bits = philox_bits(index, key) & ((1 << dropped) - 1)
    mantissa_out = (mantissa + bits) >> dropped
    rounded = torch.ldexp(mantissa_out.to(torch.float32), (grid - fmt.mantissa_bits).to(torch.int32))
    codes = torch.copysign(rounded.clamp_(max=fmt.max), product).to(fmt.dtype)
    codes.view(torch.uint8).masked_fill_(product.isnan(), NAN_CODE)
    return codes
