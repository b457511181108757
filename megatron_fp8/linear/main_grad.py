"""Megatron-Core's gradient buffers, main_grad: which one a weight has, and whether it is zeros.

Megatron-Core zeroes all buffers before an iteration. Then the first GEMM that contributes to a buffer can write its
result in place of adding it: 4 bytes a weight are moved, not 16 (write the product, read both, write the sum).
``Buffers are zeros`` is known by a mark: DistributedDataParallel's zeroing sets it (mcore/params.py), its
backward hook, which runs after each backward of the parameter, removes it, and so does a replay of a CUDA graph. It
holds for one buffer, for eager execution or for one capture: a captured write would be replayed for later microbatches
too. Within a backward Megatron-Core's own flag, grad_added_to_main_grad, says that a fused GEMM has contributed.
Without a mark results are added.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch


class _Zeros(NamedTuple):
    """The mark of a parameter: its main_grad [N, K] is zeros, in eager execution or in one capture."""

    main_grad: torch.Tensor
    captured: bool


def mark_zeros(parameters: Iterable[Any], *, captured: bool = False) -> None:
    """Marks the main_grad of each parameter as zeros.

    Args:
        captured: the caller captures a CUDA graph, each replay of which starts with zeros.
    """
    for parameter in parameters:
        if (main_grad := getattr(parameter, "main_grad", None)) is not None:
            parameter.main_grad_zeros = _Zeros(main_grad, captured or _is_captured(main_grad))


def unmark(parameters: Iterable[Any]) -> None:
    """Removes the marks: something was, or may have been, added."""
    for parameter in parameters:
        parameter.main_grad_zeros = None


def is_zeros(weight: Any, *, captured: bool) -> bool:
    """Whether the weight's main_grad is known to be zeros, so that a GEMM may overwrite it."""
    mark: _Zeros | None = getattr(weight, "main_grad_zeros", None)
    if mark is None or weight.grad_added_to_main_grad:
        return False
    return mark.main_grad is weight.main_grad and mark.captured == (captured or _is_captured(mark.main_grad))


def _is_captured(main_grad: torch.Tensor) -> bool:
    return main_grad.is_cuda and torch.cuda.is_current_stream_capturing()


def main_grad_of(weight: torch.Tensor) -> torch.Tensor | None:
    """The buffer [N, K] to which the weight's gradient is added (Megatron-Core's fused wgrad); None without one.
    ValueError if it has another shape."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is not None and main_grad.shape != weight.shape:
        raise ValueError(
            f"a main_grad of shape {tuple(main_grad.shape)} is no sum of gradients of a weight {tuple(weight.shape)}:"
            " give it the weight's shape"
        )
    return main_grad


def added_to_main_grad(weight: Any) -> torch.Tensor:
    """The dummy gradient for autograd if dw was added to main_grad; DDP drops it."""
    weight.grad_added_to_main_grad = True
    # Not None: with overlapped reduction DDP needs its gradient hook to run and checks that a gradient exists.
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)
