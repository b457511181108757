"""A linear of few tokens in one call of C (decode_linear.c): quantise, decode, multiply.

Each step is a call of its own elsewhere (matrix_quantize.py, emulation.py, skinny_gemm.py), with tensors for what it
gives. For one token those take longer than the steps. The bits are theirs.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from ...numerics.formats import E5M2
from ...numerics.rule import Rule
from . import matrix_quantize, skinny_gemm
from .emulation import address, compiled, inner_loop, plain, thread_count


class _Linear(ctypes.Structure):
    _fields_ = (
        ("product", skinny_gemm.Product),
        *((name, ctypes.c_void_p) for name in ("x", "given", "blocks_b")),
        *((name, ctypes.c_double) for name in ("smallest_b", "largest_b", "smallest", "largest")),
        ("block", ctypes.c_int64),
        ("rule", matrix_quantize.ScaleRule),
        *((name, ctypes.c_int32) for name in ("bfloat16", "e5m2", "each", "e8m0_b")),
    )


class Weight(NamedTuple):
    """What is multiplied by: contiguous codes [N, K], and their float32 or E8M0 scales.

    Attributes:
        block: rows and columns that share a power of two; None: scales of rows, or of the whole.
        finite: it is known that no code is NaN or Inf.
        smallest, largest: of the scales.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    block: tuple[int, int] | None
    finite: bool
    smallest: float
    largest: float


def takes(x: torch.Tensor, rule: Rule, scale: torch.Tensor | None) -> bool:
    """Whether x [..., K] is for ``multiply``, so quantised; skinny_gemm.takes says it of the product."""
    block = rule.granularity.rows, rule.granularity.cols
    whole = block[1] == 0 and rule.scale != "e8m0"
    in_blocks = block[0] == 1 and rule.scale != "fp32" and scale is None and matrix_quantize.divides(block)
    return (
        x.dtype in (torch.bfloat16, torch.float32)
        and plain(x)
        and not rule.stochastic
        and (whole or in_blocks)
        and (scale is None or (rule.granularity.is_tensor and plain(scale)))
    )


def multiply(
    x: torch.Tensor,
    rule: Rule,
    scale: torch.Tensor | None,
    weight: Weight,
    bias: torch.Tensor | None,
    fold: tuple[float, float],
) -> torch.Tensor | None:
    """x [..., K] quantised rowwise by the rule, times the weight's transpose, + bias: [..., N] in x's dtype.

    Args:
        x: 1 to skinny_gemm.MOST rows; ``takes`` it.
        scale: float32 [], under which x is cast; None: its own.
        bias: float32 [N], contiguous, or None.
        fold: the smallest and largest that scales, and products of two, may be.

    Returns:
        None where a scale is beyond that.
    """
    codes, in_blocks = weight.codes, weight.block is not None
    n, k = codes.shape
    m = x.numel() // k
    high, wide = weight.block or (1 if weight.scale_inv.ndim else n, k)
    e8m0 = in_blocks and weight.scale_inv.dtype != torch.float32
    kind = torch.float8_e8m0fnu if e8m0 else torch.float32
    scale_inv = address(weight.scale_inv, kind, -(-n // high) * -(-k // wide))
    short = x.dtype == torch.bfloat16
    to = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device="cpu")
    product = skinny_gemm.Product(
        *(None, codes.data_ptr(), None, None, None if in_blocks else scale_inv),
        None if bias is None else address(bias, torch.float32, n),
        *(to.data_ptr(), m, n, k, high, wide),
        *(0, not in_blocks and weight.scale_inv.numel() > 1, codes.dtype == E5M2.dtype, weight.finite, short),
    )
    linear = _Linear(
        product,
        *(x.data_ptr(), None if scale is None else address(scale, torch.float32, 1)),
        scale_inv if in_blocks else None,
        *(weight.smallest, weight.largest, *fold, rule.granularity.cols, matrix_quantize.scale_rule(rule)),
        *(short, rule.fmt is E5M2, rule.granularity.rows == 1, e8m0),
    )
    failed = compiled().few_tokens(ctypes.byref(linear), inner_loop(), thread_count(n * k))
    if failed < 0:
        raise MemoryError(f"no memory for {m} x {k} numbers")
    return None if failed else to
