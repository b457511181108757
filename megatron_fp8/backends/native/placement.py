"""Codes and scales of a side, placed as a planned product needs them.

What has that layout is not copied.
"""

from __future__ import annotations

import torch

from ...tensor import QuantizedSide
from .layout import (
    BLOCK,
    FP4_BLOCK,
    MX_BLOCK,
    Mode,
    ProductPlan,
    codes_per_byte_of,
)


def arguments(plan: ProductPlan, a: QuantizedSide, b: QuantizedSide) -> tuple[torch.Tensor, ...]:
    """(a, b, scale_a, scale_b) in the plan's layout. Copies only what has another one."""
    return (
        a.codes if plan.request.turned[0] else place_codes(a.codes, *plan.a.shape),
        (b.codes if plan.request.turned[1] else place_codes(b.codes, *plan.b.shape[::-1])).t(),
        place_scale(plan, a, first=True),
        place_scale(plan, b, first=False),
    )


def place_codes(codes: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    """Row-major codes [rows, k], from a multiple of 16 bytes on; the codes themselves if they are. A transposed view is
    copied (GPUs: by a kernel).

    Padding is zeros. If only rows are missing and the memory is long enough, it is that memory's content: such rows give
    rows or columns of the result that are cut.
    """
    starts_well = codes.storage_offset() % 16 == 0
    if codes.shape[1] == k and codes.stride() == (k, 1) and starts_well:
        if codes.shape[0] == rows:
            return codes
        if _room(codes) >= rows * k:
            return codes.as_strided((rows, k), (k, 1))  # kernels.quantize left the room
    byte = codes.view(torch.uint8)
    if byte.shape != (rows, k):
        padded = byte.new_zeros(rows, k)
        padded[: byte.shape[0], : byte.shape[1]] = byte
        byte = padded
    elif byte.stride(0) == 1 and byte.stride(1) >= rows and has_kernels(byte):
        from ...kernels.gemm_layouts import transpose  # loads Triton

        byte = transpose(byte.t())
    elif (
        byte.stride() != (k, 1) or not starts_well
    ):  # of one row or column too, whose strides contiguous() ignores
        byte = torch.empty(rows, k, dtype=torch.uint8, device=byte.device).copy_(byte)
    return byte.view(codes.dtype)


def has_kernels(codes: torch.Tensor) -> bool:
    """Whether Triton's kernels place codes and compute factors, and not torch."""
    return codes.is_cuda


def is_aligned(x: torch.Tensor) -> bool:
    """Whether x is contiguous and begins at a multiple of 16 bytes of its storage. cuBLASLt moves vectors of scales
    (pytorch#159957), biases and results in such pieces, and torch hands it a bias's address without its stride."""
    return x.is_contiguous() and x.storage_offset() * x.element_size() % 16 == 0


def align(x: torch.Tensor) -> torch.Tensor:
    """x itself if ``is_aligned``, else a copy."""
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def place_scale(plan: ProductPlan, side: QuantizedSide, *, first: bool) -> torch.Tensor:
    """A side's scale_inv in the layout of the plan's mode."""
    argument, mode = (plan.scale_a if first else plan.scale_b), plan.request.mode
    if mode in (Mode.MX, Mode.FP4):
        return tiles_of(side)
    if plan.post_scale:
        return torch.ones(argument.shape, device=side.codes.device, dtype=torch.float32)
    scale = side.float_scale_inv()
    if mode is Mode.TENSOR:
        return scale.view(1)
    if mode is Mode.ROW:
        rows = side.codes.shape[0]
        if scale.shape == (rows, 1) and scale.stride() == (1, 1) and rows == max(argument.shape):
            return align(scale.view(argument.shape))
        flat = scale.expand(rows, 1)[:, 0].contiguous()
        padding = argument.shape[0] * argument.shape[1] - rows
        return (torch.cat([flat, flat.new_ones(padding)]) if padding else flat).view(argument.shape)
    rows, k = side.codes.shape
    if not first and mode is Mode.BLOCK:  # [N blocks, K blocks] -> [ceil4(K blocks), N blocks], K contiguous
        return _pad_scale(scale, argument.shape[1], argument.shape[0]).t()
    turned = not first and plan.request.by == "torch v1"
    blocks, padded_rows = argument.shape if turned else argument.shape[::-1]
    if side.granularity.rows == BLOCK:
        scale = scale.repeat_interleave(BLOCK, 0)[:rows]
    # Made as [blocks, rows] and transposed: rows contiguous.
    scale = _pad_scale(scale.expand(rows, -(-k // BLOCK)).t(), blocks, padded_rows)
    return scale if turned else scale.t()


def block_scales(side: QuantizedSide) -> tuple[torch.Tensor, int]:
    """Arguments of kernels/block_matmul.py: scale_inv [ceil(rows / height), ceil(K / 128)], any strides, and the
    height."""
    scale, (rows, k) = side.float_scale_inv(), side.codes.shape
    if side.granularity.rows == BLOCK:
        return scale, BLOCK
    return scale.expand(rows, -(-k // BLOCK)), 1


def row_scales(side: QuantizedSide) -> torch.Tensor:
    """scale_inv [rows, 1] or [1, 1] of a side with one scale per row or tensor."""
    scale = side.float_scale_inv()
    return scale.reshape(1, 1) if side.granularity.is_tensor else scale


def _pad_scale(scale: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Contiguous float32 [rows, cols]: scale, padded with ones."""
    if scale.shape == (rows, cols) and scale.stride() == (cols, 1):
        return scale
    if scale.shape[0] == rows and scale.stride() == (cols, 1) and _room(scale) >= rows * cols:
        return scale.as_strided((rows, cols), (cols, 1))  # kernels.quantize wrote this padding
    padded = scale.new_ones(rows, cols)
    padded[: scale.shape[0], : scale.shape[1]] = scale
    return padded


def _room(scale: torch.Tensor) -> int:
    """Number of elements from a view's first one to the end of its storage."""
    return scale.untyped_storage().nbytes() // scale.element_size() - int(scale.storage_offset())


def tiles_of(side: QuantizedSide) -> torch.Tensor:
    """A side's scales in the tiles of Blackwell's tensor cores: of 1x32 blocks, float8_e8m0fnu, or of NVFP4's 1x16,
    float8_e4m3fn."""
    if side.tiled:
        return side.scale_inv
    (rows, cols), granularity = side.codes.shape, side.granularity
    of_fp4 = side.tensor_amax is not None
    cols *= codes_per_byte_of(side.codes.dtype)
    if has_kernels(side.codes):
        from ...kernels.gemm_layouts import tile_scales  # loads Triton

        unit, fill = (FP4_BLOCK, 0) if of_fp4 else (MX_BLOCK, 127)
        return tile_scales(
            side.scale_inv, rows, cols, height=granularity.rows, width=granularity.cols, unit=unit, fill=fill
        )
    scale = side.scale_inv
    if of_fp4:
        return swizzle(scale.view(torch.uint8).repeat_interleave(granularity.rows, 0)[:rows], 0).view(
            scale.dtype
        )
    if scale.dtype == torch.float32:
        exponents = ((scale.view(torch.int32) >> 23) & 255).to(
            torch.uint8
        )  # 2^-127 is subnormal in float32: its exponent bits are 0
        scale = exponents.repeat_interleave(granularity.cols // MX_BLOCK, 1)[:, : -(-cols // MX_BLOCK)]
        scale = scale.repeat_interleave(granularity.rows, 0)[:rows].view(torch.float8_e8m0fnu)
    return swizzle(scale)


def swizzle(scale: torch.Tensor, fill: int = 127) -> torch.Tensor:
    """One-byte scales [rows, blocks] in the layout of Blackwell's tensor cores: tiles of 128 rows by 4 blocks, 512 bytes
    each.

    Scale (i, j) goes to byte ((i // 128) * tiles_per_row + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4.

    Args:
        fill: the padding's byte; E8M0's 127 is 2^0.

    Returns:
        [128 * ceil(rows / 128) * 4 * ceil(blocks / 4)], of the scales' dtype.
    """
    rows, blocks = scale.shape
    tall, wide = -(-rows // 128), -(-blocks // 4)
    byte = scale.view(torch.uint8)
    padded = byte.new_full((tall * 128, wide * 4), fill)
    padded[:rows, :blocks] = byte
    tiles = padded.view(tall, 4, 32, wide, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scale.dtype)
