"""Disables torch's fused transformer encoder kernels around FP8 linears in evaluation.

TransformerEncoderLayer runs one fused kernel over its linears' weights where no gradient is needed, and
TransformerEncoder passes it sequences without padding (nested tensors). These bypass the linears' forward: a
converted layer would silently run in high precision, or fail. Both are disabled where a linear inside was
converted, by the conditions that torch checks: a hook on any submodule, and the encoder's
``use_nested_tensor``.

The two hooks below do nothing; they mark what was disabled. torch copies and pickles hooks with the module,
so a copy can be converted back too.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .linear import Fp8Linear


def leave_fast_paths(model: nn.Module) -> None:
    """Disable the fused kernels of encoders that contain converted linears."""
    for module in model.modules():
        if not isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
            continue
        inside = next((m for m in module.modules() if isinstance(m, Fp8Linear)), None)
        if inside is None:
            continue
        if isinstance(module, nn.TransformerEncoderLayer) and not _has(inside, no_fused_kernel):
            inside.register_forward_pre_hook(no_fused_kernel)
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
            module.use_nested_tensor = False
            module.register_forward_pre_hook(nested_tensors_before)


def restore_fast_paths(model: nn.Module) -> None:
    """Undo ``leave_fast_paths``."""
    for module in model.modules():
        _remove(module, no_fused_kernel)
        if isinstance(module, nn.TransformerEncoder) and _remove(module, nested_tensors_before):
            module.use_nested_tensor = True


def no_fused_kernel(module: nn.Module, args: Any) -> None:
    """An empty hook. Its presence makes torch skip the layer's fused kernel."""


def nested_tensors_before(module: nn.Module, args: Any) -> None:
    """An empty hook that marks an encoder which used nested tensors before the conversion."""


def _has(module: nn.Module, hook: Any) -> bool:
    return hook in module._forward_pre_hooks.values()


def _remove(module: nn.Module, hook: Any) -> bool:
    """Remove the hook; returns whether it was there."""
    keys = [key for key, found in module._forward_pre_hooks.items() if found is hook]
    for key in keys:
        del module._forward_pre_hooks[key]
    return bool(keys)
