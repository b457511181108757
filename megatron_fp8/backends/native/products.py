"""Products of the native backend: torch's scaled matrix product (cuBLASLt, CUTLASS), or this package's kernel.

The result is that of numerics.md, acc * (scale_inv_a * scale_inv_b) + bias in float32 and one rounding, up to the
accuracy of the accumulation: Hopper's tensor cores keep about 14 bits of a partial sum with fast accumulation, which is
on in fprop only, and promote it to float32 otherwise.

If torch has no block-scaled product, this package's Triton kernel (kernels/block_matmul.py) multiplies, and the
backend's ``advice`` names the setting that avoids it.

NaN codes give NaN in their row or column. Empty operands give zeros (and the bias).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ... import kernels
from ...files.terminal import print_rank_0
from ...numerics import nvfp4
from ...numerics.formats import E5M2
from ...tensor import QuantizedSide
from ..base import RESULTS, gemm_error, gemm_in_turn
from . import fp4
from .layout import Mode, Operand, ProductPlan, Refusal, Request, plan, round_up
from .placement import align, arguments, block_scales, is_aligned, place_codes, row_scales
from .probe import refusals


def pad_to_same_length(a: QuantizedSide, b: QuantizedSide) -> tuple[QuantizedSide, QuantizedSide]:
    """Both operands, the shorter one padded to the other's length. Unchanged if their matrices do not fit."""
    first, second = a.codes.shape[1], b.codes.shape[1]
    if first == second or a.shape[1] != b.shape[1] or a.tensor_amax is not None or b.tensor_amax is not None:
        return a, b  # NVFP4's end in whole blocks, and the plan pads them to one length
    return _pad_to_length(a, max(first, second)), _pad_to_length(b, max(first, second))


def _pad_to_length(side: QuantizedSide, length: int) -> QuantizedSide:
    rows, now = side.codes.shape
    if now == length:
        return side
    return replace(side, codes=place_codes(side.codes, rows, length), padding=length - side.shape[1])


def gemm(
    a: QuantizedSide,
    b: QuantizedSide,
    *,
    out_dtype: torch.dtype = torch.float32,
    bias: torch.Tensor | None = None,
    fast_accumulation: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ b^T of two quantized sides on tensor cores.

    Args:
        a: [M, K]; b: [N, K]; any sizes: they are padded as needed, and the result is cut.
        out_dtype: bfloat16, float16 or float32.
        bias: [N], any floating dtype, added in float32 before the one rounding.
        fast_accumulation: let the tensor cores keep partial sums at their own precision (ignored with blocks).
        out: [M, N] of out_dtype, to write the result to: by the product itself unless it is padded or rounds later.

    Returns:
        [M, N], contiguous; ``out`` if given.

    Raises:
        ValueError: contractions differ, both operands are E5M2, nothing here multiplies such operands, or the bias's
            shape or the result's dtype is wrong.
    """
    a, b = pad_to_same_length(a, b)
    contracts = a.shape[1] == b.shape[1] and not a.codes.dtype == b.codes.dtype == E5M2.dtype
    if a.tensor_amax is not None and b.tensor_amax is not None:
        contracts = nvfp4.padded_cols(a.shape[1]) == nvfp4.padded_cols(b.shape[1])
    if not contracts or out_dtype not in RESULTS or (bias is not None and bias.shape != b.codes.shape[:1]):
        raise gemm_error(a, b, out_dtype, bias)
    (m, k), n = a.codes.shape, b.codes.shape[0]
    if 0 in (m, n, k):
        result = torch.zeros(m, n, dtype=torch.float32, device=a.codes.device)
        result = (result if bias is None else result.add_(bias)).to(out_dtype)
        return result if out is None else out.copy_(result)
    refusal = refusals(a.codes.device, multiply)
    asked = (Operand.of(a), Operand.of(b), out_dtype, None if bias is None else bias.dtype, fast_accumulation)
    made = _replanned.get((refusal, asked)) or plan(*asked, refusal)
    try:
        return _run_plan(made, a, b, bias, out_dtype, out)
    except kernels.refusals() as error:
        if isinstance(error, _NO_REFUSALS) or (refusal, asked) in _replanned:
            raise
        made = _replanned[refusal, asked] = _plan_without(made.request, error, asked, refusal)
        return _run_plan(made, a, b, bias, out_dtype, out)


_NO_REFUSALS: tuple[type[Exception], ...] = (
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),
)
"""RuntimeErrors that say nothing about a kind of product."""
_replanned: dict[tuple[Refusal, tuple[Any, ...]], ProductPlan] = {}
"""Plans of products that were refused at their sizes, although the kind of product was tried when the model was built."""


def _plan_without(
    refused: Request, error: Exception, asked: tuple[Any, ...], refusal: Refusal
) -> ProductPlan:
    """Plans a product by another request, and says so. RuntimeError if there is none."""
    a, b = asked[:2]
    reason = str(error).strip().partition("\n")[0]
    what = f"a product of {a.rows} x {a.k} by {b.rows} x {b.k} ({refused}) was refused: {reason}"
    try:
        made = plan.__wrapped__(*asked, lambda request: reason if request == refused else refusal(request))
    except ValueError as nothing:
        raise RuntimeError(f"{what}, and nothing else multiplies it: {nothing}") from error
    print_rank_0(f"megatron_fp8: {what}; such products run with {made.request} from here on", once=True)
    return made


def _run_plan(
    made: ProductPlan,
    a: QuantizedSide,
    b: QuantizedSide,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """The planned product with all that follows it; arguments and result are ``gemm``'s."""
    m, n = a.codes.shape[0], b.codes.shape[0]
    whole = out is not None and _is_written_by(made, out)
    acc = multiply(made, a, b, None if made.post_bias else bias, out if whole else None)
    if whole:
        return acc
    if acc.shape != (m, n):
        acc = acc[:m, :n]
    if made.post_scale:
        last = out if out_dtype == torch.float32 and not made.post_bias else None
        acc = torch.mul(acc, row_scales(a) * row_scales(b).t(), out=last)
        if acc is out:
            return acc
    if made.post_bias:
        assert bias is not None
        acc = acc + bias
    return acc.to(out_dtype).contiguous() if out is None else out.copy_(acc)


def _is_written_by(made: ProductPlan, out: torch.Tensor) -> bool:
    """Whether the planned product's own result is ``out``."""
    exact = made.request.out == out.dtype and (made.a.shape[0], made.b.shape[1]) == out.shape
    return exact and not (made.post_scale or made.post_bias) and is_aligned(out)


def grouped_gemm(
    a: Sequence[QuantizedSide],
    b: Sequence[QuantizedSide],
    outs: Sequence[torch.Tensor],
    *,
    add: bool = False,
    fast_accumulation: bool = False,
) -> None:
    """outs[i] = ``gemm`` of a[i] and b[i]: one launch for those of this package's kernel, one product each for torch's.

    torch's grouped product is not used: docs/decisions/gpu_products.md. Args: as in base.gemm_in_turn.
    """
    refusal = refusals(outs[0].device, multiply) if outs else None
    by_kind: dict[tuple[Any, ...], list[int]] = {}
    for i, (left, right, out) in enumerate(zip(a, b, outs, strict=True)):
        kind = (left.granularity, left.codes.dtype, right.granularity, right.codes.dtype, out.dtype)
        by_kind.setdefault(kind if out.numel() and left.codes.shape[1] else (), []).append(i)
    for kind, these in by_kind.items():
        first = these[0]
        adds_there = not add or outs[first].dtype == torch.float32
        if kind and adds_there and _is_by_kernel(a[first], b[first], outs[first].dtype, refusal):
            _multiply_blocks_grouped([(a[i], b[i], outs[i]) for i in these], add)
        elif add:
            gemm_in_turn(
                gemm, [a[i] for i in these], [b[i] for i in these], [outs[i] for i in these], add=True
            )
        else:
            for i in these:
                out = outs[i]
                gemm(a[i], b[i], out_dtype=out.dtype, fast_accumulation=fast_accumulation, out=out)


def _is_by_kernel(a: QuantizedSide, b: QuantizedSide, out_dtype: torch.dtype, refusal: Any) -> bool:
    made = plan(Operand.of(a), Operand.of(b), out_dtype, None, False, refusal)
    return made.request.triton and made.request.out == out_dtype and not made.post_scale


def _multiply_blocks_grouped(
    products: Sequence[tuple[QuantizedSide, QuantizedSide, torch.Tensor]], add: bool
) -> None:
    from ...kernels.block_matmul import Product, grouped_block_matmul  # loads Triton

    told, heights = [], (1, 1)
    for a, b, out in products:
        a, b = pad_to_same_length(a, b)
        (scale_a, height_a), (scale_b, height_b) = block_scales(a), block_scales(b)
        codes_a, codes_b = (_whole_codes(side) for side in (a, b))
        told.append(Product(codes_a, scale_a, codes_b, scale_b, out))
        heights = height_a, height_b
    grouped_block_matmul(told[0].a, told, a_height=heights[0], b_height=heights[1], add=add)


def _whole_codes(side: QuantizedSide) -> torch.Tensor:
    """Codes [rows, K] for this package's kernel, K padded to a multiple of 16: otherwise its registers spill."""
    rows, k = side.codes.shape
    return place_codes(side.codes, rows, round_up(k, 16))


def accumulate(
    a: QuantizedSide | torch.Tensor,
    b: QuantizedSide | torch.Tensor,
    into: torch.Tensor,
    *,
    zeros: bool = False,
) -> bool:
    """Adds ``gemm``'s float32 result to ``into`` [M, N] while it is computed, with the bits of ``into.add_``. Returns
    False, without a change, unless this package's kernel multiplies: torch's scaled products cannot add.

    ``zeros``: ``into`` is zeros; the result, of its dtype, is written to it, by any product. Rejected for all others:
    products with beta = 1 of Transformer Engine (it takes its own tensor classes) and of nvmath-python (it plans each
    call on the host): an optional package would choose the bits of wgrad.
    """
    if not isinstance(a, QuantizedSide) or not isinstance(b, QuantizedSide):
        return False
    if zeros:
        gemm(a, b, out_dtype=into.dtype, out=into)
        return True
    if a.granularity.cols != 128 or into.dtype != torch.float32 or not into.is_contiguous():
        return False
    refusal = refusals(a.codes.device, multiply)
    empty = 0 in (*a.codes.shape, len(b.codes))
    if empty or not plan(Operand.of(a), Operand.of(b), torch.float32, None, False, refusal).request.triton:
        return False
    _multiply_blocks(*pad_to_same_length(a, b), torch.float32, None, into)
    return True


def multiply(
    product: ProductPlan,
    a: QuantizedSide,
    b: QuantizedSide,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product with its padding, before post_scale, post_bias and the cut. float32 if the plan rounds later.

    ``out``: [M, N] of that dtype, contiguous, to write it to.
    """
    bias = None if bias is None else align(bias)
    if product.request.triton:
        return _multiply_blocks(a, b, product.request.out, bias, out, add=False)
    codes_a, codes_b, scale_a, scale_b = arguments(product, a, b)
    padding = product.b.shape[1] - product.n
    if bias is not None and padding:
        bias = torch.nn.functional.pad(bias, (0, padding))
    mode = product.request.mode
    if product.request.by == "torch v1":
        return torch._scaled_mm(
            codes_a,
            codes_b,
            scale_a,
            scale_b,
            bias=bias,
            out_dtype=product.request.out,
            use_fast_accum=product.fast,
            out=out,
        )
    if not hasattr(torch, "_scaled_mm_v2"):
        raise RuntimeError("this torch has no _scaled_mm_v2: 2.10 and newer have")
    factors: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    if mode is Mode.FP4:
        factors = fp4.factors(a, b)
    return torch._scaled_mm_v2(
        codes_a,
        codes_b,
        [scale_a, *factors[0]],
        mode.recipes[0],
        mode.swizzles,
        [scale_b, *factors[1]],
        mode.recipes[1],
        mode.swizzles,
        bias,
        product.request.out,
        [],
        product.fast,
        out=out,
    )


def _multiply_blocks(
    a: QuantizedSide,
    b: QuantizedSide,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    into: torch.Tensor | None = None,
    *,
    add: bool = True,
) -> torch.Tensor:
    from ...kernels.block_matmul import block_matmul  # loads Triton

    (scale_a, height_a), (scale_b, height_b) = block_scales(a), block_scales(b)
    codes_a, codes_b = (_whole_codes(side) for side in (a, b))
    heights = {"a_height": height_a, "b_height": height_b}
    return block_matmul(
        codes_a, scale_a, codes_b, scale_b, **heights, out_dtype=out_dtype, bias=bias, into=into, add=add
    )
