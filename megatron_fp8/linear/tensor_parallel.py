"""Tensor-parallel communication of a linear, in FP8 codes where possible, and this rank's shard.

Tokens are [sequence, batch] flattened, so a gather along the sequence is a gather along the rows. The columnwise side of
a quantized matrix has the tokens last. In the emulated backend it is a transposed view of codes in row order, so its
shards are gathered along rows without a copy. The native backend writes it contiguous, as tensor cores read it; gathered
shards are copied side by side. In both the gathered side has its shards' layout.

float8 dtypes travel as uint8: gloo and NCCL have no float8 collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from ..state.iteration import IterationCounts
from ..tensor import QuantizedSide

if TYPE_CHECKING:
    import torch


class Pending:
    """A pending collective; ``wait()`` returns its result."""

    def __init__(self, works: list[Any], result: Callable[[], Any]):
        self._works, self._result = works, result

    def wait(self) -> Any:
        """Block until the collective is done, then build its result."""
        for work in self._works:
            if work is not None:
                work.wait()
        return self._result()


@dataclass(frozen=True)
class TensorParallel:
    """The communication of one linear layer.

    Attributes:
        kind: 'none' (nothing is sent), 'column' (weight split by output features) or 'row' (by input features).
        group: the tensor-parallel process group; None with kind 'none'.
        sequence_parallel: column: the input arrives sharded by tokens and is gathered; row: the output leaves so.
        reduce_dgrad: column without sequence parallelism: dgrad is summed over the group.
        gathers_input, gathers_gradient: whether the input, or grad_output, arrives as shards of tokens.
    """

    kind: Literal["none", "column", "row"] = "none"
    group: Any = None
    sequence_parallel: bool = False
    reduce_dgrad: bool = False
    rank: int = 0
    size: int = 1
    gathers_input: bool = field(init=False, repr=False, compare=False)
    gathers_gradient: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derives which operand arrives as shards of tokens."""
        object.__setattr__(self, "gathers_input", self.kind == "column" and self.sequence_parallel)
        object.__setattr__(self, "gathers_gradient", self.kind == "row" and self.sequence_parallel)

    @staticmethod
    def of(
        kind: Literal["column", "row"],
        group: Any,
        *,
        sequence_parallel: bool = False,
        reduce_dgrad: bool = False,
    ) -> TensorParallel:
        """The communication over a group; that of a group of one is none."""
        size = dist.get_world_size(group)
        if size == 1:
            return ALONE
        return TensorParallel(kind, group, sequence_parallel, reduce_dgrad, dist.get_rank(group), size)

    def to_text(self) -> str:
        """Serializes it to a string for compiled graphs; '' without communication."""
        if self.kind == "none":
            return ""
        flags = f"{int(self.sequence_parallel)} {int(self.reduce_dgrad)}"
        return f"{self.kind} {flags} {self.rank} {self.size} {self.group.group_name}"

    @staticmethod
    def from_text(text: str) -> TensorParallel:
        """Parses ``to_text``'s string. It looks the group up each time: torch reuses group names."""
        if not text:
            return ALONE
        kind: Any
        kind, sequence_parallel, reduce_dgrad, rank, size, name = text.split(" ", 5)
        group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        return TensorParallel(
            kind, group, sequence_parallel == "1", reduce_dgrad == "1", int(rank), int(size)
        )

    def amax_reduction(self, counts: IterationCounts) -> Callable[[torch.Tensor], None]:
        """Shares the amaxes of token shards: one small collective, counted apart from the iteration's own."""

        def reduce(amax: torch.Tensor) -> None:
            counts.scaling_collectives += 1
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)

        return reduce

    def all_gather(self, x: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Rows of every rank, in rank order: [rows, ...] -> [size * rows, ...]; any dtype, bytes unchanged."""
        x = x.contiguous()
        wire = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
        gathered = torch.empty((self.size * x.shape[0], *x.shape[1:]), dtype=wire.dtype, device=x.device)
        work = dist.all_gather_into_tensor(gathered, wire, group=self.group, async_op=async_op)
        return Pending([work], lambda: gathered.view(x.dtype))

    def gather_side(self, side: QuantizedSide, by_column: bool, *, async_op: bool = False) -> Pending:
        """All ranks' tokens of a side whose shards hold whole blocks, in the same layout on all ranks.

        by_column False: [M, K] of each rank -> [size * M, K]. True: tokens are the columns, [K, M] -> [K, size * M].

        Codes are sent, and scales if they differ between ranks. Per-tensor scales, and scales per row of a side whose
        columns are the tokens, were shared before the cast.
        """
        assert not side.tiled, "tiles of scales do not join"
        assert side.tensor_amax is None or not by_column or not side.padding, (
            "shards of NVFP4 are whole blocks"
        )
        codes, scale_inv = side.codes, side.scale_inv
        side_by_side = by_column and codes.is_contiguous()
        if by_column and not side_by_side:
            codes = codes.t()
        shared = side.granularity.is_tensor or (by_column and side.granularity.cols == 0)
        pending_codes = self.all_gather(codes, async_op=async_op)
        pending_scales = None
        if not shared:
            pending_scales = self.all_gather(scale_inv.t() if by_column else scale_inv, async_op=async_op)

        def result() -> QuantizedSide:
            all_codes = pending_codes.wait()
            scales = scale_inv if pending_scales is None else pending_scales.wait()
            if side_by_side:
                all_codes = _side_by_side(all_codes, self.size)
            elif by_column:
                all_codes = all_codes.t()
            if by_column and pending_scales is not None:
                scales = scales.t()
            made = QuantizedSide(all_codes, scales, side.granularity, side.pow2)
            padding = 0 if by_column else side.padding
            return replace(made, padding=padding, tensor_amax=side.tensor_amax, hadamard=side.hadamard)

        return Pending([], result)

    def reduce_scatter(self, x: torch.Tensor, *, async_op: bool = False) -> Pending:
        """This rank's rows of the sum over ranks: [rows, cols] -> [rows / size, cols]."""
        assert x.shape[0] % self.size == 0, "sequence parallelism: tokens are a multiple of the group's size"
        out = torch.empty((x.shape[0] // self.size, *x.shape[1:]), dtype=x.dtype, device=x.device)
        work = dist.reduce_scatter_tensor(out, x.contiguous(), group=self.group, async_op=async_op)
        return Pending([work], lambda: out)

    def all_reduce(self, x: torch.Tensor, *, async_op: bool = False) -> Pending:
        """The sum over ranks, in place."""
        work = dist.all_reduce(x, group=self.group, async_op=async_op)
        return Pending([work], lambda: x)


ALONE = TensorParallel()
"""No communication."""


def _side_by_side(stacked: torch.Tensor, size: int) -> torch.Tensor:
    """Shards' codes [size * rows, cols], one shard below the other, as contiguous [rows, size * cols]."""
    shards = stacked.view(torch.uint8).unflatten(0, (size, -1))
    return shards.transpose(0, 1).reshape(shards.shape[1], -1).view(stacked.dtype)


@dataclass(frozen=True)
class ShardInfo:
    """A rank's shard of one site.

    Attributes:
        kind: 'column' or 'row' where the weight is split over tensor-parallel ranks, by output or by input features.
        part: the weight shard's number; ranks with the same number hold the same values.
        tokens: the token set's number; ranks with the same number see the same tokens, or shards of them.
    """

    kind: Literal["none", "column", "row"] = "none"
    part: int = 0
    tokens: int = 0


def weight_of(linear: Any) -> torch.Tensor:
    """A linear's weight [N, K]: its own, or the tied weight that each call passes."""
    own: torch.Tensor | None = linear.weight
    weight: torch.Tensor = linear.tied_weight if own is None else own
    return weight


def device_of(linear: Any) -> torch.device:
    """The device of a linear's weight; ``fp8_device`` avoids computing a parametrised weight."""
    device: torch.device | None = getattr(linear, "fp8_device", None)
    return weight_of(linear).device if device is None else device
