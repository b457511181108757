"""Digests of codes and scales: every recipe, role, dtype, class of shape and class of values."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from megatron_fp8 import Format, quantize
from megatron_fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
)

RECIPES = {
    "delayed": DelayedScaling(margin=1),
    "tensorwise": Float8CurrentScaling(),
    "tensorwise, power of two": Float8CurrentScaling(use_power_2_scales=True),
    "tensorwise, epsilon": Float8CurrentScaling(amax_epsilon=50.0),
    "rowwise": Float8RowwiseScaling(),
    "rowwise, hybrid": Float8RowwiseScaling(fp8_format=Format.HYBRID),
    "blockwise": Float8BlockScaling(),
    "blockwise, hybrid": Float8BlockScaling(fp8_format=Format.HYBRID),
    "blockwise, float32 scales": Float8BlockScaling(use_f32_scales=True),
    "blockwise, epsilon": Float8BlockScaling(amax_epsilon=0.5),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8, hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
}
ROLES = ("input", "weight", "grad_output")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((0, 0), (0, 5), (5, 0), (1, 1), (1, 300), (300, 1), (7, 33), (129, 200), (128, 256), (257, 384))
VALUES = ("of a training", "any bits", "not finite", "zeros")
_INTEGERS: dict[torch.dtype, Any] = {
    torch.float32: np.int32,
    torch.bfloat16: np.int16,
    torch.float16: np.int16,
}


def _values(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The same bits on every machine: they come from integers."""
    draw = np.random.Generator(np.random.PCG64([*shape, VALUES.index(kind)]))
    if kind == "zeros":
        return torch.zeros(shape, dtype=dtype)
    if kind == "any bits":
        width = _INTEGERS[dtype]
        bits = draw.integers(np.iinfo(width).min, np.iinfo(width).max, shape, width, endpoint=True)
        values = torch.from_numpy(bits).view(dtype)
        return torch.where(torch.isfinite(values), values, torch.ones((), dtype=dtype))
    exact = draw.integers(-(2**7), 2**7, shape) * 2.0 ** draw.integers(-16, 1, shape)
    values = torch.from_numpy(exact).to(dtype)
    if kind == "not finite" and values.numel():
        values.view(-1)[:: max(1, values.numel() // 3)] = torch.inf
        values.view(-1)[values.numel() // 2] = torch.nan
    return values


def digests() -> dict[str, str]:
    """Recipe, role and dtype -> digest over shapes and values."""
    return {
        f"{name}: {role}, {dtype}": _digest(recipe, role, dtype)
        for name, recipe in RECIPES.items()
        for role in ROLES
        for dtype in DTYPES
    }


def _digest(recipe: Any, role: str, dtype: torch.dtype) -> str:
    hasher = hashlib.sha256()
    for shape in SHAPES:
        for kind in VALUES:
            for side in quantize(_values(kind, shape, dtype), recipe, role, "both").sides:
                for part in () if side is None else (side.codes, side.scale_inv):
                    hasher.update(f"{list(part.shape)} {part.dtype}".encode())
                    hasher.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:32]
