"""NVIDIA's apex, if installed: which parts Megatron-Core uses.

Megatron-Core selects apex's fused Adam, gradient clipping and LayerNorm when it is imported, and its fused accumulation
of weight gradients by ``gradient_accumulation_fusion``. This package leaves apex in place where it is complete (on a
GPU, with the CUDA extension that the part needs), and replaces the parts that apex lacks: RMSNorm, and anything whose
extension was not built. FP8 linears accumulate their own weight gradients in float32; apex does it for BF16 linears.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

from .. import environment as compat
from ..layers.norm import Norm
from .patching import Patch


class NormOfConfig:
    """apex's LayerNorm or this package's RMSNorm, by config.normalization; arguments as both take."""

    def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.normalization != "LayerNorm":
            return Norm(config, *args, **kwargs)
        from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

        return FusedLayerNorm(config, *args, **kwargs)


def norm_class() -> type:
    """Returns the class of norms for layer specs and the final norm."""
    return NormOfConfig if compat.uses_apex("fused_layer_norm_cuda") else Norm


def apex_use(config: Any, model_chunks: list[Any]) -> str:
    """Returns what apex does in this training: 'not installed', 'used for ...', or why an installed one is not used."""
    if not compat.has_apex():
        return "not installed"
    try:
        version = f"apex {metadata.version('apex')}"
    except metadata.PackageNotFoundError:
        version = "apex"
    uses = [what for what, used in _uses(config, model_chunks).items() if used]
    return f"{version} used for {', '.join(uses)}" if uses else f"{version} is not used: {_reason_unused()}"


def _uses(config: Any, model_chunks: list[Any]) -> dict[str, bool]:
    """Returns purpose -> whether Megatron-Core currently uses apex for it."""
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads

    modules = [module for chunk in model_chunks for module in chunk.modules()]
    clips = getattr(sys.modules.get("amp_C"), "multi_tensor_scale", None)
    return {
        "Adam": optimizer.Adam.__module__.startswith("apex."),
        "gradient clipping": clips is not None and clip_grads.multi_tensor_scale_impl is clips,
        "LayerNorm": any(type(module).__name__ == "FusedLayerNorm" for module in modules),
        "weight gradients of BF16 linears, accumulated in float32": bool(config.gradient_accumulation_fusion),
    }


def _reason_unused() -> str:
    if not compat.has_cuda():
        return "its kernels need a CUDA device"
    if compat.has_te():
        return "Megatron-Core prefers Transformer Engine's"
    return "it was built without its CUDA extensions"


def cpu_patches() -> list[Patch]:
    """Patches for apex without a GPU: Megatron-Core's own functions clip in place of CUDA kernels."""
    from megatron.core import utils

    core = "megatron.core.optimizer"
    names = {
        "multi_tensor_applier": utils.local_multi_tensor_applier,
        "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
        "l2_norm_impl": utils.local_multi_tensor_l2_norm,
    }
    return [
        Patch(f"{core}.{module}", name, names[name], "apex's kernels are for CUDA tensors")
        for module, names_of_module in {"clip_grads": tuple(names), "optimizer": tuple(names)[:2]}.items()
        for name in names_of_module
    ]
