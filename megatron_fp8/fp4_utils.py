"""The interface for Megatron users: Megatron's names and signatures for FP4, without Transformer Engine.

FP4 and FP8 differ in the recipe alone, so these are fp8_utils' functions with fp4_utils' names.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from . import fp8_utils
from .numerics.formats import E2M1
from .recipe import NVFP4BlockScaling, Recipe, alignment
from .tensor import Float8Tensor

__all__ = [
    "dequantize_fp4_tensor",
    "get_fp4_align_size",
    "get_fp4_context",
    "get_fp4_recipe",
    "is_nvfp4tensor",
]


def get_fp4_align_size(fp4_recipe: Any) -> int:
    """Returns the multiple to which Megatron-Core pads experts' tokens. ``fp4_recipe`` does not change it.

    Transformer Engine's grouped kernels need 128, this package's kernels do not.
    """
    return alignment(NVFP4BlockScaling())


def get_fp4_recipe(config: Any) -> Recipe:
    """Returns the recipe that the config describes. ValueError as fp8_utils.get_fp8_recipe."""
    return fp8_utils.get_fp8_recipe(config)


def get_fp4_context(config: Any, layer_no: int = -1, is_init: bool = False) -> AbstractContextManager[None]:
    """Returns the context in which Megatron-Core builds (is_init=True) or runs a layer: as
    fp8_utils.get_fp8_context."""
    return fp8_utils.get_fp8_context(config, layer_no, is_init)


def is_nvfp4tensor(tensor: Any) -> bool:
    """Whether this is a Float8Tensor of E2M1 codes."""
    return isinstance(tensor, Float8Tensor) and any(
        side is not None and side.fmt is E2M1 for side in tensor.sides
    )


def dequantize_fp4_tensor(fp4_tensor: Float8Tensor) -> torch.Tensor:
    """Returns the matrix in its dtype before quantization."""
    return fp4_tensor.dequantize()
