"""Replaces torch's 16-bit products in float32 on CPUs without instructions for them.

oneDNN has a GEMM for BF16 on CPUs with AVX512, and for FP16 with AVX512-FP16. On others, such as many laptops, torch
multiplies more than a few rows element by element, 6 to 80 times slower than in float32: nine tenths of an FP8
training step went into the output layer, the layers kept in BF16 and attention's backward. `replace_slow` registers
other kernels for these operations in this process: operands become float32, which is exact, sums are float32, and each
result is rounded once. So results are at least as exact as torch's.

`megatron-fp8` calls it in each process that computes. Importing this package does not: the process's owner decides how
torch computes. Rejected: a separate function for this package's own products. Megatron-Core's layers, Hugging Face's
models and torch's attention call torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .gemms import cpu_multiplies, matmul_fp32, multiplies

FEW = 4
"""torch's time is proportional to the rows: up to this many of float16, with both operands contiguous along K, its own
code is faster. bfloat16 always uses the replacement, so that a decoded token has the same bits as in a batch."""


@cache
def replace_slow(dtype: torch.dtype = torch.bfloat16) -> bool:
    """Replaces torch's products of bfloat16 (or float16) for the rest of this process if they are slow on this CPU.
    Returns whether they are.

    Products of other dtypes and on other devices stay torch's, and so do errors. Not replaced: `addbmm`, convolutions,
    ``out=``, in-place operations, and compiled code.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype={dtype} has no slow products: give torch.bfloat16 or torch.float16.")
    slow = not cpu_multiplies(dtype) and hasattr(torch.library, "get_kernel")
    if slow:
        _replaced.add(dtype)
        _registered()
    return slow


def is_replaced(dtype: torch.dtype) -> bool:
    """Whether this process has replaced them."""
    return dtype in _replaced


_replaced: set[torch.dtype] = set()


@cache
def _registered() -> torch.library.Library:
    return register(_replaced)


def register(dtypes: Container[torch.dtype]) -> torch.library.Library:
    """Replaces the CPU's operations, slow or not, for the dtypes in ``dtypes`` at the time of a call, as long as the
    returned library exists."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in _FUNCTIONS.items():
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        with warnings.catch_warnings():  # a warning that an operation is replaced
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            library.impl(name, partial(_kernel, function, dtypes, kernel), "CPU", with_keyset=True)
    return library


def _kernel(
    function: Callable[..., Any],
    dtypes: Container[torch.dtype],
    kernel: Any,
    keys: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The kernel that torch calls: `function` if the second argument has one of these dtypes, else torch's."""
    if args[1].dtype in dtypes:
        # A kernel runs below dispatch modes and tensor subclasses: they must not see its calls.
        with torch._C.DisableTorchFunction():
            found = function(partial(kernel.call_boxed, keys), *args, **kwargs)
        if found is not None:
            return found
    return kernel.call_boxed(keys, *args, **kwargs)


def _mm(kernel: Callable[..., Any], a: Tensor, b: Tensor) -> Tensor | None:
    """[M, N] = a [M, K] @ b [K, N]; None: use torch's kernel, because it is fast or must raise the error."""
    sums = None if _torch_is_fast(a, b) else _sums(a, b, kernel)
    return None if sums is None else sums.to(a.dtype)


def _bmm(kernel: Callable[..., Any], a: Tensor, b: Tensor) -> Tensor | None:
    """[B, M, N] = a [B, M, K] @ b [B, K, N]."""
    return kernel(_wide(a), _wide(b)).to(a.dtype) if a.dtype == b.dtype else None


def _addmm(
    kernel: Callable[..., Any], bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    """beta * bias + alpha * (a [M, K] @ b [K, N])."""
    if bias.dtype != a.dtype or _torch_is_fast(a, b) or not _spreads(bias, (*a.shape[:1], *b.shape[1:])):
        return None
    return _add_bias(_sums(a, b, partial(_without_bias, kernel)), bias, beta, alpha)


def _baddbmm(
    kernel: Callable[..., Any], bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    """beta * bias + alpha * (a [B, M, K] @ b [B, K, N])."""
    if not (bias.dtype == a.dtype == b.dtype and a.ndim == b.ndim == 3):
        return None
    if not _spreads(bias, (*a.shape[:2], b.shape[2])):
        return None
    return _add_bias(_without_bias(kernel, _wide(a), _wide(b)), bias, beta, alpha)


def _grouped_mm(
    kernel: Callable[..., Any],
    a: Tensor,
    b: Tensor,
    offs: Any = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Tensor | None:
    """Products of groups of rows, such as experts' tokens; torch needs strides of a multiple of 16 bytes."""
    aligned = all(step == 1 or step % 8 == 0 for x in (a, b) for step in x.stride())
    if not aligned or a.dtype != b.dtype or bias is not None or out_dtype not in (None, a.dtype):
        return None
    return kernel(_wide(a), _wide(b), offs).to(a.dtype)


def _attention_backward(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, ...] | None:
    """Gradients of q, k and v by the flash kernel's backward."""
    dtype = args[1].dtype
    if any(x.dtype != dtype for x in args[:5]):
        return None
    found = kernel(*map(_wide, args), **{name: _wide(x) for name, x in kwargs.items()})
    return tuple(x.to(dtype) for x in found)


def _sums(a: Tensor, b: Tensor, kernel: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    """float32 a @ b, if they are matrices of one dtype with fitting shapes."""
    if not (a.dtype == b.dtype and a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]):
        return None
    if a.dtype == torch.bfloat16 and multiplies(a, b):
        return matmul_fp32(a, b.t())
    return kernel(_wide(a), _wide(b))


def _without_bias(kernel: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    """a @ b by a kernel that adds. alpha is applied afterwards: scaling an operand could leave float32's range."""
    return kernel(torch.zeros((), dtype=torch.float32, device="cpu"), a, b, beta=0)


def _add_bias(sums: Tensor | None, bias: Tensor, beta: Any, alpha: Any) -> Tensor | None:
    """beta * bias + alpha * sums, rounded once; a beta of 0 leaves the bias unread."""
    if sums is None or isinstance(beta, complex) or isinstance(alpha, complex):
        return None
    if alpha != 1:
        sums = sums.mul_(alpha)
    return (sums.add_(bias, alpha=+beta) if beta else sums).to(bias.dtype)


def _wide(x: Any) -> Any:
    """Converts a 16-bit tensor to float32; an expanded dimension stays expanded."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.bfloat16, torch.float16):
        return x
    if x.numel() and 0 in x.stride():
        once = x[tuple(slice(1) if step == 0 else slice(None) for step in x.stride())]
        return once.to(torch.float32).expand(x.shape)
    return x.to(torch.float32)


def _torch_is_fast(a: Tensor, b: Tensor) -> bool:
    if a.dtype != torch.float16 or not a.ndim == b.ndim == 2:
        return False
    few = min(len(a), b.shape[1]) <= FEW
    return few and (a.stride(1) == 1 or len(a) == 1) and (b.stride(0) == 1 or b.shape[1] == 1)


def _spreads(bias: Tensor, shape: tuple[int, ...]) -> bool:
    sizes = zip(reversed(bias.shape), reversed(shape), strict=False)
    return bias.ndim <= len(shape) and all(own in (1, size) for own, size in sizes)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "_grouped_mm": _grouped_mm,
    # The forward's code for 16 bits is as fast as float32's.
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
