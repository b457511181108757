"""Float8Tensor: codes and their scales. Data only: it never multiplies.

A matrix x [rows, cols] can be quantized along either dimension. The ``rowwise`` side holds codes [rows, cols] with
blocks along cols; the ``columnwise`` side holds codes of the transposed matrix, [cols, rows], with blocks along rows.
In both the last dimension is the contraction of the GEMM that reads the side.

Rejected: a torch.Tensor subclass that dispatches ``mm``. Then the tensor would depend on GEMMs, backends and
configuration, and data on the code that computes with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from .kernels.cast_dispatch import decode, decode_blocks, e8m0_to_scale_inv
from .numerics import host_sync, nvfp4
from .numerics.cast import known_finite, one_nan_
from .numerics.formats import E2M1, FloatFormat, format_of
from .numerics.rule import Granularity
from .numerics.subnormals import keep_subnormals


@dataclass(frozen=True)
class QuantizedSide:
    """One direction of a quantized matrix.

    Attributes:
        codes: float8 [rows, cols + padding], or float4_e2m1fn_x2 [rows, (cols + padding) / 2] for NVFP4; the contraction
            is last.
        scale_inv: float32, float8_e8m0fnu for MXFP8, or float8_e4m3fn for NVFP4. Shape [] (per tensor), [rows, 1] (per
            row), or [ceil(rows / R), ceil(cols / C)] for R x C blocks: the logical layout.
        granularity: elements that share a scale, in this side's orientation.
        pow2: every scale is a power of two, so that codes times scales are exact in bfloat16.
        finite: known to have no NaN or Inf code and no NaN scale (False: not known). Decoding and products then skip
            the check, and would turn such codes into numbers.
        tiled: scale_inv is one row of bytes in the layout of Blackwell's GEMM (kernels/gemm_layouts.py). Only operands
            that a linear casts for its GEMMs.
        padding: columns of zeros after the matrix, up to a whole block, for GEMMs that sum over them. Only operands
            that a linear casts for its GEMMs, and NVFP4, always. ``plain`` restores the logical layout of both.
        tensor_amax: float32 [], NVFP4's amax of the tensor (2688 in place of Inf), which gives its second scale; None for
            others.
        hadamard: the codes are those of the matrix after numerics/nvfp4.py's transform along the contraction, which fills
            the padding too.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    granularity: Granularity
    pow2: bool
    finite: bool = False
    tiled: bool = False
    padding: int = 0
    tensor_amax: torch.Tensor | None = None
    hadamard: bool = False

    def __repr__(self) -> str:
        codes = f"{self.fmt.name} {list(self.shape)}"
        scales = f"{str(self.scale_inv.dtype).removeprefix('torch.')} {list(self.scale_inv.shape)}"
        return f"QuantizedSide({codes}, scale_inv {scales} per {self.granularity}, {self.codes.device})"

    @property
    def shape(self) -> torch.Size:
        """[rows, cols], without padding."""
        rows, cols = self.codes.shape
        if self.tensor_amax is not None:
            cols *= E2M1.codes_per_byte
        return torch.Size((rows, cols - self.padding))

    @property
    def fmt(self) -> FloatFormat:
        """Format of the codes."""
        return format_of(self.codes.dtype)

    @property
    def tensor_scale_inv(self) -> torch.Tensor | None:
        """float32 [], by which NVFP4's values are multiplied after their blocks' scales; None for others."""
        return None if self.tensor_amax is None else nvfp4.tensor_scale_inv(self.tensor_amax)

    @cached_property
    def scale_range(self) -> tuple[float, float]:
        """Smallest and largest scale_inv, computed once: a changed weight has new sides.

        A block of zeros with MX's smallest scale, 2^-127, does not count.
        """
        if self.scale_inv.numel() == 0:
            return 1.0, 1.0
        if self.scale_inv.dtype == torch.float32:
            if self.granularity.is_tensor:
                return (scale := float(self.scale_inv)), scale
            smallest, largest = torch.aminmax(self.scale_inv)
            return float(smallest), float(largest)
        exponents = self.scale_inv.view(torch.uint8)
        low, high = map(int, torch.aminmax(exponents))
        if low == 0:
            of_element = expand_scale(exponents == 0, self.granularity, self.codes.shape)
            if not bool(((self.codes.view(torch.uint8) & 0x7F) != 0).logical_and_(of_element).any()):
                low = int(torch.where(exponents == 0, 127, exponents).amin())
        return 2.0 ** (low - 127), 2.0 ** (high - 127)

    def float_scale_inv(self) -> torch.Tensor:
        """Returns scale_inv as float32, in its logical shape."""
        scale_inv = self.plain().scale_inv
        if scale_inv.dtype == torch.float8_e8m0fnu:
            return e8m0_to_scale_inv(scale_inv.view(torch.uint8))
        return scale_inv.to(torch.float32)

    def plain(self) -> QuantizedSide:
        """Returns the logical layout: itself; without padding, as a view; if tiled, with a copy of its scales."""
        if self.padding and self.tensor_amax is None:
            return replace(self, codes=self.codes[:, : self.shape[1]], padding=0).plain()
        if not self.tiled:
            return self
        (rows, cols), height, width = self.shape, self.granularity.rows, self.granularity.cols
        unit = min(width, 32)  # MX's tiles repeat a wider block's scale
        tall, across = -(-rows // 128), -(-cols // unit)
        tiles = self.scale_inv.view(torch.uint8).view(tall, -(-across // 4), 32, 4, 4)
        plain = tiles.permute(0, 3, 2, 1, 4).reshape(tall * 128, -1)[:rows:height, : across : width // unit]
        scale_inv = plain.contiguous()
        scale_inv = e8m0_to_scale_inv(scale_inv) if width > unit else scale_inv.view(self.scale_inv.dtype)
        made = replace(self, scale_inv=scale_inv, tiled=False)
        if self.tensor_amax is None:
            return made
        whole = nvfp4.padded_cols(cols)  # a product's codes may reach further
        codes = self.codes[:, : whole // E2M1.codes_per_byte].contiguous()
        return replace(made, codes=codes, padding=whole - cols)

    def expanded_scale_inv(self) -> torch.Tensor:
        """Returns float32, broadcastable to the matrix: one scale for every element (a copy only for blocks). NVFP4's
        blocks' scales, without the tensor's."""
        return expand_scale(self.float_scale_inv(), self.granularity, self.shape)

    def transposed(self) -> QuantizedSide:
        """Returns the other direction as views of the same codes and scales: per tensor and square blocks only.

        NVFP4 packs two codes a byte along the contraction, so its result is a copy.
        """
        assert self.granularity.symmetric, "a 1-wide block has other scales along the other direction"
        if self.tensor_amax is not None:
            codes = nvfp4.unpack(self.codes)[:, : self.shape[1]].t()
            packed, padding = nvfp4.pack(nvfp4.pad(codes)), -codes.shape[1] % nvfp4.BLOCK
            return replace(self, codes=packed, scale_inv=self.scale_inv.t().contiguous(), padding=padding)
        assert not self.padding, "zeros behind the columns would be rows"
        scale_inv = self.scale_inv if self.granularity.is_tensor else self.scale_inv.t()
        return replace(self, codes=self.codes.t(), scale_inv=scale_inv)

    @keep_subnormals
    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns codes * scale_inv in float32, rounded once to dtype; NaN codes and scales give the canonical quiet
        NaN. A transformed matrix is transformed back, before the rounding."""
        if self.tensor_amax is not None:
            if self.tiled:
                return self.plain().dequantize(dtype)
            values = nvfp4.values(self.codes)
            scale = expand_scale(self.float_scale_inv(), self.granularity, values.shape)
            values = values * scale * nvfp4.tensor_scale_inv(self.tensor_amax)
            values = nvfp4.inverse_hadamard(values) if self.hadamard else values
            return values[:, : self.shape[1]].to(dtype)
        if self.tiled or self.padding:
            return self.plain().dequantize(dtype)
        is_transposed = not self.codes.is_contiguous() and self.codes.t().is_contiguous()
        codes = self.codes.t() if is_transposed else self.codes
        block = (self.granularity.rows, self.granularity.cols)
        scale_inv, block = (self.scale_inv.t(), block[::-1]) if is_transposed else (self.scale_inv, block)
        result = decode_blocks(codes, scale_inv, block, dtype)
        if result is not None:
            return result.t() if is_transposed else result
        # A code times a power of two is exact in bfloat16, or rounded to it once, as from float32.
        work = torch.bfloat16 if self.pow2 and dtype == torch.bfloat16 else torch.float32
        scale = self.float_scale_inv()
        if host_sync.read_waits(codes.device):  # no read: NaN gets its canonical bits at the end
            values = scale_blocks_(self.codes.to(work), scale.to(work), self.granularity).to(dtype)
            return values if self.finite else one_nan_(values)
        finite = self.finite or known_finite(codes, self.fmt)
        values = decode(self.codes, work, finite=finite)
        values = scale_blocks_(values, scale.to(work), self.granularity).to(dtype)
        return values if self.finite or (finite and not bool(scale.isnan().any())) else one_nan_(values)


@dataclass(frozen=True)
class Float8Tensor:
    """A quantized matrix: one or both directions. ``dtype`` is the dtype of the matrix before quantization."""

    rowwise: QuantizedSide | None
    columnwise: QuantizedSide | None
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"Float8Tensor({list(self.shape)} of {self.dtype}, rowwise={self.rowwise}, columnwise={self.columnwise})"

    @property
    def sides(self) -> tuple[QuantizedSide | None, QuantizedSide | None]:
        """Rowwise and columnwise."""
        return self.rowwise, self.columnwise

    @property
    def shape(self) -> torch.Size:
        """[rows, cols] of the matrix that was quantized."""
        if self.rowwise is not None:
            return self.rowwise.shape
        assert self.columnwise is not None, "a Float8Tensor holds at least one direction"
        return self.columnwise.shape[::-1]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the matrix in its original orientation; dtype defaults to the original's."""
        dtype = dtype or self.dtype
        if self.rowwise is not None:
            return self.rowwise.dequantize(dtype)
        assert self.columnwise is not None, "a Float8Tensor holds at least one direction"
        return self.columnwise.dequantize(dtype).t()


Operand = QuantizedSide | torch.Tensor
"""One side of a GEMM: quantized, or the high-precision matrix in the same orientation (contraction last)."""


class Sides(NamedTuple):
    """Both sides of a matrix [rows, cols]: [rows, cols] and [cols, rows]. An FP8 weight for inference has only one."""

    rowwise: Operand | None
    columnwise: Operand | None


def expand_scale(
    scale: torch.Tensor, granularity: Granularity, shape: torch.Size | tuple[int, ...]
) -> torch.Tensor:
    """Expands one scale per block to one per element [rows, cols] (or broadcastable to it)."""
    if granularity.is_tensor or granularity.cols == 0:
        return scale
    rows, cols = shape
    scale = scale.repeat_interleave(granularity.cols, 1)[:, :cols]
    return scale if granularity.rows == 1 else scale.repeat_interleave(granularity.rows, 0)[:rows]


def scale_blocks_(values: torch.Tensor, scale: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Multiplies values [rows, cols] by their blocks' scales, in place; whole blocks need no scale per element."""
    if granularity.is_tensor or granularity.cols == 0:
        return values.mul_(scale)
    height, width = granularity.rows, granularity.cols
    if values.shape[0] % height or values.shape[1] % width or not values.numel():
        return values.mul_(expand_scale(scale, granularity, values.shape))
    blocks = values.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    blocks.mul_(scale[:, None, :, None])
    return values
