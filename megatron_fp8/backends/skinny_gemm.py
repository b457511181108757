"""CPU products of at most 16 tokens, in training and inference. A weight's codes are read once, as they lie.

With many tokens both operands are decoded first: that is little work beside the product. With one token it is most of
the work. So kernels/cpu/skinny_gemm.c reads codes and sums at once.

In inference nothing else asks for the input's codes, so that casting and multiplying are one call there.

Which scales go where does not change a bit of the result: powers of two along the contraction go into the numbers that
are multiplied, all other scales into the sum.
"""

from __future__ import annotations

import torch

from ..kernels.cast_dispatch import decode
from ..kernels.cpu import decode_linear, skinny_gemm
from ..kernels.cpu.emulation import plain
from ..numerics.rule import BLOCK_1X32, BLOCK_128X128, Rule
from ..tensor import QuantizedSide


def takes(a: QuantizedSide, b: QuantizedSide, out_dtype: torch.dtype) -> bool:
    """Whether a @ b^T is for ``multiply``, as far as shapes, dtypes and kinds of scales say."""
    return skinny_gemm.takes(a.codes.shape[0], b.codes, out_dtype) and (
        b.granularity.cols == 0 or (b.pow2 and b.finite and b.granularity in (BLOCK_1X32, BLOCK_128X128))
    )


def multiply(
    a: QuantizedSide, b: QuantizedSide, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """``gemm`` of sides that it takes, whose scales bfloat16 holds: a [M, K], b [N, K] and bias [N] to [M, N]."""
    values, scale_a = _values(a)
    exponents, block = None, (1, 32)
    if b.granularity.cols:
        exponents, block = _exponents(b), (b.granularity.rows, b.granularity.cols)
    return skinny_gemm.matmul(
        values,
        b.codes,
        exponents=exponents,
        block=block,
        scale_a=scale_a,
        scale_b=_one() if b.granularity.cols else b.float_scale_inv().contiguous(),
        bias=None if bias is None else bias.to(torch.float32).contiguous(),
        dtype=out_dtype,
        finite=b.finite,
    )


def quantize_and_multiply(
    x: torch.Tensor,
    rule: Rule,
    scale: torch.Tensor | None,
    b: QuantizedSide,
    bias: torch.Tensor | None,
    fold: tuple[float, float],
) -> torch.Tensor | None:
    """``multiply`` of x [..., K] as the rule quantises it, in one call; None where C does not take x, its rule or b.

    Args:
        fold: the smallest and largest that scales, and products of two, may be.
    """
    (n, contracted), k = b.codes.shape, x.shape[-1]
    of_rows = b.granularity.cols == 0 and b.scale_inv.dtype == torch.float32
    if (
        k != contracted
        or not k
        or not (skinny_gemm.takes(x.numel() // k, b.codes, x.dtype) and decode_linear.takes(x, rule, scale))
        or not (of_rows or (b.pow2 and b.finite and b.granularity in (BLOCK_1X32, BLOCK_128X128)))
        or not plain(b.scale_inv)
        or (bias is not None and bias.shape != (n,))
        or rule.fmt.dtype == b.codes.dtype == torch.float8_e5m2
    ):
        return None
    block = None if of_rows else (b.granularity.rows, b.granularity.cols)
    weight = decode_linear.Weight(b.codes, b.scale_inv, block, b.finite, *b.scale_range)
    bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
    return decode_linear.multiply(x, rule, scale, weight, bias, fold)


def _values(side: QuantizedSide) -> tuple[torch.Tensor, torch.Tensor]:
    """(bfloat16 [rows, K], float32 scales to multiply the result by)."""
    if side.granularity.cols:
        return side.dequantize(torch.bfloat16).contiguous(), _one()
    return decode(
        side.codes, torch.bfloat16, finite=side.finite
    ).contiguous(), side.float_scale_inv().contiguous()


def _exponents(side: QuantizedSide) -> torch.Tensor:
    """uint8 [block rows, block cols]: of scales that are powers of two and normal numbers."""
    scale = side.scale_inv
    if scale.dtype != torch.float32:
        return scale.view(torch.uint8).contiguous()
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def _one() -> torch.Tensor:
    return torch.ones((), dtype=torch.float32, device="cpu")
