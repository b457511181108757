"""GEMMs with float32 accumulation on any device, then scales, bias, one rounding.

The GEMM of 16-bit operands (float32 sums, rounded once) depends on the processor:

| processor | GEMM |
|---|---|
| NVIDIA GPU | torch's, on tensor cores; float16 too |
| with AVX512-BF16 or AMX, and a C compiler | cpu/gemm.c |
| with AVX2 or Arm, and a C compiler | cpu/gemm_float32.c, in float32, which is as exact |
| any other | none: float32 GEMM, as fast on CPUs without BF16 |

GPUs multiply float32 operands outside the tensor cores, which is much slower.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .cast_dispatch import in_memory
from .cpu import emulation


def multiplies(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a bfloat16 GEMM takes a [M, K] and b [N, K]: on a GPU, or large ones on a CPU that has one."""
    if a.is_cuda and b.is_cuda:
        return not vars(torch.version).get("hip")
    # Subclasses, such as fake tensors, have no memory of their own.
    if {type(a), type(b)} - {torch.Tensor, torch.nn.Parameter}:
        return False
    large = a.numel() + b.numel() >= emulation.MIN_PRODUCT
    return large and a.is_cpu and b.is_cpu and emulation.has_matmul()


@cache
def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether torch's bfloat16 or float16 GEMM is fast on this CPU: native instructions, or oneDNN's AVX512 code.

    Without them it takes at least six times as long as float32.
    """
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return bool(torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, name)())


def matmul_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 [M, N] = a [M, K] @ b [N, K]^T; any strides.

    Changes no process-wide setting: other threads may multiply at the same time.
    """
    short = a.dtype == torch.bfloat16 or (a.dtype == torch.float16 and a.is_cuda)
    if not (short and a.dtype == b.dtype and multiplies(a, b)):
        return a.to(torch.float32) @ b.to(torch.float32).t()
    if a.is_cuda:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    product = emulation.multiply(
        emulation.Operand(in_memory(a)), emulation.Operand(in_memory(b)), torch.float32
    )
    assert product is not None, "without scales there is no range to leave"
    return product


def add_matmul_fp32(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, zeros: bool = False) -> None:
    """into [M, N] += a [M, K] @ b [N, K]^T: fused on a GPU with a float32 ``into``, else by a separate addition.

    ``zeros``: ``into`` is zeros, and need not be read.
    """
    if into.is_cuda and multiplies(a, b) and add_in_product(into, a, b, beta=0 if zeros else 1):
        return
    into.add_(matmul_fp32(a, b))


def add_in_product(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: int = 1) -> bool:
    """``add_matmul_fp32`` by torch.addmm. Returns False, and does nothing, for unsupported dtypes."""
    short = a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)
    if not short or into.dtype != torch.float32 or not _adds_to_float32(into.device):
        return False
    torch.addmm(into, a, b.t(), out_dtype=torch.float32, beta=beta, out=into)
    return True


@cache
def _adds_to_float32(device: torch.device) -> bool:
    """Whether torch.addmm adds a product of 16-bit operands to float32. Up to 2.9 the sum had their dtype
    (pytorch#167931)."""
    a, into = (torch.zeros(16, 16, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32))
    try:
        torch.addmm(into, a, a, out_dtype=torch.float32, out=into)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return True


def matmul_high_precision(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """a [M, K] @ b [N, K]^T (+ bias [N]) without quantization, for GEMMs that stay in high precision."""
    slow = a.is_cpu and a.dtype in (torch.bfloat16, torch.float16) and not cpu_multiplies(a.dtype)
    if bias is None and out_dtype == a.dtype == b.dtype and not slow:
        return a @ b.t()
    return finish(matmul_fp32(a, b), None, bias, out_dtype)


def matmul_batch_invariant(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``matmul_high_precision`` on a CPU, in which a row's bits do not depend on the other rows of a."""
    if a.dtype == b.dtype == torch.bfloat16 and emulation.has_matmul() and a.numel() and b.numel():
        addend = None if bias is None else bias.to(torch.float32).contiguous()
        left, right = emulation.Operand(in_memory(a)), emulation.Operand(in_memory(b))
        in_c = out_dtype if out_dtype == torch.bfloat16 else torch.float32
        product = emulation.multiply(left, right, in_c, addend)
        assert product is not None, "without scales there is no range to leave"
        return product.to(out_dtype)
    work = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return finish(matmul_by_row(a.to(work), b.to(work)), None, bias, out_dtype)


def matmul_by_row(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [N, K]^T, one row at a time, so that torch always multiplies the same shapes."""
    if not len(a):
        return a.new_empty(0, len(b))
    # Each row is copied: libraries may choose by the address's alignment.
    return torch.cat([row.clone() @ b.t() for row in a.contiguous().split(1)])


def finish(
    acc: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """(acc [M, N] * scale [] + bias [N]) rounded once to out_dtype; overwrites acc.

    scale broadcasts to [M, N].
    """
    if scale is not None:
        acc = acc.mul_(scale)
    if bias is not None:
        acc = acc.add_(bias.to(acc.dtype))
    return acc.to(out_dtype)


def keeps_float32(device: torch.device) -> bool:
    """Whether float32 GEMMs use all operand bits; torch settings may allow TF32 or bfloat16.

    bfloat16 operands lose nothing by those settings.
    """
    matmul: Any = (torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn).matmul
    setting = getattr(matmul, "fp32_precision", None)
    if setting is None:  # before torch 2.9
        return torch.get_float32_matmul_precision() == "highest"
    return setting in ("none", "ieee")
