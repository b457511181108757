"""torch's own products of BF16 on a CPU without instructions for them, given to float32.

Such a processor (most laptops; any x86 without AVX512) has no GEMM of oneDNN's for BF16, and torch multiplies element by
element, 6 to 80 times as slow as in float32: nine tenths of an FP8 training step went into the output layer, the layers
kept in BF16 and attention's backward. `replace_slow` registers other kernels for these operations, in this process:
operands become float32, which is exact, sums are float32, and each result is rounded once. So the numbers are at least as
exact as torch's.

`megatron-fp8` calls it in each process that computes; importing this package does not, since whose process it is decides
what torch does there. Rejected: another function where this package calls a product. The products of Megatron-Core's own
layers, of Hugging Face's models and of torch's attention are not called from here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from .gemms import cpu_multiplies_bfloat16, matmul_fp32


@cache
def replace_slow() -> bool:
    """Replace torch's products of BF16 for the rest of this process if they are slow on this CPU; whether they are.

    Products of other dtypes and on other devices stay torch's, and so do errors. ``out=`` is not replaced, nor code that
    `torch.compile` makes.
    """
    slow = not cpu_multiplies_bfloat16() and hasattr(torch.library, "get_kernel")
    if slow:
        _KEPT.append(register())
    return slow


_KEPT: list[torch.library.Library] = []


def register() -> torch.library.Library:
    """The replaced operations of the CPU, wherever it is; they last as long as the library that comes back."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in _FUNCTIONS.items():
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        with warnings.catch_warnings():  # that an operation is replaced is what is meant
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            library.impl(name, partial(function, kernel), "CPU", with_keyset=True)
    return library


def _mm(kernel: Any, keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, N] = a [M, K] @ b [K, N]."""
    if not _multiply(a, b):
        return kernel.call_boxed(keys, a, b)
    return matmul_fp32(a, b.t()).to(torch.bfloat16)


def _addmm(
    kernel: Any,
    keys: Any,
    bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> torch.Tensor:
    """beta * bias + alpha * (a [M, K] @ b [K, N]); a beta of 0 leaves the bias unread."""
    if not (bias.dtype == torch.bfloat16 and _multiply(a, b) and _spreads(bias, (len(a), b.shape[1]))):
        return kernel.call_boxed(keys, bias, a, b, beta=beta, alpha=alpha)
    product = matmul_fp32(a, b.t())
    if alpha != 1:
        product.mul_(alpha)
    return (product.add_(bias, alpha=beta) if beta else product).to(torch.bfloat16)


def _in_float32(kernel: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """The same operation of float32 copies, its results rounded to BF16; where no operand is BF16, itself."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if not any(x.dtype == torch.bfloat16 for x in tensors) or len({x.dtype for x in tensors[:3]}) > 1:
        return kernel.call_boxed(keys, *args, **kwargs)
    found = kernel.call_boxed(keys, *map(_wide, args), **{name: _wide(x) for name, x in kwargs.items()})
    return _short(found) if isinstance(found, torch.Tensor) else tuple(map(_short, found))


def _wide(x: Any) -> Any:
    return x.to(torch.float32) if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x


def _short(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16)


def _multiply(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether they are BF16 matrices that fit; torch says of others what is wrong."""
    matrices = a.dtype == b.dtype == torch.bfloat16 and a.ndim == b.ndim == 2
    return matrices and a.shape[1] == b.shape[0]


def _spreads(bias: torch.Tensor, shape: tuple[int, int]) -> bool:
    sizes = zip(reversed(bias.shape), reversed(shape), strict=False)
    return bias.ndim <= 2 and all(own in (1, size) for own, size in sizes)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _in_float32,
    "baddbmm": _in_float32,
    # The forward's code for BF16 is as fast as float32's.
    "_scaled_dot_product_flash_attention_for_cpu_backward": _in_float32,
}
