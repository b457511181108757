"""Patches for machines without Transformer Engine, or whose apex cannot run.

Megatron-Core reads some names of Transformer Engine without checking that it is installed. Its replacement of apex's
gradient norm reads one number a weight back to the host, and a large model has hundreds of weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from packaging.version import Version

from .patching import PatchList

without_te = PatchList()
"""For processes without Transformer Engine."""


class _NoFp8State:
    """Replaces Transformer Engine's global FP8 state when a norm or an activation is recomputed."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """False: no GEMM runs inside a norm or an activation function."""
        return False


def _null_context(**kwargs: Any) -> AbstractContextManager[None]:
    return nullcontext()


_WHY = "recompute_modules=['layernorm'] and ['moe_act'] use Transformer Engine's name, FP8 or not"
without_te.replace("utils._te_version", Version("0.0"), "is_te_min_version() compares None: a TypeError")
without_te.replace(
    "transformer.moe.moe_utils.te_general_gemm",
    None,
    "the router asks `te_general_gemm is not None`, a name that only Transformer Engine defines",
    create=True,
)
without_te.replace("tensor_parallel.random.FP8GlobalStateManager", _NoFp8State, _WHY, create=True)
without_te.replace("tensor_parallel.random.fp8_autocast", _null_context, _WHY, create=True)
without_te.replace("tensor_parallel.random.activation_recompute_forward", _null_context, _WHY, create=True)
without_te.replace(
    "transformer.multi_latent_attention.HAVE_TE",
    False,
    "it assumes that Transformer Engine is installed, and tests whether a layer is of the class None",
)


def on_cpu() -> PatchList:
    """Returns patches for apex without a GPU: Megatron-Core's own functions clip in place of CUDA kernels."""
    from megatron.core import utils

    patches = PatchList("megatron.core.optimizer")
    for module, names in {
        "clip_grads": ("multi_tensor_applier", "multi_tensor_scale_impl", "l2_norm_impl"),
        "optimizer": ("multi_tensor_applier", "multi_tensor_scale_impl"),
    }.items():
        for name in names:
            own = f"local_{name.removesuffix('_impl')}".replace("l2_norm", "multi_tensor_l2_norm")
            patches.replace(f"{module}.{name}", getattr(utils, own), "apex's kernels are for CUDA tensors")
    return patches


def on_gpu() -> PatchList:
    """Returns patches for the replacements that Megatron-Core selected at its import; none where it selected amp_C's."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    patches = PatchList("megatron.core.optimizer.clip_grads")
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        why = "the replacement for amp_C's norm reads a number back for each tensor"
        patches.replace("l2_norm_impl", norm_without_waiting, why)
    if clip_grads.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
        why = "the replacement for amp_C's scaling launches two kernels for each tensor"
        patches.wrap("multi_tensor_scale_impl", why)(scale_at_once)
    return patches


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


def scale_at_once(
    original: Any, chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], factor: Any
) -> None:
    """Scales tensors in place, as in clipping, in few launches; amp_C's signature."""
    sources, results = tensor_lists
    if all(a is b for a, b in zip(sources, results, strict=True)) and sources:
        torch._foreach_mul_(results, factor)
    else:
        original(chunk_size, noop_flag, tensor_lists, factor)
