"""Context parallelism: gathered keys and values, a ring, or heads in place of the sequence.

The sequence is split into 2*cp chunks, and rank r holds chunks r and 2*cp-1-r ("zigzag", the order of
get_batch_on_this_cp_rank), so that causal work is balanced. config.cp_comm_type, with Megatron-Core's names:

    all_gather, None   keys and values are all-gathered, their gradients reduce-scattered
    p2p                keys and values travel around a ring, and the next block's arrive while one is multiplied
    a2a                an all-to-all turns parts of the sequence with all heads into all of it with some heads (Ulysses)

In a ring each rank multiplies its queries by the keys of one rank after the other, and merges results by their
log-sum-exp in float32. Backward sends keys and values around again, and after them the float32 sums of their gradients,
which are complete when they reach their own rank.

Rejected: torch.distributed.tensor.experimental's ring. It takes neither masks nor attention that is not causal, its place
in torch has changed, and its options are global. The zigzag cases and the kernels' calls follow it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...linear.saved_operands import first_derivative_only
from .attention_kernels import block_kernel

COMM_TYPES = ("all_gather", "p2p", "a2a")


def zigzag_positions(size: int, device: Any = "cpu") -> Tensor:
    """Returns the indices of chunks 0, 1, ... of the sequence among the 2 * size chunks in rank order: int64 [2 * size].

    Created on the device: a copy from the host would wait, in each layer.
    """
    first, last = ((0, 2 * size, 2), (2 * size - 1, 0, -2))
    return torch.cat([torch.arange(*part, device=device, dtype=torch.int64) for part in (first, last)])


def hidden_keys(
    length: int, group: dist.ProcessGroup, window: tuple[int, int] | None, device: torch.device
) -> Tensor:
    """Returns True where a query of this rank must not see a key: bool [1, 1, length, length * cp].

    Args:
        length: this rank's tokens.
        window: keys before and after a query that it sees, by Megatron-Core's formula; None: all before it.
    """
    rank, size, n = dist.get_rank(group), dist.get_world_size(group), length // 2
    rows = torch.cat(
        [
            torch.arange(chunk * n, (chunk + 1) * n, dtype=torch.int64, device=device)
            for chunk in (rank, 2 * size - 1 - rank)
        ]
    ).unsqueeze(1)
    columns = torch.arange(length * size, dtype=torch.int64, device=device)
    before, after = (length * size, 0) if window is None else window
    return ((columns < rows - before) | (columns > rows + after))[None, None]


# ------------------------------------------------------------------------------------------------------------ all_gather


class GatherSequence(torch.autograd.Function):
    """[s/cp, ...] in zigzag order -> [2*cp, s/(2*cp), ...], all chunks in sequence order; backward: reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        size = dist.get_world_size(group)
        gathered = x.new_empty(size * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        chunks = gathered.unflatten(0, (2 * size, -1))
        return chunks.index_select(0, zigzag_positions(size, x.device))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        size, chunks = dist.get_world_size(ctx.group), grads[0]
        order = zigzag_positions(size, chunks.device)
        by_rank = torch.empty_like(chunks).index_copy_(0, order, chunks).flatten(0, 1)
        out = by_rank.new_empty(len(by_rank) // size, *by_rank.shape[1:])
        dist.reduce_scatter_tensor(out, by_rank, group=ctx.group)
        return out, None


def gather_keys_values(k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """[s / cp, b, groups, d], [s / cp, b, groups, dv] -> [s, b, groups, d], [s, b, groups, dv], in one collective."""
    both = GatherSequence.apply(torch.cat([k, v], dim=-1), group).flatten(0, 1)
    keys, values = both.split([k.shape[-1], v.shape[-1]], dim=-1)
    return keys, values


# ------------------------------------------------------------------------------------------------------------------- a2a


class ExchangeHeads(torch.autograd.Function):
    """[s/cp, b, h, d] in zigzag order -> [s, b, h/cp, d] in sequence order, or back; each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return (_sequence_to_heads if to_heads else _heads_to_sequence)(x, group)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return (_heads_to_sequence if ctx.to_heads else _sequence_to_heads)(grads[0], ctx.group), None, None


def _sequence_to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    sent = x.unflatten(2, (size, -1)).movedim(2, 0).contiguous()  # [heads of a rank, s/cp, b, h/cp, d]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    chunks = received.flatten(0, 1).unflatten(0, (2 * size, -1))
    return chunks.index_select(0, zigzag_positions(size, x.device)).flatten(0, 1)


def _heads_to_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    chunks = x.unflatten(0, (2 * size, -1))
    sent = torch.empty_like(chunks, memory_format=torch.contiguous_format)
    sent = sent.index_copy_(0, zigzag_positions(size, x.device), chunks).flatten(0, 1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.unflatten(0, (size, -1)).movedim(0, 2).flatten(2, 3)


def gather_rows(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A mask of this rank's queries, bool [b, 1, s / cp, s], becomes all queries' [b, 1, s, s], in sequence order."""
    rows = GatherSequence.apply(hidden.movedim(2, 0).to(torch.uint8), group)
    return rows.flatten(0, 1).movedim(0, 2).bool()


# ------------------------------------------------------------------------------------------------------------------- p2p


class Ring(NamedTuple):
    """What ring attention of one layer has beside tensors."""

    group: dist.ProcessGroup
    scale: float
    causal: bool
    backend: str


@torch.compiler.disable
def ring_attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, ring: Ring) -> Tensor:
    """Attention of this rank's queries to the whole sequence: [s / cp, b, heads, dv], contiguous.

    Args:
        q, k, v: this rank's [s / cp, b, heads, d], [s / cp, b, groups, d] and [s / cp, b, groups, dv].
        hidden: bool [b or 1, 1, s / cp, s], True where a query must not see a key, causality included; or None.
    """
    out: Tensor = _RingAttention.apply(q, k, v, hidden, ring)
    return out


class _Message:
    """Data on its way to the next rank of a ring, and the previous rank's on its way here."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        to, source = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self._sent, self._received = sent, torch.empty_like(sent)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, to, group, tag),
                dist.P2POp(dist.irecv, self._received, source, group, tag),
            ]
        )

    def wait(self) -> Tensor:
        """Returns what the previous rank sent. On a GPU its stream waits, and the host does not."""
        for work in self._works:
            work.wait()
        return self._received


class _Block(NamedTuple):
    """A step's queries and keys, as slices of this rank's rows and of the keys present."""

    rows: slice
    columns: slice
    causal: bool
    hidden: Tensor | None


_ALL = slice(None)


def _block(step: int, n: int, hidden: Tensor | None, ring: Ring) -> _Block:
    """The part of step `step` that is not hidden; n is a chunk's length. Keys are those of rank `rank - step`."""
    rank, size = dist.get_rank(ring.group), dist.get_world_size(ring.group)
    source = (rank - step) % size
    if hidden is not None:
        of_keys = [hidden[..., chunk * n : (chunk + 1) * n] for chunk in (source, 2 * size - 1 - source)]
        return _Block(_ALL, _ALL, False, torch.cat(of_keys, -1))
    if not ring.causal or step == 0:
        return _Block(_ALL, _ALL, ring.causal, None)  # of a rank's own chunks the second follows the first
    if source < rank:  # chunk `source` is before both chunks of queries, the other one after both
        return _Block(_ALL, slice(n), False, None)
    return _Block(slice(n, None), _ALL, False, None)  # both chunks of keys lie between the two of queries


def _views(buffer: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values in a flat buffer, with the shapes of k [b, groups, s, d] and v [b, groups, s, dv]."""
    keys, values = buffer.split([k.numel(), v.numel()])
    return keys.view(k.shape), values.view(v.shape)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, ring: Ring) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, heads, s / cp, d]
        kernel = block_kernel(ring.backend, q, k, v, hidden is not None)
        size, n = dist.get_world_size(ring.group), q.shape[2] // 2
        buffer = torch.cat([k.flatten(), v.flatten()])
        for step in range(size):
            ahead = _Message(buffer, ring.group, tag=0) if step < size - 1 else None
            keys, values = _views(buffer, k, v)
            rows, columns, causal, mask = _block(step, n, hidden, ring)
            part, part_lse, rest = kernel.forward(
                q[:, :, rows], keys[:, :, columns], values[:, :, columns], causal, mask, ring.scale
            )
            if step == 0:
                dtype = torch.promote_types(part.dtype, torch.float32)
                out, lse = part.to(dtype, copy=True), part_lse.to(dtype, copy=True)
            else:
                merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
            buffer = buffer if ahead is None else ahead.wait()
        context = out.to(q.dtype).permute(2, 0, 1, 3).contiguous()
        ctx.ring, ctx.kernel = ring, kernel
        ctx.save_for_backward(q, k, v, context, lse, hidden, *rest)
        return context

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, context, lse, hidden, *rest = ctx.saved_tensors
        grad, out = (x.permute(1, 2, 0, 3) for x in (grads[0], context))
        ring, kernel = ctx.ring, ctx.kernel
        size, n = dist.get_world_size(ring.group), q.shape[2] // 2
        dq = torch.zeros_like(q, dtype=lse.dtype)
        buffer, sums = torch.cat([k.flatten(), v.flatten()]), None
        for step in range(size):
            ahead = _Message(buffer, ring.group, tag=0) if step < size - 1 else None
            keys, values = _views(buffer, k, v)
            rows, columns, causal, mask = _block(step, n, hidden, ring)
            of_rows = [x[:, :, rows] for x in (grad, q, out)]
            # CUDA's kernels read the log-sum-exp as contiguous whatever its strides are.
            dq_part, dk_part, dv_part = kernel.backward(
                of_rows[0], of_rows[1], keys[:, :, columns], values[:, :, columns], of_rows[2],
                lse[:, :, rows].contiguous(), rest, causal, mask, ring.scale,
            )  # fmt: skip
            dq[:, :, rows] += dq_part
            # The sums for these keys follow them, one step later.
            total = torch.zeros_like(buffer, dtype=lse.dtype) if sums is None else sums.wait()
            dk, dv = _views(total, k, v)
            dk[:, :, columns] += dk_part
            dv[:, :, columns] += dv_part
            sums = _Message(total, ring.group, tag=1)
            buffer = buffer if ahead is None else ahead.wait()
        assert sums is not None
        dk, dv = _views(sums.wait(), k, v)
        dq, dk, dv = (x.to(q.dtype).permute(2, 0, 1, 3) for x in (dq, dk, dv))
        return dq, dk, dv, None, None


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds the results of other keys to out [b, heads, s, dv] and lse [b, heads, s], in place."""
    weight = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    out.lerp_(part.to(out.dtype), weight)
    lse.copy_(torch.logaddexp(lse, part_lse.to(lse.dtype)))
