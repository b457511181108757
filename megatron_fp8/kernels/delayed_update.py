"""The delayed-scaling update of an arena in one Triton launch.

It gives the same bits as state/arena.py's dozen torch operations. It neither synchronises with the host nor allocates
memory that outlives the call, so a CUDA graph can capture it. (With an interval above 1 the host decides whether the
update is due, so such a step cannot be one graph.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import on_its_device
from .device_math import FLT_MAX, as_bits, scale_of

NUMBERS = 2048
"""Block entries that one program reads, from 16 to 64 slots."""


@on_its_device
def update_delayed(
    running: torch.Tensor,
    scale: torch.Tensor,
    index: torch.Tensor,
    head: torch.Tensor,
    history: torch.Tensor,
    maxima: torch.Tensor,
    fp8_max: torch.Tensor,
    *,
    length: int,
    margin: int = 0,
    epsilon: float = 0.0,
    most_recent: bool = False,
    due: bool = True,
) -> torch.Tensor:
    """Update k slots from their running amaxes (docs/numerics.md, delayed scaling).

    Changes scale, head, history and maxima in place.

    Args:
        running: float32 [n], the arena's reduced amaxes; not cleared here.
        scale: float32 [n].
        index: int64 [k], each slot's index in running and scale.
        head: int64 [k], the index of each slot's running entry in its history.
        history: float32 [blocks, k, block], contiguous: a ring buffer per slot (state/amax_history.py).
        maxima: float32 [blocks, k], contiguous: the maximum of each block of history.
        fp8_max: float32 [k], the largest value of each slot's format; formats may share a launch.
        length: entries per ring buffer.
        margin, epsilon: as in scaling.compute_scale.
        most_recent: compute the scale from the running amax alone, else from the history's maximum.
        due: recompute scales in this iteration; histories roll in any case.

    Returns:
        bool [k]: slots with a finite, non-zero amax; all others keep their scale and do not roll.
    """
    blocks, slots, block = history.shape
    seen = torch.empty(slots, dtype=torch.uint8, device=history.device)
    together = max(16, min(64, NUMBERS // block))
    if slots:
        _update[(triton.cdiv(slots, together),)](
            running,
            scale,
            index,
            head,
            history,
            maxima,
            fp8_max,
            seen,
            slots,
            length,
            epsilon,
            2.0**-margin,
            MOST_RECENT=most_recent,
            DUE=due,
            SLOTS=together,
            BLOCK=block,
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return seen.view(torch.bool)


@triton.jit
def _update(
    running, scale, index, head, history, maxima, fp8_max, seen, slots, length, epsilon, factor,
    MOST_RECENT: tl.constexpr, DUE: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    held = slot < slots
    at = tl.load(index + slot, mask=held, other=0)
    value = tl.load(running + at, mask=held, other=0.0)
    value = tl.where(value <= FLT_MAX, value, 0.0)
    is_seen = held & (value > 0)
    first = tl.load(head + slot, mask=held, other=0)
    number = first // BLOCK
    entry = tl.arange(0, BLOCK)[None, :]
    touched = history + (number * slots + slot) * BLOCK
    # The running entry is the given value, not the ring's.
    past = held[:, None] & (number[:, None] * BLOCK + entry != first[:, None])
    inside = tl.maximum(value, tl.max(tl.load(touched[:, None] + entry, mask=past, other=0.0), 1))
    if DUE:
        amax = value
        if not MOST_RECENT:
            block = tl.arange(0, BLOCKS)[None, :]
            other = held[:, None] & (block * BLOCK < length) & (block != number[:, None])
            known = tl.load(maxima + block * slots + slot[:, None], mask=other, other=0.0)
            amax = tl.maximum(inside, tl.max(known, 1))
        largest = tl.load(fp8_max + slot, mask=held, other=1.0)
        tl.store(scale + at, scale_of(as_bits(amax), largest, epsilon, factor), mask=is_seen)
    tl.debug_barrier()  # the program's other threads have now read the memory that is overwritten below
    tl.store(touched + first % BLOCK, value, mask=held)
    tl.store(maxima + number * slots + slot, inside, mask=held)
    tl.store(head + slot, tl.where(first + 1 == length, 0, first + 1), mask=is_seen)
    tl.store(seen + slot, is_seen.to(tl.uint8), mask=held)
