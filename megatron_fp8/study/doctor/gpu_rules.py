"""Documented FP8 products of GPUs, by torch and Transformer Engine.

For the machine itself these are not used: the native backend tries each product, and Transformer Engine is
queried. Each rule names its source. They apply to CUDA 12.9 and newer, and to the releases in ``SOURCES``.
"""

from __future__ import annotations

import torch

from ...backends.native.layout import Mode, Refusal, Request
from ...recipe import Float8BlockScaling, MXFP8BlockScaling, Recipe
from .generations import Generation

SOURCES = {
    "torch": "torch 2.13, ScaledBlas.cpp; cuBLAS, narrow precision data types",
    "blocks": "torch 2.13, ScaledBlas.cpp; this package's kernel compiled for it by Triton 3.9, not run",
    "te": "Transformer Engine 2.20, pytorch/quantization.py",
}
"""Name in this module -> source of a rule."""


def torch_refusal(capability: tuple[int, int]) -> Refusal:
    """A function: request -> why torch has no such product on a GPU of this compute capability; None if it
    has.

    Does not cover products of this package's own kernel.
    """

    def refusal(request: Request) -> str | None:
        if request.triton:
            return None
        if request.mode in (Mode.BLOCK, Mode.BLOCK_1D):
            if capability[0] != 9:
                return "torch has 128-wide blocks on compute capability 9.x only"
            if request.by == "torch" and request.a != request.b:
                return "its newer product takes E4M3 by E4M3 only"
        if request.mode is Mode.MX and capability < (10, 0):
            return "32-wide blocks (MX) begin with compute capability 10.0"
        if request.mode is Mode.ROW and request.out == torch.float32:
            return "scales per row have no float32 result in older versions (pytorch#156771)"
        return None

    return refusal


def te_refusal(generation: Generation, recipe: Recipe) -> str | None:
    """Why Transformer Engine does not run a recipe (one that maps to its own) on an NVIDIA GPU; None if it does."""
    capability = generation.capability
    assert capability is not None, "a GPU of NVIDIA's"
    if capability < (8, 9):
        return "it asks for compute capability 8.9 or newer"
    if isinstance(recipe, MXFP8BlockScaling):
        if capability < (10, 0):
            return "it asks for compute capability 10.0 or newer for mxfp8"
        return "it does not have mxfp8 on compute capability 12.x yet" if capability >= (12, 0) else None
    if isinstance(recipe, Float8BlockScaling) and capability < (9, 0):
        return "it asks for compute capability 9.0 or newer and CUDA 12.9 for blockwise"
    return None
