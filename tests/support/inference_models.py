"""The small converted model of the inference tests: odd sizes, a bias, an activation between the linears."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_fp8.nn import convert_to_fp8, fp8_step

RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
IN, HIDDEN, OUT = 160, 200, 130


def converted(
    recipe: Any = "tensorwise", dtype: torch.dtype = torch.bfloat16, steps: int = 1
) -> nn.Sequential:
    """Two FP8 linears that have trained for some iterations, so that delayed scaling has a history."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, OUT, bias=False)).to(dtype)
    convert_to_fp8(model, recipe)
    for step in range(steps):
        model(activations(2, 37, dtype=dtype, seed=step)).float().square().mean().backward()
        fp8_step(model)
        model.zero_grad(set_to_none=True)
    return model


def activations(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 5) -> torch.Tensor:
    """Normal numbers [*shape, IN]; the token with the largest magnitude differs from the others by far."""
    x = torch.randn(*shape, IN, generator=torch.Generator().manual_seed(seed))
    x.view(-1, IN)[0] *= 5
    return x.to(dtype)
