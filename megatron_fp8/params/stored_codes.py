"""Codes, scales and measurements of a quantized parameter."""

from __future__ import annotations

from typing import Any

import torch

from .. import kernels
from ..backends.base import CastResult
from ..backends.reference import block_scales
from ..numerics.rule import BLOCK_128X128, TENSOR, Granularity, Rule
from ..numerics.scaling import compute_scale_inv
from ..quantizer import Quantizer
from ..tensor import Float8Tensor, QuantizedSide


def granularities(rule: Rule) -> list[Granularity]:
    """Returns the granularity of each set of codes; the second is the columnwise side's, not transposed."""
    granularity = rule.granularity
    return (
        [granularity]
        if granularity.symmetric
        else [granularity, Granularity(granularity.cols, granularity.rows)]
    )


def cast_by_kernel(quantizer: Quantizer, device: torch.device) -> bool:
    """Whether kernels round a master and cast it directly into its single set of codes (kernels/param_cast.py)."""
    return (
        type(quantizer) is Quantizer  # subclasses cast differently
        and quantizer.computes
        and kernels.run_on(device)
        and quantizer.rule.granularity in (TENSOR, BLOCK_128X128)
    )


class StoredCodes:
    """Codes, scales and the last cast's measurements; shared by a parameter and its detached aliases."""

    def __init__(
        self,
        quantizer: Quantizer,
        dtype: torch.dtype,
        codes: list[torch.Tensor],
        shape: torch.Size | None = None,
    ):
        self.quantizer, self.dtype, self.codes = quantizer, dtype, codes
        self.shape = codes[0].shape if shape is None else shape  # of the matrix: NVFP4 has two codes a byte
        self.initial: torch.Tensor | None = None
        self.piece: tuple[int, int] | None = None
        self.in_place = False

    def set_scales(
        self, scale_invs: list[torch.Tensor], amax: torch.Tensor, nonfinite: torch.Tensor | None
    ) -> None:
        """Sets the scales of the codes; ``scale_invs`` have the codes' orientation, [rows, cols]."""
        if not self.in_place:
            self.scale_invs, self.amax, self.nonfinite = scale_invs, amax, nonfinite
        else:
            for own, new in zip((*self.scale_invs, self.amax), (*scale_invs, amax), strict=True):
                own.copy_(new.view(own.shape))
            if self.nonfinite is None:
                self.nonfinite = nonfinite
            elif nonfinite is None:
                self.nonfinite.zero_()
            else:
                self.nonfinite.copy_(nonfinite)
        self.view()

    def update_in_place(self) -> None:
        """Moves scales, amax and count to memory of their own, which ``set_scales`` overwrites from now on.

        A CUDA graph reads it. Otherwise new tensors replace them, which saves a copy of each in every step. A count of
        None, which training on GPUs does not have, may still become a tensor.
        """
        if self.in_place:
            return
        count = None if self.nonfinite is None else self.nonfinite.clone()
        self.set_scales([scale_inv.clone() for scale_inv in self.scale_invs], self.amax.clone(), count)
        self.in_place = True

    def view(self) -> None:
        """Rebuilds the quantized matrix over the current codes; the columnwise side is a transposed view."""
        rule = self.quantizer.rule
        sides = [
            QuantizedSide(codes.view(rule.fmt.dtype), scale_inv, g, rule.pow2, self.nonfinite is None)
            for codes, scale_inv, g in zip(self.codes, self.scale_invs, granularities(rule), strict=True)
        ]
        if len(sides) == 1:
            columnwise = sides[0].transposed()
        else:
            second = sides[1]  # [rows, cols] with columnwise scales; the side itself is [cols, rows]
            columnwise = QuantizedSide(
                second.codes.t(), second.scale_inv.t(), rule.granularity, second.pow2, second.finite
            )
        self.quantized = Float8Tensor(sides[0], columnwise, self.dtype)

    def take_scales(self, other: StoredCodes, device: Any) -> None:
        """Copies scales, amax and health from another parameter, after its codes were copied here."""
        nonfinite = None if other.nonfinite is None else other.nonfinite.to(device, copy=True)
        self.set_scales(
            [s.to(device, copy=True) for s in other.scale_invs], other.amax.to(device, copy=True), nonfinite
        )
        if other.in_place:
            self.update_in_place()

    def write(self, x: torch.Tensor) -> None:
        """Quantizes a matrix into the codes."""
        if cast_by_kernel(self.quantizer, x.device):
            self._write_by_kernel(x)
            return
        result: CastResult = self.quantizer.quantize(x.to(self.dtype), "both")
        row, column = result.tensor.rowwise, result.tensor.columnwise
        assert row is not None and column is not None
        new_codes, scale_invs = [row.codes], [row.scale_inv]
        if len(self.codes) == 2:
            new_codes.append(column.codes.t())
            scale_invs.append(column.scale_inv.t())
        for codes, new in zip(self.codes, new_codes, strict=True):
            codes.copy_(new.view(torch.uint8))
        self.set_scales(scale_invs, result.amax, result.nonfinite)

    def _write_by_kernel(self, x: torch.Tensor) -> None:
        """Reads the matrix twice, makes no rounded copy, and writes each code once, in place."""
        from ..kernels.param_cast import piece_amax, piece_cast  # loads Triton

        quantizer, shape, device = self.quantizer, (x.shape[0], x.shape[1]), x.device
        side = quantizer.rule.granularity.rows
        blocks = [-(-size // side) for size in shape] if side else []
        amax = torch.zeros(blocks, device=device, dtype=torch.float32)
        nonfinite = torch.zeros([], device=device, dtype=torch.float32)
        flat = x.to(torch.float32).contiguous().view(-1)  # [rows * cols]
        piece_amax(flat, 0, shape, self.dtype, amax, nonfinite)
        scale = quantizer.delayed_scale()
        if scale is None:
            scale, scale_inv = block_scales(amax, quantizer.rule)
        else:
            scale_inv = compute_scale_inv(scale)
        piece_cast(flat, 0, shape, self.dtype, scale, self.codes[0].view(-1), quantizer.rule.fmt)
        quantizer.slot.arena.counter.current.casts += 1
        self.set_scales([scale_inv], amax.amax() if amax.numel() else torch.zeros_like(nonfinite), nonfinite)


class StoredFp4Codes(StoredCodes):
    """NVFP4: codes and scales of both sides, each packed along its contraction, and the tensor's amax."""

    def view(self) -> None:
        rule, (rows, cols) = self.quantizer.rule, self.shape
        *scale_invs, tensor_amax = self.scale_invs
        sides = [
            QuantizedSide(
                codes.view(rule.fmt.dtype),
                scale_inv,
                rule.granularity,
                rule.pow2,
                self.nonfinite is None,
                padding=codes.shape[1] * rule.fmt.codes_per_byte - size,
                tensor_amax=tensor_amax,
            )
            for codes, scale_inv, size in zip(self.codes, scale_invs, (cols, rows), strict=True)
        ]
        self.quantized = Float8Tensor(sides[0], sides[1], self.dtype)

    def write(self, x: torch.Tensor) -> None:
        result: CastResult = self.quantizer.quantize(x.to(self.dtype), "both")
        sides = [side for side in result.tensor.sides if side is not None]
        for codes, side in zip(self.codes, sides, strict=True):
            codes.copy_(side.codes.view(torch.uint8))
        tensor_amax = sides[0].tensor_amax
        assert tensor_amax is not None
        scales = [*(side.scale_inv for side in sides), tensor_amax]
        self.set_scales(scales, result.amax, result.nonfinite)
