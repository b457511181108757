"""The delayed-scaling update of an arena in one Triton launch.

The same bits as state/arena.py's dozen torch operations. Nothing is read back, and nothing that outlives the call is
allocated, so a CUDA graph may hold the update of a step. (Whether it is due, with an interval above 1, is decided
on the host: such a step cannot be one graph.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import on_its_device
from .device_math import FLT_MAX, as_bits, scale_of

NUMBERS = 2048
"""So many entries of blocks one program reads, of 16 to 64 slots."""


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
    """Update k slots from their running amaxes (docs/numerics.md, delayed scaling). scale, head, history and
    maxima change.

    Args:
        running: float32 [n], the arena's reduced amaxes; not cleared here.
        scale: float32 [n].
        index: int64 [k], where in running and scale each slot is.
        head: int64 [k], where in its history each slot's running entry is.
        history: float32 [blocks, k, block], maxima: float32 [blocks, k], contiguous: a ring a slot
        (state/amax_ring_buffer.py). fp8_max: float32 [k], each slot's largest code, so that formats may share a launch.
        length: entries of a ring.
        margin, epsilon: as in scaling.compute_scale.
        most_recent: the scale is made of the running amax alone, else of the largest in the history.
        due: whether scales are recomputed this iteration (histories roll all the same).

    Returns:
        bool [k]: which slots saw a finite amax that is not 0; all others keep their scale and do not roll.
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
    # The running entry is the value at hand, not what the ring holds of it.
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
    tl.debug_barrier()  # other threads of the program have read by now what is overwritten below
    tl.store(touched + first % BLOCK, value, mask=held)
    tl.store(maxima + number * slots + slot, inside, mask=held)
    tl.store(head + slot, tl.where(first + 1 == length, 0, first + 1), mask=is_seen)
    tl.store(seen + slot, is_seen.to(tl.uint8), mask=held)
