"""Block-scaled FP8 GEMMs in Triton: of one pair, or a layer's experts in one launch.

They are for torch without a blockwise mode.

Each program accumulates one tile of the result. For every 128 columns of the contraction (one block of scales) the tensor
cores sum code products from zero. That partial sum times scale_inv_a * scale_inv_b is added to a float32 accumulator in
registers, in one fused multiply-add, whatever Triton's default is. So Hopper's accumulation, which keeps about 14 bits,
spans at most 128 products (the promotion interval of DeepSeek-V3, arXiv 2412.19437, section 3.3.2).

Where GPUs have tensor descriptors (TMA), these load codes if addresses and K are multiples of 16, as a linear's are;
pointers load all others. Values are the same.

The interpreter has no FP8 dot: it decodes codes to float32 first.

A layer's experts have separate operands and different numbers of rows. A table in device memory has one line per GEMM:
addresses, scale strides, sizes. A second table maps each program to its GEMM and tile, so no program is idle.

The host builds both tables from sizes it knows and sends them in one asynchronous copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from ..numerics.formats import format_of
from . import on_its_device
from .device_math import COMPILED, decode, narrow, widen
from .tiles import is_e4m3

BLOCK = 128
"""Columns of the contraction that share a scale."""
ROWS = 128
"""Rows of a tile of the result."""


def columns(a_height: int, b_height: int) -> int:
    """Columns of a tile of the result. It takes registers twice, as partial sum and as accumulator: 64 of a thread of 8
    warps, each, for 128 x 128. Products of a scale a row with a scale a column take a third tile, which does not fit
    beside the addresses of a group."""
    return 128 if BLOCK in (a_height, b_height) else 64


TMA_ARCHITECTURES = range(90, 120)
"""Where tensor descriptors read aligned codes: compute capability 9.x and 10.x. On 12.x Triton 3.6 spills."""


def has_tma() -> bool:
    """Whether the current GPU is one of them."""
    return COMPILED.value and driver.active.get_current_target().arch in TMA_ARCHITECTURES


def _tensor_descriptor(codes: torch.Tensor, rows: int) -> TensorDescriptor:
    """Tiles [rows, BLOCK] of codes [R, K]. Of bytes they would pass through registers to the tensor cores."""
    codes = codes if COMPILED.value else codes.view(torch.uint8)
    return TensorDescriptor.from_tensor(codes, [rows, BLOCK])


@on_its_device
def block_matmul(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    *,
    a_height: int = 1,
    b_height: int = 1,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    add: bool = True,
) -> torch.Tensor:
    """a [M, K] @ b [N, K]^T of block-quantized matrices: float32 accumulation and bias, one rounding.

    Args:
        a: codes [M, K]; b: codes [N, K]; E4M3 or E5M2 (not both E5M2), contiguous. Any sizes; a K that is no multiple of
            16 is read byte by byte, and registers spill.
        a_scale_inv: float32 [ceil(M / a_height), ceil(K / 128)], any strides; b_scale_inv likewise.
        a_height, b_height: rows that share a scale: 1 (1x128 blocks) or 128 (128x128).
        bias: [N] or None.
        into: [M, N], contiguous, of dtype out_dtype: the result is written there.
        add: add the result to ``into``, float32, with the bits of ``into.add_``.

    Returns:
        [M, N], out_dtype, or ``into``. NaN codes give NaN in their row or column; K = 0 gives the bias, or zeros.
    """
    (m, k), n = a.shape, b.shape[0]
    assert b.shape[1] == k and a.is_contiguous() and b.is_contiguous(), "codes [M, K] and [N, K], contiguous"
    for scale, rows, height in ((a_scale_inv, m, a_height), (b_scale_inv, n, b_height)):
        assert scale.shape == (triton.cdiv(rows, height), triton.cdiv(k, BLOCK)), "one scale a block"
        assert scale.dtype == torch.float32 and height in (1, BLOCK), (
            "float32 scales of 1x128 or 128x128 blocks"
        )
    out = torch.empty(m, n, dtype=out_dtype, device=a.device) if into is None else into
    add = add and into is not None
    assert out.dtype == out_dtype and out.shape == (m, n) and out.is_contiguous()
    assert out_dtype == torch.float32 or not add, "sums are float32"

    cols = columns(a_height, b_height)
    tma = has_tma() and k > 0 == k % 16 and a.data_ptr() % 16 == b.data_ptr() % 16 == 0
    codes_a, codes_b = (
        _tensor_descriptor(codes, rows) if tma else codes.view(torch.uint8)
        for codes, rows in ((a, ROWS), (b, cols))
    )

    def launch(stages: int) -> None:
        grid = (triton.cdiv(m, ROWS) * triton.cdiv(n, cols),)
        _block_matmul[grid](
            codes_a, a_scale_inv, *a_scale_inv.stride(), codes_b, b_scale_inv, *b_scale_inv.stride(),
            bias, out, m, n, k,
            A_E4M3=is_e4m3(format_of(a.dtype)), B_E4M3=is_e4m3(format_of(b.dtype)), A_HEIGHT=a_height,
            B_HEIGHT=b_height, BIAS=bias is not None, ADD=add, ROWS=ROWS, COLS=cols, BLOCK=BLOCK, BAND=8, TMA=tma,
            num_warps=8, num_stages=stages, enable_fp_fusion=True,
        )  # fmt: skip

    if m and n:
        launch_with_room(launch, a.device)
    return out


_stages: dict[torch.device, int] = {}
"""Pipeline stages that fit each device's shared memory; the maximum until a launch fails."""


def launch_with_room(launch: Callable[[int], None], device: torch.device) -> None:
    """Launch with as many pipeline stages as fit in shared memory: an RTX 40 has half of an H100's.

    Raises:
        RuntimeError: not even one stage fits.
    """
    for stages in range(_stages.get(device, 4), 0, -1):
        try:
            launch(stages)
        except triton.runtime.errors.OutOfResources as error:
            told = error
        else:
            _stages[device] = stages
            return
    raise RuntimeError(f"no room on {device} for a tile of the block-scaled product: {told}")


@triton.jit
def _block_matmul(
    a, a_scale, a_major, a_minor, b, b_scale, b_major, b_minor, bias, out, m, n, k,
    A_E4M3: tl.constexpr, B_E4M3: tl.constexpr, A_HEIGHT: tl.constexpr, B_HEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, BAND: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    multiply_tile(
        a, a_scale, a_major, a_minor, b, b_scale, b_major, b_minor, bias, out, m, n, k, tl.program_id(0),
        A_E4M3, B_E4M3, A_HEIGHT, B_HEIGHT, BIAS, ADD, ROWS, COLS, BLOCK, BAND, TMA,
    )  # fmt: skip


@triton.jit
def multiply_tile(
    a, a_scale, a_major, a_minor, b, b_scale, b_major, b_minor, bias, out, m, n, k, tile,
    A_E4M3: tl.constexpr, B_E4M3: tl.constexpr, A_HEIGHT: tl.constexpr, B_HEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, BAND: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Compute tile number ``tile`` of out [m, n] (ADD: add to out)."""
    # Programs go down BAND tiles before they go right, so that those that run together share operands in L2.
    tiles_down, tiles_across = tl.cdiv(m, ROWS), tl.cdiv(n, COLS)
    band = tile // (BAND * tiles_across)
    inside_band = tile % (BAND * tiles_across)
    height = tl.minimum(tiles_down - band * BAND, BAND)
    top, left = (band * BAND + inside_band % height) * ROWS, (inside_band // height) * COLS
    row, col = top + tl.arange(0, ROWS), left + tl.arange(0, COLS)
    if not TMA:
        a_at = a + row.to(tl.int64)[:, None] * k
        b_at = b + col.to(tl.int64)[:, None] * k
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for block in range(tl.cdiv(k, BLOCK)):
        if TMA:
            a_codes, b_codes = a.load([top, block * BLOCK]), b.load([left, block * BLOCK])
        else:
            along = block * BLOCK + tl.arange(0, BLOCK)
            inside_k = (along < k)[None, :]
            a_codes = tl.load(a_at + along[None, :], mask=(row < m)[:, None] & inside_k, other=0)
            b_codes = tl.load(b_at + along[None, :], mask=(col < n)[:, None] & inside_k, other=0)
        inv_a = _scales(a_scale + block * a_minor, a_major, top, row, m, A_HEIGHT)
        inv_b = _scales(b_scale + block * b_minor, b_major, left, col, n, B_HEIGHT)
        partial = tl.dot(
            _operand(a_codes, A_E4M3), tl.trans(_operand(b_codes, B_E4M3)), input_precision="ieee"
        )
        if B_HEIGHT > 1:
            inv = inv_a * inv_b
            acc += partial * (inv if A_HEIGHT > 1 else inv[:, None])
        elif A_HEIGHT > 1:
            acc += partial * (inv_a * inv_b)[None, :]
        else:
            acc += partial * (inv_a[:, None] * inv_b[None, :])
    if BIAS:
        acc += widen(tl.load(bias + col, mask=col < n, other=0.0))[None, :]
    at = out + row.to(tl.int64)[:, None] * n + col[None, :]
    inside = (row < m)[:, None] & (col < n)[None, :]
    if ADD:
        acc += widen(tl.load(at, mask=inside, other=0.0))
    tl.store(at, narrow(acc, out.dtype.element_ty), mask=inside)


@triton.jit
def _scales(scale, major, first, rows, limit, HEIGHT: tl.constexpr):
    """scale_inv of a tile's rows [ROWS]; of a tile inside one square block the number."""
    if HEIGHT > 1:
        return tl.load(scale + (first // HEIGHT).to(tl.int64) * major)
    else:
        return tl.load(scale + rows.to(tl.int64) * major, mask=rows < limit, other=0.0)


@triton.jit
def _operand(codes, E4M3: tl.constexpr):
    if COMPILED:
        return codes.to(tl.float8e4nv if E4M3 else tl.float8e5, bitcast=True)
    else:
        return decode(codes, E4M3)


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


_graph_tables: list[torch.Tensor] = []
"""Pinned tables that CUDA graphs copy at each replay. torch may reuse their memory once nothing refers to them."""


@on_its_device
def grouped_block_matmul(
    first: torch.Tensor, products: Sequence[Product], *, a_height: int, b_height: int, add: bool = False
) -> None:
    """Compute all GEMMs; they share formats, scale heights (1 or 128) and the dtype of ``out``.

    Args:
        first: the first GEMM's a [M, K]; it selects the device.
        add: add to ``out``, in float32 before the one rounding.
    """
    lines, tiles, cols = [], [], columns(a_height, b_height)
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
        tiles.append(triton.cdiv(m, ROWS) * triton.cdiv(n, cols))
    table = torch.tensor(lines, dtype=torch.int64, device="cpu")
    told = torch.cat([table.view(-1), _places(tiles).view(-1)])
    if first.is_cuda:
        told = told.pin_memory()
        if torch.cuda.is_current_stream_capturing():
            _graph_tables.append(told)
        told = told.to(first.device, non_blocking=True)
    codes_whole, out_whole = (
        # Addresses, K and N: reads of 16 codes are aligned, and so are writes.
        bool((table[:, those] % 16 == 0).all())
        for those in ([0, 4, 11], [8, 10])
    )
    tma = has_tma() and codes_whole
    if tma:  # each program writes its descriptors to memory, which Triton asks for at the launch
        triton.set_allocator(_scratch)

    def launch(stages: int) -> None:
        _grouped_block_matmul[(sum(tiles),)](
            told, told[table.numel() :], products[0].out, CODES_WHOLE=codes_whole, OUT_WHOLE=out_whole,
            A_E4M3=is_e4m3(format_of(first.dtype)), B_E4M3=is_e4m3(format_of(products[0].b.dtype)),
            A_HEIGHT=a_height, B_HEIGHT=b_height, ADD=add, ROWS=ROWS, COLS=cols, BLOCK=BLOCK, LINE=_LINE,
            TMA=tma, num_warps=8, num_stages=stages, enable_fp_fusion=True,
        )  # fmt: skip

    launch_with_room(launch, first.device)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for Triton on the current device, int8 [size]."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _places(tiles: list[int]) -> torch.Tensor:
    """int64 [all tiles, 2]: each tile's GEMM and its index in that GEMM."""
    counts = torch.tensor(tiles, dtype=torch.int64, device="cpu")
    product = torch.arange(len(tiles), dtype=torch.int64, device="cpu").repeat_interleave(counts)
    tile = torch.arange(len(product), dtype=torch.int64, device="cpu") - (counts.cumsum(0) - counts)[product]
    return torch.stack([product, tile], 1)


@triton.jit
def _grouped_block_matmul(
    table, where, out_like, CODES_WHOLE: tl.constexpr, OUT_WHOLE: tl.constexpr,
    A_E4M3: tl.constexpr, B_E4M3: tl.constexpr, A_HEIGHT: tl.constexpr, B_HEIGHT: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    line = table + tl.load(where + 2 * tl.program_id(0)) * LINE
    tile = tl.load(where + 2 * tl.program_id(0) + 1).to(tl.int32)
    scales = tl.pointer_type(tl.float32)
    out = tl.load(line + 8).to(tl.pointer_type(out_like.dtype.element_ty))
    m, n, k = (
        tl.load(line + 9).to(tl.int32), tl.load(line + 10).to(tl.int32), tl.load(line + 11).to(tl.int32)
    )  # fmt: skip
    if TMA and COMPILED:  # as ``_tensor_descriptor``
        a = tl.load(line).to(tl.pointer_type(tl.float8e4nv if A_E4M3 else tl.float8e5))
        b = tl.load(line + 4).to(tl.pointer_type(tl.float8e4nv if B_E4M3 else tl.float8e5))
    else:
        a, b = tl.load(line).to(tl.pointer_type(tl.uint8)), tl.load(line + 4).to(tl.pointer_type(tl.uint8))
    if CODES_WHOLE:
        a, b, k = tl.multiple_of(a, 16), tl.multiple_of(b, 16), tl.multiple_of(k, 16)
    if TMA:
        a = tl.make_tensor_descriptor(a, [m, k], [k, 1], [ROWS, BLOCK])
        b = tl.make_tensor_descriptor(b, [n, k], [k, 1], [COLS, BLOCK])
    if OUT_WHOLE:
        out, n = tl.multiple_of(out, 16), tl.multiple_of(n, 16)
    multiply_tile(
        a, tl.load(line + 1).to(scales), tl.load(line + 2), tl.load(line + 3),
        b, tl.load(line + 5).to(scales), tl.load(line + 6), tl.load(line + 7),
        None, out, m, n, k, tile,
        A_E4M3, B_E4M3, A_HEIGHT, B_HEIGHT, False, ADD, ROWS, COLS, BLOCK, 8, TMA,
    )  # fmt: skip
