"""The emulated backend: FP8 codes and scales exactly as specified, multiplied in BF16 or FP32. Runs on any device.

Why this is faithful. E4M3 and E5M2 codes have at most four significant bits, so a code, and a code times a power of
two, is exact in bfloat16; products of two are exact in float32. A BF16 GEMM with float32 accumulation therefore equals
an FP8 GEMM up to the order of summation:

* every scale a power of two, bfloat16 result: scales are folded into the operands, one BF16 GEMM (on GPUs one with
  float32 output: cuBLAS may add the parts of a split sum in BF16 otherwise);
* float32 scales, float32 result, or a bias: a GEMM with float32 output, then ``acc * (scale_inv_a * scale_inv_b)``, the
  bias, and one rounding. (A bfloat16 result that is scaled afterwards is rounded twice: it equals the exact result on
  only three outputs in four. Rejected.)
* scales so small or large that bfloat16 or a flushed subnormal would lose them, and float32 scales along the
  contraction where torch may round float32 operands (``torch.set_float32_matmul_precision``): float64, rare and slow.
* ``exact=True``: float64 throughout, the oracle.

On CPUs one call of C makes amaxes, scales, and codes in both directions (cpu_cast.py). The C GEMM decodes codes while
it packs them (kernels/cpu/gemm.c), on processors that it supports. Everything else goes through reference.py and torch.
Codes and scales have the same bits; products differ by the order of their sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..kernels import gemms
from ..kernels.cast_dispatch import decode
from ..kernels.cpu import emulation, grouped, skinny_gemm
from ..kernels.gemms import finish, keeps_float32, matmul_by_row, matmul_fp32
from ..numerics import nvfp4
from ..numerics.formats import E5M2
from ..numerics.rule import BLOCK_1X32, BLOCK_128X128, Direction, Rule
from ..numerics.subnormals import keep_subnormals
from ..recipe import Products, Recipe
from ..tensor import Operand, QuantizedSide, expand_scale
from . import cpu_cast, fp4
from .base import RESULTS, CastRequest, CastResult, gemm_error, gemm_in_turn

name = "emulated"
takes_any_size = True
reads_scales = True


def supports(device: torch.device, recipe: Recipe | Products | None = None) -> str | None:
    """None: this backend runs all recipes on all devices."""
    return None


def notes(device: torch.device, recipe: Recipe | Products) -> list[str]:
    """No notes: this backend follows every recipe."""
    return []


def turns_codes(rule: Rule) -> bool:
    """Whether the columnwise side of an input is a transposed view of codes in row order: if a byte has one code."""
    return rule.fmt.codes_per_byte == 1


def quantize(x: torch.Tensor, rule: Rule, direction: Direction, **options: Any) -> CastResult:
    """Quantize a matrix [rows, cols] in one or both directions; ``options``: CastRequest's."""
    return quantize_each([CastRequest(x, rule, direction, **options)])[0]


quantize_each = cpu_cast.quantize_each


# ---------------------------------------------------------------------------------------------------------------- GEMM

# A code times its scale must be a normal bfloat16, and a product of two of them, like the sum of all, a normal float32.
# The smallest code is 2^-16, the largest sum of products of codes about 2^42: see _foldable.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-100, 2.0**80

_RESULTS = (*RESULTS, torch.float64)


def gemm(
    a: QuantizedSide,
    b: QuantizedSide,
    *,
    out_dtype: torch.dtype = torch.float32,
    bias: torch.Tensor | None = None,
    fast_accumulation: bool = False,
    exact: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """a @ b^T of two quantized sides: acc * (scale_inv_a * scale_inv_b) in float32, + bias, one rounding.

    Args:
        a: [M, K]; b: [N, K]; any M, N, K.
        out_dtype: float32, bfloat16 or float16; float64 for the reference.
        bias: [N], added in float32 before the rounding.
        fast_accumulation: ignored; sums are float32.
        exact: float64 accumulation: the reference.
        batch_invariant: a row's bits depend on that row and b alone. NVFP4: a's tensor scale must be static.

    Returns:
        [M, N]. NaN codes give NaN in their row or column.

    Raises:
        ValueError: contractions differ, both operands are E5M2 (no hardware multiplies those), or another shape of bias
            or dtype of the result.
    """
    _check(a, b, out_dtype, bias)
    if batch_invariant:
        return _by_range(a, b, out_dtype, bias)
    if not exact and out_dtype in RESULTS:
        done = _in_c(a, b, out_dtype, bias)
        if done is not None:
            return done
    return (fp4.gemm if _is_fp4(a, b) else _in_torch)(a, b, out_dtype, bias, exact)


def _in_c(
    a: QuantizedSide,
    b: QuantizedSide,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    *,
    any_size: bool = False,
) -> torch.Tensor | None:
    """``gemm`` in C; None where C does not take the operands, or, without ``any_size``, where they are small."""
    addend = None if bias is None else bias.to(torch.float32).contiguous()
    if _has_few_rows(a, b, out_dtype) and (_is_fp4(a, b) or _foldable(a, b)):
        done = (fp4.multiply_few_rows if _is_fp4(a, b) else _multiply_few_rows)(a, b, addend, out_dtype)
        if done is not None:
            return done
    operands = _as_c_reads(a, b, any_size=any_size)
    if operands is None:
        return None
    done = emulation.multiply(*operands, out_dtype if out_dtype in _IN_C else torch.float32, addend)
    return None if done is None else done.to(out_dtype)


def _by_range(
    a: QuantizedSide, b: QuantizedSide, out_dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    """``gemm`` with ``batch_invariant``. C sums any number of rows in one order. Rows that it does not take,
    each by its own scales, are summed in float64, one at a time."""
    y = torch.empty(len(a.codes), len(b.codes), dtype=out_dtype, device=a.codes.device)
    near = _rows_in_range(a, b)
    for rows, of_c in ((near, True), (~near, False)):
        if not bool(rows.any()):
            continue
        part = a if bool(rows.all()) else _take_rows(a, rows)
        done = _in_c(part, b, out_dtype, bias, any_size=True) if of_c else None
        if done is None and _is_fp4(a, b):
            done = fp4.gemm(part, b, out_dtype, bias, True, multiply=matmul_by_row)
        elif done is None:
            done = finish(matmul_by_row(values64(part), values64(b)), None, bias, out_dtype)
        if part is a:
            return done
        y[rows] = done
    return y


def _rows_in_range(a: QuantizedSide, b: QuantizedSide) -> torch.Tensor:
    """bool [M]: rows of a whose scales C surely takes with b's, inside ``_foldable``'s limits."""
    rows = torch.ones(len(a.codes), dtype=torch.bool, device=a.codes.device)
    if _is_fp4(a, b) or not len(rows):
        return rows
    scale, (smallest, largest) = (
        a.float_scale_inv().reshape(-1, a.scale_inv.shape[-1] if a.scale_inv.ndim else 1),
        _scale_range(b),
    )
    if a.scale_inv.dtype == torch.float8_e8m0fnu and bool((zero := a.scale_inv.view(torch.uint8) == 0).any()):
        beside = expand_scale(zero, a.granularity, a.shape) & ((a.codes.view(torch.uint8) & 0x7F) != 0)
        rows, scale = ~beside.any(1), torch.where(zero, 1.0, scale)  # a block of zeros counts for nothing
    low, high = scale.amin(1).double(), scale.amax(1).double()
    low, high = torch.minimum(low, low * smallest), torch.maximum(high, high * largest)
    inside = (min(smallest, 1.0) >= 4 * _SMALLEST_SCALE) and (largest <= _LARGEST_SCALE / 4)
    return rows & inside & (low >= 4 * _SMALLEST_SCALE) & (high <= _LARGEST_SCALE / 4)


def _take_rows(side: QuantizedSide, rows: torch.Tensor) -> QuantizedSide:
    """Some rows (bool [M]) of a side with scales per row, or of blocks within a row."""
    assert side.granularity.rows == 1, side.granularity
    return replace(side, codes=side.codes[rows], scale_inv=side.scale_inv[rows])


def _check(
    a: QuantizedSide, b: QuantizedSide, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> None:
    if _is_fp4(a, b):  # in whole blocks: the Hadamard transform fills the last one
        contracts = nvfp4.padded_cols(a.shape[1]) == nvfp4.padded_cols(b.shape[1])
    else:
        contracts = a.codes.shape[1] == b.codes.shape[1] and not a.codes.dtype == b.codes.dtype == E5M2.dtype
    if not contracts or out_dtype not in _RESULTS or (bias is not None and bias.shape != b.codes.shape[:1]):
        raise gemm_error(a, b, out_dtype, bias)


def _is_fp4(a: QuantizedSide, b: QuantizedSide) -> bool:
    return a.tensor_amax is not None or b.tensor_amax is not None


def _has_few_rows(a: QuantizedSide, b: QuantizedSide, out_dtype: torch.dtype) -> bool:
    """Whether ``_multiply_few_rows`` takes a @ b^T, by shapes, dtypes and kinds of scales."""
    if _is_fp4(a, b):
        return fp4.has_few_rows(a, b, out_dtype)
    return (
        a.codes.shape[0] <= skinny_gemm.MOST
        and skinny_gemm.takes(a.codes.shape[0], b.codes, out_dtype)
        and (
            b.granularity.cols == 0 or (b.pow2 and b.finite and b.granularity in (BLOCK_1X32, BLOCK_128X128))
        )
        and _is_short(a)
    )


def _multiply_few_rows(
    a: QuantizedSide, b: QuantizedSide, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """``gemm`` for at most 16 rows, such as decoded tokens. Reads b's codes once, without a copy. bias: float32 [N].

    Power-of-two scales along the contraction multiply the operands' values, all other scales the sum; the result has
    the same bits.
    """
    one = torch.ones((), dtype=torch.float32, device="cpu")
    if a.granularity.cols:
        values, scale_a = a.dequantize(torch.bfloat16), one
    else:
        values, scale_a = decode(a.codes, torch.bfloat16, finite=a.finite), a.float_scale_inv().contiguous()
    exponents, block, scale_b = None, (1, 32), one
    if b.granularity.cols:
        exponents, block = _exponents(b.scale_inv), (b.granularity.rows, b.granularity.cols)
    else:
        scale_b = b.float_scale_inv().contiguous()
    return skinny_gemm.matmul(
        values.contiguous(),
        b.codes,
        exponents=exponents,
        block=block,
        scale_a=scale_a,
        scale_b=scale_b,
        bias=bias,
        dtype=out_dtype,
        finite=b.finite,
    )


def _exponents(scale: torch.Tensor) -> torch.Tensor:
    """uint8 [block rows, block cols]: exponents of scales that are powers of two and normal numbers."""
    if scale.dtype != torch.float32:
        return scale.view(torch.uint8).contiguous()
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def accumulate(a: Operand, b: Operand, into: torch.Tensor, *, zeros: bool = False) -> bool:
    """Adds ``gemm``'s float32 result to ``into`` while it is computed, with the bits of ``into.add_``. Returns False,
    without a change, if C does not support the operands.

    Args:
        into: [M, N].
        zeros: ``into`` is zeros. C reads it all the same.

    Raises:
        ValueError: contractions differ, both operands are E5M2, or ``into`` has another shape.
    """
    if not isinstance(a, QuantizedSide) or not isinstance(b, QuantizedSide):
        return False
    _check(a, b, torch.float32)
    if into.shape != (rows_cols := (a.codes.shape[0], b.codes.shape[0])):
        raise ValueError(f"a product of shape {rows_cols} cannot be added to one of {tuple(into.shape)}")
    if _has_few_rows(a, b, torch.float32) or into.dtype != torch.float32 or not emulation.is_plain(into):
        return False
    operands = _as_c_reads(a, b)
    return operands is not None and emulation.multiply(*operands, torch.float32, into=into) is not None


def grouped_gemm(
    a: Sequence[QuantizedSide],
    b: Sequence[QuantizedSide],
    outs: Sequence[torch.Tensor],
    *,
    add: bool = False,
    fast_accumulation: bool = False,
) -> None:
    """outs[i] = ``gemm`` of a[i] and b[i], bit for bit; one call of C for all that it supports.

    Args: as in base.gemm_in_turn.
    """
    inside, products = [], []
    for i, (left, right, out) in enumerate(zip(a, b, outs, strict=True)):
        wanted = torch.float32 if add else out.dtype
        _check(left, right, wanted)
        writes = (torch.float32,) if add else _IN_C
        if _has_few_rows(left, right, wanted) or not emulation.is_plain(out) or out.dtype not in writes:
            continue
        operands = _as_c_reads(left, right)
        if operands is not None:
            inside.append(i)
            products.append(grouped.Product(*operands, out, add))
    made = grouped.multiply_each(products, loop=emulation.inner_loop())
    done = {i for i, made in zip(inside, made, strict=True) if made}
    rest = [i for i in range(len(outs)) if i not in done]
    gemm_in_turn(gemm, [a[i] for i in rest], [b[i] for i in rest], [outs[i] for i in rest], add=add)


def _as_c_reads(
    a: QuantizedSide, b: QuantizedSide, *, any_size: bool = False
) -> tuple[emulation.Operand, emulation.Operand] | None:
    """What C multiplies for a [M, K] and b [N, K]; None where it does not take these."""
    if emulation.inner_loop() is None:
        return None
    if _is_fp4(a, b):
        left, right = fp4.operands(a, b)
    else:
        left, right = (
            emulation.Operand(
                side.codes,
                side.scale_inv,
                (side.granularity.rows, side.granularity.cols),
                side.pow2,
                side.finite,
            )
            for side in (a, b)
        )
    return (left, right) if emulation.fits(left, right, any_size=any_size) else None


_IN_C = (torch.bfloat16, torch.float32)


@keep_subnormals
def _in_torch(
    a: QuantizedSide, b: QuantizedSide, out_dtype: torch.dtype, bias: torch.Tensor | None, exact: bool
) -> torch.Tensor:
    """``gemm`` in torch, for all operands."""
    short = _is_short(a) and _is_short(b)
    if exact or not _foldable(a, b) or not (short or keeps_float32(a.codes.device)):
        return finish(values64(a) @ values64(b).t(), None, bias, out_dtype)
    in_bfloat16 = not a.codes.is_cuda and gemms.cpu_multiplies(torch.bfloat16)
    if a.pow2 and b.pow2 and bias is None and out_dtype == torch.bfloat16 and in_bfloat16:
        values_a, values_b = a.dequantize(torch.bfloat16), b.dequantize(torch.bfloat16)
        if not (a.finite and b.finite):
            # oneDNN reads whole tiles beyond a row's end, so a NaN of the next row would spread into this one.
            missing = -a.codes.shape[1] % 32
            values_a, values_b = (torch.nn.functional.pad(v, (0, missing)) for v in (values_a, values_b))
        return values_a @ values_b.t()
    dtype = torch.bfloat16 if short and gemms.multiplies(a.codes, b.codes) else torch.float32
    (values_a, scale_a), (values_b, scale_b) = _operand(a, dtype), _operand(b, dtype)
    if scale_b is not None and scale_b.ndim:
        scale_b = scale_b.t()  # [N, 1] to [1, N]: one for each column of the result
    scale = scale_b if scale_a is None else scale_a if scale_b is None else scale_a * scale_b
    return finish(matmul_fp32(values_a, values_b), scale, bias, out_dtype)


def values64(side: QuantizedSide) -> torch.Tensor:
    """float64 [rows, cols]: codes times scales, exactly."""
    return decode(side.codes, torch.float64, finite=side.finite) * side.expanded_scale_inv().to(torch.float64)


def _foldable(a: QuantizedSide, b: QuantizedSide) -> bool:
    """Whether scaled operands, their products and sums have no subnormals (which BF16 units flush) and no
    overflow."""
    if a.codes.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the emulated backend cannot be captured as a CUDA graph: the host reads scales to choose a product. Use a"
            " GPU and a recipe that the native backend multiplies, or train without the graph"
        )
    (smallest_a, largest_a), (smallest_b, largest_b) = _scale_range(a), _scale_range(b)
    return (
        min(smallest_a, smallest_b, smallest_a * smallest_b) >= _SMALLEST_SCALE
        and max(largest_a, largest_b, largest_a * largest_b) <= _LARGEST_SCALE
    )


def _scale_range(side: QuantizedSide) -> tuple[float, float]:
    if side.granularity.is_tensor and side.scale_inv.dtype == torch.float32:  # faster than a cached property
        return (scale := float(side.scale_inv)), scale
    return side.scale_range


def _is_short(side: QuantizedSide) -> bool:
    """Whether ``_operand``'s values are exact in bfloat16."""
    return side.pow2 or side.granularity.cols == 0


def _operand(side: QuantizedSide, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values [rows, K] in dtype; float32 [] or [rows, 1] to multiply the result by, or None).

    dtype is float32, or bfloat16 for a short side, whose values are exact in it. The values include power-of-two scales;
    other scales multiply the result if they are constant along the contraction.
    """
    if side.granularity.cols == 0 and not side.pow2:  # then scales are float32: E8M0 has powers of two only
        return decode(side.codes, dtype, finite=side.finite), side.scale_inv
    return side.dequantize(dtype), None
