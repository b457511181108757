"""Weights given as FP8 codes with float32 scales of 128x128 blocks (DeepSeek's).

A checkpoint holds such a weight in high precision, code * scale in float32, as it holds any other, and its scales beside
it, among the FP8 state of its linear. The codes follow from both: the quotient is off by 2^-23 of itself at most, and
codes lie 2^-4 of themselves apart. So an FP8 parameter can start from the very codes, and an export can write them
again. Made anew, from the largest value of each block, scales would differ in their last bits.
"""

from __future__ import annotations

import torch

from ..numerics.formats import E4M3
from ..numerics.rule import BLOCK_128X128
from ..state.saved import PREFIX
from ..tensor import expand_scale

BLOCK = 128
_LAST = ".block_scale_inv"


def scales_key(weight: str) -> str:
    """The name in a checkpoint of the scales of the weight of that name."""
    linear, _, last = weight.rpartition(".")
    return f"{linear}.{PREFIX}.{last}{_LAST}"


def is_scales_key(key: str) -> bool:
    """Whether a tensor of a checkpoint is the scales of a weight that came as FP8."""
    return key.endswith(_LAST)


def codes_of(weight: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn [rows, cols] whose products with their scales are the weight.

    Args:
        weight: [rows, cols], code * scale, rounded to float32.
        scale_inv: float32 [rows / 128, cols / 128], rounded up.
    """
    quotient = weight.float() / expand_scale(scale_inv, BLOCK_128X128, weight.shape)
    return quotient.to(E4M3.dtype)
