"""Products with float32 sums of unquantised matrices, on any device, and what follows: scales, bias, one rounding."""

from __future__ import annotations

from typing import Any

import torch

from ..kernels.cpu import gemms


def matmul_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
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
    return finish(matmul_fp32(a, b), None, bias, out_dtype)


def finish(
    acc: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    if scale is not None:
        acc = acc.mul_(scale)
    if bias is not None:
        acc = acc.add_(bias.to(acc.dtype))
    return acc.to(out_dtype)


def keeps_float32(device: torch.device) -> bool:
    """Whether float32 products keep all bits of their operands: users may let torch round them, to TF32 or bfloat16.

    Short operands lose nothing by that.
    """
    matmul: Any = (torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn).matmul
    setting = getattr(matmul, "fp32_precision", None)
    if setting is None:  # before torch 2.9
        return torch.get_float32_matmul_precision() == "highest"
    return setting in ("none", "ieee")
