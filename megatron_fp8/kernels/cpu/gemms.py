"""16-bit products with a float32 result, one rounding from float32 sums: which GEMM a processor gets.

| processor | GEMM |
|---|---|
| NVIDIA GPU | torch's, on tensor cores; float16 too |
| with AMX, and MKL in torch | MKL's (mkl.py) |
| with AVX512-BF16, and a C compiler | gemm.c |
| any other | none: callers multiply in float32, which is as exact; CPUs without BF16 lose no time by it |

On a GPU the difference is large: float32 operands are multiplied outside the tensor cores.
"""

from __future__ import annotations

import torch

from .. import in_memory
from . import loops as cpu
from . import mkl


def takes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``matmul`` multiplies this dtype there."""
    return dtype == torch.bfloat16 or (dtype == torch.float16 and device.type == "cuda")


def multiplies(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``matmul`` is for operands that lie like these: on a GPU, or not small on a CPU that has a GEMM."""
    if a.is_cuda and b.is_cuda:
        return not vars(torch.version).get("hip")
    on_cpu = a.device.type == b.device.type == "cpu"
    if {type(a), type(b)} - {
        torch.Tensor,
        torch.nn.Parameter,
    }:  # others, such as fake ones, have no memory of their own
        return False
    large = a.numel() + b.numel() >= cpu.MIN_ELEMENTS
    return on_cpu and large and (mkl.has_matmul() or cpu.has_matmul())


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 [M, N] = a [M, K] @ b [N, K]^T of matrices of any strides, of one dtype that ``takes`` names."""
    if a.is_cuda:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    a, b = in_memory(a), in_memory(b)
    return mkl.matmul(a, b) if mkl.has_matmul() else cpu.matmul(a, b)
