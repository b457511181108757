"""torch's transformer encoder in evaluation: kernels that read the weights of linears, past their forward.

TransformerEncoderLayer runs one fused kernel over its linears' weights where nothing needs a gradient, and
TransformerEncoder hands it sequences without their padding (nested tensors). A converted layer would run in high
precision there, without a word, or not at all. So both are switched off where a linear inside was converted, by the means
that torch checks: a hook on any module inside the layer, and the encoder's ``use_nested_tensor``.

What was switched off is to be found again in the model itself, by the two hooks below. They do nothing. Hooks are kept by
torch where a copy or a pickle takes them along, so a copy can be converted back too.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .linear import Fp8Linear


def leave_fast_paths(model: nn.Module) -> None:
    """Make encoders call their converted linears."""
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
    """Undo it."""
    for module in model.modules():
        _remove(module, no_fused_kernel)
        if isinstance(module, nn.TransformerEncoder) and _remove(module, nested_tensors_before):
            module.use_nested_tensor = True


def no_fused_kernel(module: nn.Module, args: Any) -> None:
    """Keeps the layer around this linear from its fused kernel: that some hook is there is what torch asks."""


def nested_tensors_before(module: nn.Module, args: Any) -> None:
    """Marks an encoder that used nested tensors before the conversion."""


def _has(module: nn.Module, hook: Any) -> bool:
    return hook in module._forward_pre_hooks.values()


def _remove(module: nn.Module, hook: Any) -> bool:
    """Take the hook away; whether it was there."""
    keys = [key for key, found in module._forward_pre_hooks.items() if found is hook]
    for key in keys:
        del module._forward_pre_hooks[key]
    return bool(keys)
