"""The emulated backend: FP8 codes and scales exactly as specified, multiplied in BF16 or FP32. Runs on any device.

Why this is faithful. E4M3 and E5M2 codes have at most four significant bits, so a code, and a code times a power of two,
is exact in bfloat16; products of two are exact in float32. A BF16 GEMM with float32 accumulation therefore equals an FP8
GEMM up to the order of summation:

* every scale a power of two, bfloat16 result: scales are folded into the operands, one BF16 GEMM (on GPUs one with
  float32 output: cuBLAS may add the parts of a split sum in BF16 otherwise);
* float32 scales, float32 result, or a bias: a GEMM with float32 output, then ``acc * (scale_inv_a * scale_inv_b)``, the
  bias, and one rounding. (A bfloat16 result that is scaled afterwards is rounded twice: it equals the exact result on
  only three outputs in four. Rejected.)
* scales so small or large that bfloat16 or a flushed subnormal would lose them, and float32 scales along the
  contraction where torch may round float32 operands (``torch.set_float32_matmul_precision``): float64, rare and slow.
* ``exact=True``: float64 throughout, the oracle.

Quantisation keeps a columnwise side as the transposed view of codes in the original layout: nothing is copied to
transpose, and shards gathered along the rows need no permutation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..kernels import in_memory
from ..kernels.cpu import gemms
from ..kernels.cpu import loops as cpu
from ..numerics.cast import RandomKey, cast, cast_stochastic, check_float, decode
from ..numerics.formats import E4M3
from ..numerics.scaling import (
    block_amaxes,
    blocked,
    compute_e8m0,
    compute_scale,
    compute_scale_inv,
    e8m0_to_scale,
)
from ..numerics.subnormals import keeping_subnormals
from ..recipe import Granularity, Recipe, Rule
from ..tensor import Float8Tensor, QuantizedSide, expand_scale

Direction = Literal["rowwise", "columnwise", "both"]
AmaxReduction = Callable[[torch.Tensor], None]
"""Maxes a float32 tensor over ranks, in place."""

name = "emulated"


@dataclass(frozen=True)
class Region:
    """Where a matrix lies in the logical one that all ranks share; names the random bits of stochastic rounding."""

    key: RandomKey
    row_offset: int = 0
    col_offset: int = 0
    total_cols: int = 0

    def index(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        """int64 [rows, cols]: row-major indices in the logical matrix."""
        row = torch.arange(self.row_offset, self.row_offset + rows, device=device, dtype=torch.int64)
        col = torch.arange(self.col_offset, self.col_offset + cols, device=device, dtype=torch.int64)
        return row[:, None] * (self.total_cols or cols) + col


@dataclass(frozen=True)
class Quantized:
    """What a quantisation gives: the tensor, and the local amax (float32 []) and non-finite count for the health."""

    tensor: Float8Tensor
    amax: torch.Tensor
    nonfinite: torch.Tensor | None


def supports(device: torch.device, recipe: Recipe | None = None) -> str | None:
    """Why this backend cannot run on the device, or multiply what the recipe quantises: never, it does all of it."""
    return None


def notes(device: torch.device, recipe: Recipe) -> list[str]:
    """What of the recipe this backend does in another way than its own: nothing."""
    return []


def turns_codes(rule: Rule) -> bool:
    """Whether the columnwise side of an input is a transposed view of codes in row order: always."""
    return True


@keeping_subnormals
def quantize(
    x: torch.Tensor,
    rule: Rule,
    direction: Direction,
    *,
    scale: torch.Tensor | None = None,
    reduce_amax: AmaxReduction | None = None,
    region: Region | None = None,
) -> Quantized:
    """Quantise a matrix in one or both directions.

    Args:
        x: [rows, cols], float32, bfloat16 or float16; any strides; may be empty. NaN becomes 0x7F, Inf saturates; both
            are counted, and neither makes a scale non-finite.
        rule: format, granularity, scale kind.
        direction: 'rowwise', 'columnwise' or 'both'.
        scale: float32 [], given from outside (delayed scaling); None computes it from x.
        reduce_amax: shares over ranks those amaxes that a shard's rows are cut through: the tensor's, and the
            columnwise side's of per-row scales.
        region: place and random stream for stochastic rounding, needed if rule.stochastic.

    Raises:
        ValueError: x is not a matrix of a floating dtype, or direction is unknown.
    """
    check_matrix(x, direction)
    x = in_memory(x).contiguous()
    wants_row, wants_column = direction != "columnwise", direction != "rowwise"
    granularity = rule.granularity
    along_cols = [granularity] if wants_row or granularity.symmetric else []
    along_rows = (
        [Granularity(granularity.cols, granularity.rows)]
        if wants_column and not granularity.symmetric
        else []
    )
    amaxes, nonfinite = block_amaxes(x, [(g.rows, g.cols) for g in along_cols + along_rows])
    amax = amaxes[0].amax() if amaxes[0].numel() else torch.zeros((), device=x.device, dtype=torch.float32)

    def side(granularity: Granularity, block_amax: torch.Tensor, by_column: bool) -> QuantizedSide:
        if granularity.is_tensor:
            block_amax = amax
            if scale is None and reduce_amax is not None:
                block_amax = amax.clone()
                reduce_amax(block_amax)
        elif by_column and granularity.rows == 0 and reduce_amax is not None:
            reduce_amax(block_amax)
        block_scale, scale_inv = (
            block_scales(block_amax, rule) if scale is None else (scale, compute_scale_inv(scale))
        )
        # A scale made from x's own amax, or from a greater one, lets nothing saturate but an Inf.
        bounded = scale is None and nonfinite is None
        codes = cast_blocks(x, block_scale, granularity, rule, bounded, region)
        return QuantizedSide(codes, scale_inv, granularity, rule.scale != "fp32", finite=nonfinite is None)

    rowwise = side(along_cols[0], amaxes[0], False) if along_cols else None
    columnwise = None
    if wants_column and granularity.symmetric:
        assert rowwise is not None
        columnwise = rowwise.transposed()
    elif wants_column:
        turned = side(along_rows[0], amaxes[-1], True)
        columnwise = replace(
            turned, codes=turned.codes.t(), scale_inv=turned.scale_inv.t(), granularity=granularity
        )
    return Quantized(Float8Tensor(rowwise if wants_row else None, columnwise, x.dtype), amax, nonfinite)


def check_matrix(x: torch.Tensor, direction: str) -> None:
    """ValueError unless x is a matrix of a floating dtype that can be quantised, and the direction is known."""
    check_float(x)
    if x.ndim != 2:
        raise ValueError(
            f"quantize needs a matrix [rows, cols], got shape {tuple(x.shape)}: flatten it first"
        )
    if direction not in ("rowwise", "columnwise", "both"):
        raise ValueError(f"direction {direction!r} is unknown: use 'rowwise', 'columnwise' or 'both'")


def block_scales(amax: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 scale, stored scale_inv) of the rule's kind."""
    if rule.scale == "e8m0":
        exponent = compute_e8m0(amax, rule.fmt)
        return e8m0_to_scale(exponent), exponent.view(torch.float8_e8m0fnu)
    scale = compute_scale(amax, rule.fmt, margin=rule.margin, epsilon=rule.epsilon, pow2=rule.scale == "pow2")
    return scale, compute_scale_inv(scale)


def cast_blocks(
    x: torch.Tensor,
    scale: torch.Tensor,
    granularity: Granularity,
    rule: Rule,
    bounded: bool,
    region: Region | None,
) -> torch.Tensor:
    """Codes [rows, cols] of x under one scale per block."""
    rows, cols = x.shape
    if rule.stochastic:
        assert region is not None, "stochastic rounding needs a region to draw its bits from"
        per_element = scale if granularity.is_tensor else _expand_any(scale, granularity, x.shape)
        return cast_stochastic(x, per_element, rule.fmt, region.key, index=region.index(rows, cols, x.device))
    if granularity.is_tensor:
        return cast(x, scale, rule.fmt, bounded=bounded)
    if cpu.usable(x):
        return cpu.cast(x, scale, (granularity.rows, granularity.cols), rule.fmt.dtype)
    blocks = blocked(x, granularity.rows, granularity.cols)
    codes = cast(blocks, scale[:, None, :, None], rule.fmt, bounded=bounded)
    padded = (blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3])
    codes = codes.view(padded)[:rows, :cols]
    # A copy even of whole rows: a view of them would keep the padding alive for as long as the codes.
    return codes if padded == (rows, cols) else codes.clone(memory_format=torch.contiguous_format)


def _expand_any(scale: torch.Tensor, granularity: Granularity, shape: torch.Size) -> torch.Tensor:
    """expand_scale for either orientation of blocks (whole rows or whole columns too)."""
    if granularity.rows == 0:
        return expand_scale(scale.t(), Granularity(granularity.cols, 0), (shape[1], shape[0])).t()
    return expand_scale(scale, granularity, shape)


# ---------------------------------------------------------------------------------------------------------------- GEMM

# A code times its scale must be a normal bfloat16, and a product of two of them, like the sum of all, a normal float32.
# The smallest code is 2^-16, the largest sum of products of codes about 2^42: see _foldable.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-100, 2.0**80


@keeping_subnormals
def gemm(
    a: QuantizedSide,
    b: QuantizedSide,
    *,
    out_dtype: torch.dtype = torch.float32,
    bias: torch.Tensor | None = None,
    fast_accumulation: bool = False,
    exact: bool = False,
) -> torch.Tensor:
    """a @ b^T of two quantised sides: acc * (scale_inv_a * scale_inv_b) in float32, + bias, one rounding.

    Args:
        a: [M, K]; b: [N, K]; any M, N, K (none need be a multiple of anything).
        out_dtype: dtype of the result.
        bias: [N], added in float32 before the rounding.
        fast_accumulation: allowed to tensor cores; here sums are float32 either way.
        exact: float64 accumulation: the reference.

    Returns:
        [M, N]. NaN codes give NaN in their row or column.

    Raises:
        ValueError: contractions differ, or both operands are E5M2 (no hardware multiplies those).
    """
    check_operands(a, b)
    short = _is_short(a) and _is_short(b)
    if exact or not _foldable(a, b) or not (short or _keeps_float32(a.codes.device)):
        return _finish(_values64(a) @ _values64(b).t(), None, bias, out_dtype)
    if a.pow2 and b.pow2 and bias is None and out_dtype == torch.bfloat16 and not a.codes.is_cuda:
        return a.dequantize(torch.bfloat16) @ b.dequantize(torch.bfloat16).t()
    dtype = torch.bfloat16 if short and gemms.multiplies(a.codes, b.codes) else torch.float32
    (values_a, scale_a), (values_b, scale_b) = _operand(a, dtype), _operand(b, dtype)
    if scale_b is not None:
        scale_b = scale_b.t() if scale_b.ndim else scale_b
    scale = scale_b if scale_a is None else scale_a if scale_b is None else scale_a * scale_b
    return _finish(_matmul_fp32(values_a, values_b), scale, bias, out_dtype)


def check_operands(a: QuantizedSide, b: QuantizedSide) -> None:
    """ValueError unless a [M, K] and b [N, K] contract, and at most one of them is E5M2."""
    if a.codes.shape[1] != b.codes.shape[1]:
        raise ValueError(
            f"gemm contracts the last dimensions, {tuple(a.codes.shape)} and {tuple(b.codes.shape)}: they must be equal"
        )
    if a.fmt is not E4M3 and b.fmt is not E4M3:
        raise ValueError("gemm: E5M2 x E5M2 is refused, no FP8 hardware multiplies it; make one operand E4M3")


def _finish(
    acc: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    if scale is not None:
        acc = acc.mul_(scale)
    if bias is not None:
        acc = acc.add_(bias.to(acc.dtype))
    return acc.to(out_dtype)


def _values64(side: QuantizedSide) -> torch.Tensor:
    return decode(side.codes, torch.float64, finite=side.finite) * side.expanded_scale_inv().to(torch.float64)


def _foldable(a: QuantizedSide, b: QuantizedSide) -> bool:
    """Whether scaled operands, their products and sums stay clear of subnormals (which BF16 units flush) and overflow."""
    (smallest_a, largest_a), (smallest_b, largest_b) = _scale_range(a), _scale_range(b)
    return (
        min(smallest_a, smallest_b, smallest_a * smallest_b) >= _SMALLEST_SCALE
        and max(largest_a, largest_b, largest_a * largest_b) <= _LARGEST_SCALE
    )


def _scale_range(side: QuantizedSide) -> tuple[float, float]:
    """Smallest and largest scale_inv. A block of zeros under MX's smallest scale, 2^-127, does not count."""
    if side.scale_inv.numel() == 0:
        return 1.0, 1.0
    if side.scale_inv.dtype == torch.float32:
        smallest, largest = torch.aminmax(side.scale_inv)
        return float(smallest), float(largest)
    exponents = side.scale_inv.view(torch.uint8)
    low, high = (int(v) for v in torch.aminmax(exponents))
    if low == 0:
        of_element = expand_scale(exponents == 0, side.granularity, side.codes.shape)
        if not bool(((side.codes.view(torch.uint8) & 0x7F) != 0).logical_and_(of_element).any()):
            low = int(torch.where(exponents == 0, 127, exponents).amin())
    return 2.0 ** (low - 127), 2.0 ** (high - 127)


def _is_short(side: QuantizedSide) -> bool:
    """Whether what ``_operand`` multiplies are bfloat16 numbers."""
    return side.pow2 or side.granularity.cols == 0


def _keeps_float32(device: torch.device) -> bool:
    """Whether float32 products keep all bits of their operands: users may let torch round them, to TF32 or bfloat16.

    Short operands lose nothing by that.
    """
    matmul: Any = (torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn).matmul
    setting = getattr(matmul, "fp32_precision", None)
    if setting is None:  # before torch 2.9
        return torch.get_float32_matmul_precision() == "highest"
    return setting in ("none", "ieee")


def _operand(side: QuantizedSide, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values, scale to multiply the result by): float32, or bfloat16 of a short side, which is exact.

    Powers of two go into the values; other scales stay outside the contraction where they are constant along it.
    """
    if side.granularity.cols == 0 and not side.pow2:
        return decode(side.codes, dtype, finite=side.finite), side.float_scale_inv()
    return side.dequantize(dtype), None


def _matmul_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 a @ b^T. Nothing that is the process's is set for it: other threads multiply meanwhile."""
    if a.dtype == b.dtype and gemms.takes(a.dtype, a.device) and gemms.multiplies(a, b):
        return gemms.matmul(a, b)
    return a.to(torch.float32) @ b.to(torch.float32).t()


def matmul_high_precision(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """a [M, K] @ b [N, K]^T (+ bias [N]) of unquantised matrices, for GEMMs that a plan keeps out of FP8."""
    if bias is None and out_dtype == a.dtype == b.dtype:
        return a @ b.t()
    return _finish(_matmul_fp32(a, b), None, bias, out_dtype)
