"""torch's own products of 16-bit matrices on a CPU without instructions for them, given to float32.

oneDNN has a GEMM for BF16 where there is AVX512, and for FP16 where there is AVX512-FP16. Elsewhere, as on many
laptops, torch multiplies element by element, 6 to 80 times as slow as in float32: nine tenths of an FP8 training step
went into the output layer, the layers kept in BF16 and attention's backward. `replace_slow` registers other kernels
for these operations, in this process: operands become float32, which is exact, sums are float32, and each result is
rounded once. So the numbers are at least as exact as torch's.

`megatron-fp8` calls it in each process that computes; importing this package does not, since whose process it is
decides what torch does there. Rejected: another function where this package calls a product. The products of
Megatron-Core's own layers, of Hugging Face's models and of torch's attention are not called from here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from .gemms import cpu_multiplies, matmul_fp32


@cache
def replace_slow(dtype: torch.dtype = torch.bfloat16) -> bool:
    """Replace torch's products of bfloat16 (or float16) for the rest of this process if they are slow on this CPU;
    whether they are.

    Products of other dtypes and on other devices stay torch's, and so do errors. ``out=`` is not replaced, nor code that
    `torch.compile` makes.
    """
    slow = not cpu_multiplies(dtype) and hasattr(torch.library, "get_kernel")
    if slow:
        _KEPT.append(register(dtype))
    return slow


_KEPT: list[torch.library.Library] = []


def register(dtype: torch.dtype) -> torch.library.Library:
    """The replaced operations of the CPU, slow or not; they last as long as the library that comes back."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in _FUNCTIONS.items():
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        with warnings.catch_warnings():  # that an operation is replaced is what is meant
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            library.impl(name, partial(function, dtype, kernel), "CPU", with_keyset=True)
    return library


def _mm(dtype: torch.dtype, kernel: Any, keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, N] = a [M, K] @ b [K, N]."""
    if not _multiply(a, b, dtype):
        return kernel.call_boxed(keys, a, b)
    return matmul_fp32(a, b.t()).to(dtype)


def _addmm(
    dtype: torch.dtype, kernel: Any, keys: Any, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
    *, beta: Any = 1, alpha: Any = 1,
) -> torch.Tensor:  # fmt: skip
    """beta * bias + alpha * (a [M, K] @ b [K, N]); a beta of 0 leaves the bias unread."""
    if not (bias.dtype == dtype and _multiply(a, b, dtype) and _spreads(bias, (len(a), b.shape[1]))):
        return kernel.call_boxed(keys, bias, a, b, beta=beta, alpha=alpha)
    product = matmul_fp32(a, b.t())
    if alpha != 1:
        product.mul_(alpha)
    return (product.add_(bias, alpha=beta) if beta else product).to(dtype)


def _in_float32(dtype: torch.dtype, kernel: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """The same operation of float32 copies, its results rounded to ``dtype``; where no operand is of it, itself."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if not any(x.dtype == dtype for x in tensors) or len({x.dtype for x in tensors[:3]}) > 1:
        return kernel.call_boxed(keys, *args, **kwargs)
    wide = [_wide(x, dtype) for x in args]
    found = kernel.call_boxed(keys, *wide, **{name: _wide(x, dtype) for name, x in kwargs.items()})
    return found.to(dtype) if isinstance(found, torch.Tensor) else tuple(x.to(dtype) for x in found)


def _wide(x: Any, dtype: torch.dtype) -> Any:
    return x.to(torch.float32) if isinstance(x, torch.Tensor) and x.dtype == dtype else x


def _multiply(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether they are matrices of it that fit; torch says of others what is wrong."""
    return a.dtype == b.dtype == dtype and a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]


def _spreads(bias: torch.Tensor, shape: tuple[int, int]) -> bool:
    sizes = zip(reversed(bias.shape), reversed(shape), strict=False)
    return bias.ndim <= 2 and all(own in (1, size) for own, size in sizes)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _in_float32,
    "baddbmm": _in_float32,
    # The forward's code for 16 bits is as fast as float32's.
    "_scaled_dot_product_flash_attention_for_cpu_backward": _in_float32,
}
