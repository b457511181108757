"""Patches for GPUs without Transformer Engine and apex, where Megatron-Core's replacements wait for the GPU.

Its own gradient norm reads one number a weight back to the host; a large model has hundreds of weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .patching import Patch


def norm_without_waiting(
    chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], per_tensor: bool, *args: Any
) -> tuple[torch.Tensor, None]:
    """Returns the 2-norm of all tensors of all lists as one vector: float32 [1], on ``noop_flag``'s device; amp_C's
    signature.

    NaN or Inf in any tensor makes it NaN or Inf.
    """
    tensors = [tensor for tensors in tensor_lists for tensor in tensors]
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
    # An offloaded optimizer's tensors are on the CPU.
    stacked = torch.stack([norm.to(noop_flag.device) for norm in norms])
    return torch.linalg.vector_norm(stacked).view(1), None


def scale_at_once(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps multi_tensor_scale: few launches if tensors are scaled in place, as in clipping."""

    @functools.wraps(original)
    def scale(chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], factor: Any) -> None:
        sources, results = tensor_lists
        if all(a is b for a, b in zip(sources, results, strict=True)) and sources:
            torch._foreach_mul_(results, factor)
        else:
            original(chunk_size, noop_flag, tensor_lists, factor)

    return scale


def patches() -> list[Patch]:
    """Returns patches for the replacements that Megatron-Core selected at its import; none where it selected amp_C's."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    module = "megatron.core.optimizer.clip_grads"
    found = []
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        why = "the replacement for amp_C's norm reads a number back for each tensor"
        found.append(Patch(module, "l2_norm_impl", norm_without_waiting, why))
    if clip_grads.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
        why = "the replacement for amp_C's scaling launches two kernels for each tensor"
        found.append(Patch(module, "multi_tensor_scale_impl", scale_at_once, why, wrap=True))
    return found
