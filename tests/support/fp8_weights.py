"""Weights that live as FP8, of every recipe."""

from __future__ import annotations

from typing import Any

import torch

from megatron_fp8.backends import BACKENDS
from megatron_fp8.params.fp8_parameter import fp8_parameter
from megatron_fp8.quantizer import Quantizer, quantize
from megatron_fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Recipe,
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


def parameter_of(recipe: Recipe, shape: tuple[int, int]) -> Any:
    """The FP8 or FP4 parameter of a weight of this shape."""
    return fp8_parameter(torch.nn.Parameter(weight(shape)), quantizer_of(recipe))


def assert_codes_of(parameter: Any, value: torch.Tensor, recipe: Recipe) -> None:
    """The parameter has exactly the codes and scales of value, in both directions."""
    expected = quantize(value, recipe, "weight", "both")
    for mine, theirs in zip(parameter.quantized.sides, expected.sides, strict=True):
        assert mine.shape == theirs.shape and mine.scale_inv.shape == theirs.scale_inv.shape
        assert bytes_of(mine.codes) == bytes_of(theirs.codes)
        assert bytes_of(mine.scale_inv) == bytes_of(theirs.scale_inv)
        assert (mine.tensor_amax is None) == (theirs.tensor_amax is None)
        assert theirs.tensor_amax is None or torch.equal(mine.tensor_amax, theirs.tensor_amax)
    assert bytes_of(parameter.dequantize()) == bytes_of(expected.dequantize(torch.bfloat16))
