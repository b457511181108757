"""NVFP4 in plain torch: E2M1 codes, two-level scales, the random Hadamard transform.

A block of 16 values has an E4M3 scale ``s``, and a tensor one float32 scale that brings the largest ``s`` to 448:

    S_enc = 2688 / T            T: the tensor's amax; 2688 = 448 * 6, the largest E4M3 times the largest E2M1
    s     = E4M3(block amax * (S_enc / 6))
    code  = E2M1(x / (s / S_enc)),   value = code * s / S_enc

A code times its block's scale has six significant bits, so it is exact in bfloat16, and a product of two such matrices
in BF16 with float32 sums is the hardware's up to the order of the sums.

The transform multiplies each 16 values along wgrad's contraction by one orthogonal matrix, which spreads an outlier over
its block. Both operands have it, so that it cancels in the product. Stochastic rounding is that of Blackwell's
instruction, with 8 random bits: its result is too small by 0.0018 of a step on average.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149; docs/numerics.md. The bits are those of
Transformer Engine's reference quantizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from .cast import RandomKey, cast, philox_words
from .formats import E2M1, E4M3
from .scaling import FLT_MAX
from .subnormals import keep_subnormals

BLOCK = 16
LARGEST = E4M3.max * E2M1.max
"""2688: the largest code times the largest block scale."""

_SIXTH = torch.tensor(1 / 6, dtype=torch.float32, device="cpu").item()
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def padded_cols(cols: int) -> int:
    """Returns cols rounded up to whole blocks."""
    return -(-cols // BLOCK) * BLOCK


@keep_subnormals
def tensor_scale(amax: torch.Tensor) -> torch.Tensor:
    """Returns S_enc = min(2688 / amax, FLT_MAX), float32 []; 1 where amax (float32 []) is Inf."""
    scale = (torch.full_like(amax, LARGEST) / amax).clamp(max=FLT_MAX)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


@keep_subnormals
def tensor_scale_inv(amax: torch.Tensor) -> torch.Tensor:
    """Returns S_dec = 1 / S_enc, float32 [], by which decoded values are multiplied."""
    return torch.ones_like(amax) / tensor_scale(amax)


@keep_subnormals
def block_scales(block_amax: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Returns the blocks' scales s in E4M3, block_amax's shape.

    Args:
        block_amax: float32, any shape, >= 0, may be Inf.
        amax: float32 [], the tensor's.
    """
    wanted = block_amax * (tensor_scale(amax) * _SIXTH)
    return cast(wanted.clamp(max=E4M3.max), None, E4M3)


@keep_subnormals
def encoding_factors(scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Returns float32 min(1 / (s * S_dec), FLT_MAX) of E4M3 scales s: a code is E2M1(x * factor)."""
    return (1 / (scales.to(torch.float32) * tensor_scale_inv(amax))).clamp(max=FLT_MAX)


def encode(scaled: torch.Tensor, random_bytes: torch.Tensor | None = None) -> torch.Tensor:
    """Returns E2M1 codes, uint8 in [0, 16), of float32 values: nearest, ties to the even code, saturating at 6.

    NaN becomes 0 (the health counts include it); -0 keeps its sign.

    Args:
        random_bytes: uint8, scaled's shape: added as 1/256ths of a step before rounding down (stochastic rounding).
    """
    size = scaled.abs().nan_to_num_(nan=0.0).clamp_(max=E2M1.max)
    whole: Callable[[torch.Tensor], torch.Tensor] = torch.round  # ties to even
    if random_bytes is not None:
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        size = (random_bytes.to(torch.float32) / 256).mul_(step).add_(size).clamp_(max=E2M1.max)
        whole = torch.floor
    # In each of three ranges codes are equidistant, and the first is even: 0, 4 and 6. All differences are exact.
    high = torch.where(size < 4, whole(size - 2) + 4, whole((size - 4) * 0.5) + 6)
    code = torch.where(size < 2, whole(size * 2), high)
    sign = torch.signbit(scaled) & ~scaled.isnan()
    return code.to(torch.uint8) | (sign.to(torch.uint8) << 3)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Returns float4_e2m1fn_x2 [rows, cols / 2] of codes uint8 [rows, cols]: two a byte, the first in the low half."""
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).contiguous().view(E2M1.dtype)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Returns codes uint8 [rows, cols] of float4_e2m1fn_x2 [rows, cols / 2]."""
    pairs = packed.view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def values(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the exact numbers [rows, cols] of packed codes [rows, cols / 2]."""
    numbers = [*_VALUES, *(-value for value in _VALUES)]
    pairs = [(low, high) for high in numbers for low in numbers]  # of each byte
    table = torch.tensor(pairs, dtype=dtype, device=packed.device)
    return table[packed.view(torch.uint8).to(torch.int32)].flatten(-2)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Returns each 16 columns of x times diag(signs) H / 4, in bfloat16 [rows, cols padded to whole blocks].

    Args:
        x: [rows, cols], any dtype; zeros follow the last column. H is Sylvester's matrix; sums are float32, by a
            butterfly over strides of 8, 4, 2 and 1.
    """
    runs = pad(x.to(torch.float32)).unflatten(1, (-1, BLOCK)) * _signs(x.device)
    return _butterfly(runs).to(torch.bfloat16).flatten(1)


def inverse_hadamard(x: torch.Tensor) -> torch.Tensor:
    """Returns x [rows, whole blocks of columns] transformed back, in float32: H is symmetric, and its own inverse."""
    return (_butterfly(x.to(torch.float32).unflatten(1, (-1, BLOCK))) * _signs(x.device)).flatten(1)


def _signs(device: torch.device) -> torch.Tensor:
    return torch.tensor(_SIGNS, dtype=torch.float32, device=device)


def _butterfly(runs: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, 16] times H / 4."""
    for stride in (8, 4, 2, 1):
        pairs = runs.unflatten(2, (-1, 2, stride))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        runs = torch.stack((first + second, first - second), dim=-2).flatten(2)
    return runs * 0.25


def pad(x: torch.Tensor) -> torch.Tensor:
    """Returns x [rows, cols] with zeros up to whole blocks of columns."""
    missing = padded_cols(x.shape[1]) - x.shape[1]
    if not missing:
        return x
    # torch 2.8 refuses to pad empty tensors.
    return (
        torch.nn.functional.pad(x, (0, missing))
        if x.numel()
        else x.new_zeros(len(x), padded_cols(x.shape[1]))
    )


def random_bytes(index: torch.Tensor, key: RandomKey, *, columnwise: bool) -> torch.Tensor:
    """Returns the random byte of each element: byte e mod 16, little-endian, of the Philox block e // 16.

    Args:
        index: int64 [rows, cols], logical element indices e; each row's are consecutive.
        key: the stream. A columnwise side draws from another one, whose site is the complement.
    """
    if not index.numel():
        return index.to(torch.uint8)
    if columnwise:
        key = replace(key, site=~key.site)
    rows, cols = index.shape
    first = index[:, :1]
    blocks = first // BLOCK + torch.arange(cols // BLOCK + 2, dtype=torch.int64, device=index.device)
    words = torch.stack(philox_words(blocks, key), dim=-1)  # [rows, blocks, 4]
    shifts = torch.arange(0, 32, 8, dtype=torch.int64, device=index.device)
    drawn = ((words[..., None] >> shifts) & 0xFF).to(torch.uint8).view(rows, -1)
    return drawn.gather(1, index - first + first % BLOCK)
