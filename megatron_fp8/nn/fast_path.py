"""torch's transformer encoder in evaluation: kernels that read the weights of linears, past their forward.

TransformerEncoderLayer runs one fused kernel over its linears' weights where nothing needs a gradient, and
TransformerEncoder hands it sequences without their padding (nested tensors). A converted layer would run in high
precision there, without a word, or not at all. So both are switched off where a linear inside was converted, by the means
that torch checks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .linear import Fp8Linear

_HOOKS, _NESTED = "_fp8_no_fused_kernel", "_fp8_use_nested_tensor"


def leave_fast_paths(model: nn.Module) -> None:
    """Make encoders call their converted linears."""
    for module in model.modules():
        inside = next((m for m in module.modules() if isinstance(m, Fp8Linear)), None)
        if inside is None:
            continue
        if isinstance(module, nn.TransformerEncoderLayer) and _HOOKS not in module.__dict__:
            module.__dict__[_HOOKS] = inside.register_forward_pre_hook(_nothing)
        if isinstance(module, nn.TransformerEncoder) and _NESTED not in module.__dict__:
            module.__dict__[_NESTED], module.use_nested_tensor = module.use_nested_tensor, False


def restore_fast_paths(model: nn.Module) -> None:
    """Undo it."""
    for module in model.modules():
        if _HOOKS in module.__dict__:
            module.__dict__.pop(_HOOKS).remove()
        if _NESTED in module.__dict__:
            module.use_nested_tensor = module.__dict__.pop(_NESTED)


def _nothing(module: nn.Module, args: Any) -> None:
    """That a hook is there is what torch asks."""
