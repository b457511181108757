"""Weights that live as FP8, of every recipe."""

from __future__ import annotations

from typing import Any

import torch

from megatron_fp8.backends import BACKENDS
from megatron_fp8.quantizer import Quantizer
from megatron_fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
)
from megatron_fp8.state.fp8_state import Fp8State

RECIPES: dict[str, Any] = {
    "delayed": DelayedScaling(),
    "tensorwise": Float8CurrentScaling(),
    "rowwise": Float8RowwiseScaling(),
    "blockwise": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
}


def quantizer_of(recipe: Any) -> Quantizer:
    state = Fp8State()
    rule = recipe.rule("weight")
    slot = state.arena(None).add(recipe if isinstance(recipe, DelayedScaling) else None, rule.fmt)
    return Quantizer(rule, slot, BACKENDS["emulated"])


def weight(shape: tuple[int, int] = (256, 128), seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
