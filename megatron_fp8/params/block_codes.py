"""Weights given as FP8 codes with float32 scales of 128x128 blocks (DeepSeek's).

A checkpoint stores such a weight in high precision, code * scale in float32, like any other, and its scales in the
FP8 state of its linear. Both together give the codes: the quotient's relative error is at most 2^-23, and codes are a
relative 2^-4 apart. So an FP8 parameter can start from the original codes, and an export can write them again. Scales
recomputed from the largest value of each block would differ in their last bits.
"""

from __future__ import annotations

import torch

from ..numerics.formats import E4M3
from ..numerics.rule import BLOCK_128X128
from ..state.arena import PREFIX
from ..tensor import expand_scale

BLOCK = 128
_LAST = ".block_scale_inv"


def scales_key(weight: str) -> str:
    """Returns the checkpoint key of the scales of the weight of that name."""
    linear, _, last = weight.rpartition(".")
    return f"{linear}.{PREFIX}.{last}{_LAST}"


def is_scales_key(key: str) -> bool:
    """Whether a checkpoint key is that of the scales of a weight that was imported as FP8."""
    return key.endswith(_LAST)


def codes_of(weight: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """Returns float8_e4m3fn codes [rows, cols] whose products with their scales are the weight.

    Args:
        weight: [rows, cols], code * scale, rounded to float32.
        scale_inv: float32 [rows / 128, cols / 128], rounded up.
    """
    quotient = weight.float() / expand_scale(scale_inv, BLOCK_128X128, weight.shape)
    return quotient.to(E4M3.dtype)
