"""Amaxes and scales, bit-exact on every device. The traps are listed below.

A code is cast(x * ``scale``), and decoding multiplies by ``scale_inv``. An amax is float32, ignores NaN (the health
counts have those), can be Inf, and is 0 for an empty tensor.

Traps avoided: ``448.0 / tensor`` in torch multiplies by a reciprocal and differs from IEEE division in 27 % of cases,
so the numerator is a tensor. A power of two below x comes from clearing mantissa bits, never from floor(log2(x)),
which is wrong one ulp below a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import host_sync
from .cast import chunks, magnitude_bits
from .formats import FloatFormat
from .subnormals import keep_subnormals

FLT_MAX = torch.finfo(torch.float32).max
FLT_MIN = torch.finfo(torch.float32).smallest_normal
_EXPONENT_MASK = 0x7F800000


def view_blocks(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Views a matrix as [row blocks, rows per block, column blocks, columns per block], zero-padded to whole blocks.

    0 rows or cols mean the whole extent of that dimension. A copy only if padding is needed.
    """
    (n_rows, rows), (n_cols, cols) = _cover(x.shape[0], rows), _cover(x.shape[1], cols)
    if (n_rows * rows, n_cols * cols) != tuple(x.shape):
        missing = (0, n_cols * cols - x.shape[1], 0, n_rows * rows - x.shape[0])
        # torch 2.8 refuses to pad empty tensors.
        pad = torch.nn.functional.pad
        x = pad(x, missing) if x.numel() else x.new_zeros(n_rows * rows, n_cols * cols)
    return x.view(n_rows, rows, n_cols, cols)


def _cover(size: int, block: int) -> tuple[int, int]:
    """Returns (number of blocks, block length) that cover size; block 0 is the whole."""
    return (1, size) if block == 0 else (-(-size // block), block)


def block_amaxes(
    x: torch.Tensor, blocks: Sequence[tuple[int, int]]
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Returns the amax of every block of a contiguous matrix, for one or more block sizes, in one pass over memory.

    Args:
        x: [rows, cols], float32, bfloat16 or float16; may be empty.
        blocks: block sizes (rows, cols), 0 meaning the whole extent.

    Returns:
        For each entry of blocks float32 [row blocks, column blocks]: NaN ignored, Inf kept, 0 if no number is left;
        and the number of NaN and Inf elements (int64 []). None means 0; on a GPU it is never None, since checking
        would wait.
    """
    rows, cols = x.shape
    if x.numel() == 0:
        shapes = [(_cover(rows, r)[0], _cover(cols, c)[0]) for r, c in blocks]
        return [torch.zeros(shape, device=x.device, dtype=torch.float32) for shape in shapes], None
    found: list[list[torch.Tensor]] = [[] for _ in blocks]
    nonfinite = None
    unit = math.lcm(*(r for r, _ in blocks if r))  # a chunk has whole blocks
    for part in chunks(-(-rows // unit), x.numel(), x.device):
        bits, inf = magnitude_bits(x[unit * part.start : unit * part.stop])
        if host_sync.read_waits(x.device) or bool(bits.max() >= inf):
            count = (bits >= inf).sum()
            nonfinite = count if nonfinite is None else nonfinite + count
            bits.masked_fill_(bits > inf, 0)
        for block, parts in zip(blocks, found, strict=True):
            parts.append(_max_over(view_blocks(bits, *block), (1, 3)))
    results = []
    for (block_rows, _), parts in zip(blocks, found, strict=True):
        amax = torch.cat(parts)
        results.append(
            (amax.amax(0, keepdim=True) if block_rows == 0 else amax).view(x.dtype).to(torch.float32)
        )
    return results, nonfinite


def _max_over(bits: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Returns bits.amax(dims). On CPU torch reduces short int32 rows six times as fast as int16 ones."""
    if bits.dtype == torch.int16 and bits.shape[-1] in range(2, 65):
        return bits.to(torch.int32).amax(dims).to(torch.int16)
    return bits.amax(dims)


def compute_amax(x: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Returns the largest |x| over the elements that are not NaN.

    Args:
        x: float32, bfloat16 or float16.
        dim: dimension(s) to reduce (dropped from the shape); None reduces all to shape [].

    Returns:
        float32. Inf if an element is Inf; 0 if every element is NaN or there are none.
    """
    bits, inf = magnitude_bits(x)
    bits = bits.masked_fill_(bits > inf, 0)
    dims = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = tuple(d % x.ndim for d in dims)
    if any(x.shape[d] == 0 for d in dims):
        return torch.zeros(
            [n for d, n in enumerate(x.shape) if d not in dims], device=x.device, dtype=torch.float32
        )
    return (_max_over(bits, dims) if dims else bits).view(x.dtype).to(torch.float32)


def round_down_to_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Returns the largest power of two <= x, for positive normal float32 x, by clearing the mantissa bits."""
    return (x.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)


@keep_subnormals
def compute_scale(
    amax: torch.Tensor, fmt: FloatFormat, *, margin: int = 0, epsilon: float = 0.0, pow2: bool = False
) -> torch.Tensor:
    """Returns (fmt.max * 2^-margin) / max(amax, epsilon), in IEEE float32; the product is exact.

    Args:
        amax: float32, any shape, >= 0.
        fmt: the format whose range the scaled values use.
        margin: powers of two of headroom below fmt.max.
        epsilon: lower bound of amax (0: off).
        pow2: round the scale down to a power of two.

    Returns:
        float32, amax's shape, a normal number. 1 where amax is 0 or Inf; FLT_MAX (2^127 with pow2) where the quotient
        overflows, 2^-126 where a large margin would make it subnormal.
    """
    if epsilon:
        amax = amax.clamp(min=epsilon)
    # The product first: fmt.max / amax overflows for a tiny amax, and the headroom would be lost.
    scale = torch.full_like(amax, fmt.max * 2.0**-margin) / amax
    # A subnormal scale, or 0, would have an infinite inverse, and no mantissa to round down.
    scale = scale.clamp(FLT_MIN, FLT_MAX)
    if pow2:
        scale = round_down_to_power_of_two(scale)
    return torch.where((amax == 0) | amax.isinf(), torch.ones_like(scale), scale)


@keep_subnormals
def compute_scale_inv(scale: torch.Tensor) -> torch.Tensor:
    """Returns IEEE float32 1 / scale; it may be subnormal and is not flushed."""
    return torch.ones_like(scale) / scale


def compute_e8m0(amax: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Returns MX block scales, rounded UP so that no element saturates (arXiv 2506.08027; OCP's reference rounds down).

    Args:
        amax: float32, any shape, >= 0; Inf gives the largest scale.
        fmt: element format.

    Returns:
        uint8, amax's shape: ceil(log2(amax / fmt.max)) + 127, clamped to [0, 254]; 0 for amax 0.
    """
    # Mantissas above fmt.max's, 1.75 in both formats, carry into the exponent.
    bits = amax.view(torch.int32)
    exponent = ((bits + 0x1FFFFF) >> 23).sub_(fmt.max_exponent)
    return exponent.clamp_(0, 254).masked_fill_(bits == 0x7F800000, 254).to(torch.uint8)


def e8m0_to_scale_inv(e8m0: torch.Tensor) -> torch.Tensor:
    """Returns float32 2^(e8m0 - 127) of uint8 exponents, exactly (2^-127 is subnormal); 0xFF gives NaN."""
    return _power_of_two(e8m0, False)


def e8m0_to_scale(e8m0: torch.Tensor) -> torch.Tensor:
    """Returns float32 2^(127 - e8m0) of uint8 exponents, exactly (2^-127 is subnormal); 0xFF gives NaN."""
    return _power_of_two(e8m0, True)


def _power_of_two(e8m0: torch.Tensor, inverse: bool) -> torch.Tensor:
    biased = 254 - e8m0.to(torch.int32) if inverse else e8m0.to(torch.int32)
    # Built from bits: exp2 may be off by an ulp; 2^-127, of biased exponent 0, is float32's subnormal 0x00400000.
    bits = (biased << 23).clamp_(min=0x00400000).masked_fill_(e8m0 == 0xFF, 0x7FC00000)
    return bits.view(torch.float32)
