"""save_pretrained for transformers models whose weights are FP8 codes.

transformers writes tensor memory, and an FP8 parameter's memory differs from its nominal dtype. So it gets
dequantised weights, as exports and state dicts do; ``megatron-fp8 export`` writes FP8 files.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from ..params.fp8_parameter import Fp8Parameter


def save_in_high_precision(model: torch.nn.Module) -> None:
    """Make ``model.save_pretrained``, if present, write dequantised weights."""
    if hasattr(type(model), "save_pretrained"):
        model.save_pretrained = MethodType(_save_pretrained, model)  # type: ignore[assignment]


def _save_pretrained(
    model: Any, save_directory: Any, *args: Any, state_dict: Any = None, **options: Any
) -> Any:
    dequantised: dict[int, torch.Tensor] = {}  # shared weights stay shared
    plain = {}
    for name, tensor in (model.state_dict() if state_dict is None else state_dict).items():
        if isinstance(tensor, Fp8Parameter):
            key = tensor.codes[0].data_ptr()
            if key not in dequantised:
                layer = model.get_submodule(name.rpartition(".")[0])
                dequantised[key] = layer.laid_out(tensor.dequantize()).contiguous()
            tensor = dequantised[key]
        plain[name] = tensor
    return type(model).save_pretrained(model, save_directory, *args, state_dict=plain, **options)
