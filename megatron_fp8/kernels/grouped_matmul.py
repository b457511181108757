"""Block-scaled FP8 GEMMs of a layer's experts in one Triton launch.

Experts have separate operands and different numbers of rows. A table in device memory has one line per GEMM: addresses,
scale strides, sizes. A second table maps each program to its GEMM and tile, so no program is idle. The tile code is
block_matmul.multiply_tile.

The host builds both tables from sizes it knows and sends them in one asynchronous copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..numerics.formats import format_of
from . import on_its_device
from .block_matmul import BLOCK, launch_with_room, multiply_tile
from .tiles import is_e4m3

_TILE = 128
_LINE = 12  # numbers per GEMM in the table


class Product(NamedTuple):
    """out [M, N] = a [M, K] @ b [N, K]^T; M, N and K are not 0.

    Attributes:
        a, a_scale_inv, b, b_scale_inv: shapes and dtypes as in ``block_matmul``.
        out: [M, N], contiguous; float32, bfloat16 or float16.
    """

    a: torch.Tensor
    a_scale_inv: torch.Tensor
    b: torch.Tensor
    b_scale_inv: torch.Tensor
    out: torch.Tensor


@on_its_device
def grouped_block_matmul(
    first: torch.Tensor, products: Sequence[Product], *, a_height: int, b_height: int, add: bool = False
) -> None:
    """Compute all GEMMs; they share formats, scale heights (1 or 128) and the dtype of ``out``.

    Args:
        first: the first GEMM's a [M, K]; it selects the device.
        add: add to ``out``, in float32 before the one rounding.
    """
    lines, tiles = [], []
    for a, a_scale, b, b_scale, out in products:
        (m, k), n = a.shape, b.shape[0]
        for codes, scale, height in ((a, a_scale, a_height), (b, b_scale, b_height)):
            assert codes.shape[1] == k and codes.is_contiguous(), "codes [M, K] and [N, K], contiguous"
            assert scale.shape == (triton.cdiv(len(codes), height), triton.cdiv(k, BLOCK)), (
                "one scale a block"
            )
            assert scale.dtype == torch.float32
        assert out.shape == (m, n) and out.is_contiguous() and out.dtype == products[0].out.dtype
        assert a.dtype == products[0].a.dtype and b.dtype == products[0].b.dtype
        lines.append(
            [a.data_ptr(), a_scale.data_ptr(), *a_scale.stride(), b.data_ptr(), b_scale.data_ptr(),
             *b_scale.stride(), out.data_ptr(), m, n, k]
        )  # fmt: skip
        tiles.append(triton.cdiv(m, _TILE) * triton.cdiv(n, _TILE))
    table = torch.tensor(lines, dtype=torch.int64, device="cpu")
    told = torch.cat([table.view(-1), _places(tiles).view(-1)])
    if first.is_cuda:
        told = told.pin_memory().to(first.device, non_blocking=True)
    whole = bool(
        (table[:, [0, 4, 8, 10, 11]] % 16 == 0).all()
    )  # addresses, N and K: reads of 16 codes are aligned

    def launch(stages: int) -> None:
        _grouped_block_matmul[(sum(tiles),)](
            told, told[table.numel() :], products[0].out, WHOLE=whole,
            A_E4M3=is_e4m3(format_of(first.dtype)), B_E4M3=is_e4m3(format_of(products[0].b.dtype)),
            A_HEIGHT=a_height, B_HEIGHT=b_height, ADD=add, TILE=_TILE, BLOCK=BLOCK, LINE=_LINE,
            num_warps=8, num_stages=stages, enable_fp_fusion=True,
        )  # fmt: skip

    launch_with_room(launch, first.device)


def _places(tiles: list[int]) -> torch.Tensor:
    """int64 [all tiles, 2]: each tile's GEMM and its index in that GEMM."""
    counts = torch.tensor(tiles, dtype=torch.int64, device="cpu")
    product = torch.arange(len(tiles), dtype=torch.int64, device="cpu").repeat_interleave(counts)
    tile = torch.arange(len(product), dtype=torch.int64, device="cpu") - (counts.cumsum(0) - counts)[product]
    return torch.stack([product, tile], 1)


@triton.jit
def _grouped_block_matmul(
    table, where, out_like, WHOLE: tl.constexpr,
    A_E4M3: tl.constexpr, B_E4M3: tl.constexpr, A_HEIGHT: tl.constexpr, B_HEIGHT: tl.constexpr, ADD: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    line = table + tl.load(where + 2 * tl.program_id(0)) * LINE
    tile = tl.load(where + 2 * tl.program_id(0) + 1).to(tl.int32)
    scales = tl.pointer_type(tl.float32)
    a, b = tl.load(line).to(tl.pointer_type(tl.uint8)), tl.load(line + 4).to(tl.pointer_type(tl.uint8))
    out = tl.load(line + 8).to(tl.pointer_type(out_like.dtype.element_ty))
    n, k = tl.load(line + 10).to(tl.int32), tl.load(line + 11).to(tl.int32)
    if WHOLE:
        a, b, out = tl.multiple_of(a, 16), tl.multiple_of(b, 16), tl.multiple_of(out, 16)
        n, k = tl.multiple_of(n, 16), tl.multiple_of(k, 16)
    multiply_tile(
        a, tl.load(line + 1).to(scales), tl.load(line + 2), tl.load(line + 3),
        b, tl.load(line + 5).to(scales), tl.load(line + 6), tl.load(line + 7),
        None, out, tl.load(line + 9).to(tl.int32), n, k, tile,
        A_E4M3, B_E4M3, A_HEIGHT, B_HEIGHT, False, ADD, TILE, TILE, BLOCK, 8,
    )  # fmt: skip
