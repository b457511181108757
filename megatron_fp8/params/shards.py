"""Casts of sharded masters with the scales of the whole weight.

The distributed optimizer splits its flat buffer into equal parts, inside tensors, rows and blocks. Each rank rounds
its piece to BF16, pads it with zeros to whole rows of blocks, and computes its amaxes. One collective max-reduces the
amaxes of all tensors over the data-parallel ranks. Then each rank casts its piece with the scales of the whole. The
codes of all pieces together, and the scales, which every rank computes, equal those of casting the whole BF16 weight,
bit for bit.

On a GPU both passes are kernels that round while they read (kernels/param_cast.py): no BF16 piece is made, and there
is no host sync. The results are bit-identical.

Rejected: gathering first and casting after. It would send twice the bytes, and need a BF16 copy of every weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm, prod
from typing import Any

import torch
import torch.distributed as dist

from ..backends.reference import block_scales, cast_blocks
from ..kernels.cast_dispatch import block_amaxes
from ..numerics import host_sync
from ..numerics.rule import Granularity, Rule
from ..numerics.scaling import compute_scale_inv
from ..numerics.subnormals import keep_subnormals
from .fp8_parameter import Fp8Parameter
from .stored_codes import cast_by_kernel, granularities


@keep_subnormals
def quantize_shards(
    params: Sequence[Fp8Parameter],
    masters: Sequence[torch.Tensor | None],
    offsets: Sequence[int | None],
    group: Any,
) -> None:
    """Casts this rank's piece of each master into the parameter's codes, with the scales of the whole tensor.

    Collective over ``group``: one max-reduction for all tensors (none for a single rank). Afterwards every rank has
    the right scales, and the codes of its own pieces; an all-gather must bring the rest.

    Args:
        params: the same, in the same order, on every rank.
        masters: float32, flat, this rank's piece of each; None where it has none.
        offsets: start of the piece in the flattened parameter; None without a piece.
        group: the data-parallel group whose ranks' pieces make up each tensor; None for this process alone.
    """
    if not params:
        return
    pieces = [_Piece(*each) for each in zip(params, masters, offsets, strict=True)]
    lengths = [piece.length for piece in pieces]
    wire = torch.zeros(sum(lengths), device=params[0].device, dtype=torch.float32)
    for piece, part in zip(pieces, wire.split(lengths), strict=True):
        piece.measure(part)
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(wire, op=dist.ReduceOp.MAX, group=group)
        params[0].quantizer.slot.arena.counter.current.scaling_collectives += 1
    _find_scales(pieces)
    for piece in pieces:
        piece.cast()


def _find_scales(pieces: Sequence[_Piece]) -> None:
    """Computes the scales of every piece from the whole tensors' amaxes: all tensors of a rule at once, since there
    are many weights and few scales in each."""
    groups: dict[tuple[Rule, bool], list[_Piece]] = {}
    for piece in pieces:
        quantizer = piece.param.quantizer
        from_history = quantizer.rule.delayed and quantizer.slot.warm
        groups.setdefault((quantizer.rule, from_history), []).append(piece)
    for (rule, from_history), members in groups.items():
        amaxes = [amax for piece in members for amax in piece.amaxes]
        if from_history:
            scale = torch.stack([piece.param.quantizer.slot.scale for piece in members])
            scale_inv = compute_scale_inv(scale)
        else:
            scale, scale_inv = block_scales(torch.cat([amax.view(-1) for amax in amaxes]), rule)
        sizes = [amax.numel() for amax in amaxes]
        found = zip(scale.split(sizes), scale_inv.split(sizes), strict=True)
        for piece in members:
            piece.scales = [
                (one.view(amax.shape), inverse.view(amax.shape))
                for amax, (one, inverse) in zip(piece.amaxes, found, strict=False)
            ]


class _Piece:
    """One rank's part of a master, as rows of its matrix.

    Attributes, set by ``measure``: ``amaxes``, for each set of codes float32 [row blocks, column blocks] of the whole
    matrix, or [] for one scale; ``nonfinite`` float32 [], the number of NaN and Inf elements. ``scales``: (scale,
    inverse) for each of them.
    """

    amaxes: list[torch.Tensor]
    nonfinite: torch.Tensor
    scales: list[tuple[torch.Tensor, torch.Tensor]]

    def __init__(self, param: Fp8Parameter, master: torch.Tensor | None, offset: int | None):
        self.param = param
        self.master = None if master is None or master.numel() == 0 else master
        self.offset = offset or 0
        self.by_kernel = cast_by_kernel(param.quantizer, param.device)
        self.granularities = granularities(param.rule)
        rows, cols = param.shape
        self.shapes = [
            () if g.is_tensor else (_blocks(rows, g.rows), _blocks(cols, g.cols)) for g in self.granularities
        ]
        self.length = sum(prod(shape) for shape in self.shapes) + 1
        # Start at a multiple of the block, so that the piece's blocks align with the matrix's.
        block = lcm(*(g.rows for g in self.granularities if g.rows))
        end = self.offset + (0 if self.master is None else self.master.numel())
        self.top = self.offset // cols // block * block
        self.bottom = min(-(-end // cols), rows)

    def _matrix(self, master: torch.Tensor) -> torch.Tensor:
        """Returns [bottom - top, cols] in the nominal dtype, zero in other ranks' elements. Made twice, not cached."""
        cols = self.param.shape[1]
        x = torch.zeros(self.bottom - self.top, cols, dtype=self.param.dtype, device=self.param.device)
        start = self.offset - self.top * cols
        x.view(-1)[start : start + master.numel()].copy_(master.view(-1))
        return x

    def measure(self, part: torch.Tensor) -> None:
        """Writes this rank's amaxes and count into ``part``, float32 [length] of zeros, which stays their memory."""
        *parts, count = part.split([*(prod(shape) for shape in self.shapes), 1])
        self.amaxes = [own.view(shape) for own, shape in zip(parts, self.shapes, strict=True)]
        self.nonfinite = count.view(())
        if self.master is None:
            return
        if self.by_kernel:
            from ..kernels.param_cast import piece_amax  # loads Triton

            shape, dtype = (self.param.shape[0], self.param.shape[1]), self.param.dtype
            piece_amax(self._flat(), self.offset, shape, dtype, self.amaxes[0], self.nonfinite)
            return
        found, nonfinite = block_amaxes(
            self._matrix(self.master), [(g.rows, g.cols) for g in self.granularities]
        )
        for g, amax, own in zip(self.granularities, self.amaxes, found, strict=True):
            self._rows_of(amax, g).copy_(own.view(()) if g.is_tensor else own)
        if nonfinite is not None:
            self.nonfinite += nonfinite

    def _rows_of(self, per_block: torch.Tensor, g: Granularity) -> torch.Tensor:
        """Returns the rows of blocks that the piece overlaps."""
        return per_block if g.rows == 0 else per_block[self.top // g.rows : -(-self.bottom // g.rows)]

    def cast(self) -> None:
        """Writes the codes of this rank's elements, and all scales."""
        param = self.param
        for index, (g, (scale, _)) in enumerate(zip(self.granularities, self.scales, strict=True)):
            if self.master is not None and self.by_kernel:
                self._cast_by_kernel(scale)
            elif self.master is not None:
                own = scale if g.is_tensor else self._rows_of(scale, g)
                # [bottom - top, cols], of which [n] elements are this rank's
                codes = cast_blocks(self._matrix(self.master), own, (g.rows, g.cols), param.rule, False, None)
                start = self.offset - self.top * param.shape[1]
                param.set_shard(index, self.offset, codes.view(-1)[start : start + self.master.numel()])
        param.quantizer.slot.arena.counter.current.casts += self.master is not None
        first = self.amaxes[0]
        amax = first.amax() if first.numel() else torch.zeros((), device=param.device, dtype=torch.float32)
        # On a GPU the count is kept even if it is 0: reading it would wait for the GPU.
        keep_count = self.by_kernel or host_sync.read_waits(param.device)
        count = self.nonfinite if keep_count or self.nonfinite else None
        param.set_scales([inverse for _, inverse in self.scales], amax, count)

    def _flat(self) -> torch.Tensor:
        """Returns the master as float32 [n], contiguous, for kernels."""
        assert self.master is not None
        return self.master.detach().to(torch.float32).contiguous().view(-1)

    def _cast_by_kernel(self, scale: torch.Tensor) -> None:
        from ..kernels.param_cast import piece_cast  # loads Triton

        param, flat = self.param, self._flat()
        codes = param.codes[0].view(-1)[self.offset : self.offset + flat.numel()]
        shape = (param.shape[0], param.shape[1])
        piece_cast(flat, self.offset, shape, param.dtype, scale, codes, param.rule.fmt)


def _blocks(size: int, block: int) -> int:
    return 1 if block == 0 else -(-size // block)
