"""The delayed-scaling update of every tensor of an arena in one launch: histories, heads and scales, in place.

The same bits as state/arena.py's dozen torch operations. Nothing is read back, and nothing that outlives the call is
allocated, so a CUDA graph may hold the update of a step. (Whether it is due, with an interval above 1, is decided
on the host: such a step cannot be one graph.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import on_its_device
from .elements import FLT_MAX, as_bits, scale_of

SLOTS = 16
"""Slots that one program updates: 10,000 slots with histories of 1024 are six hundred programs of 64 KB each."""


@on_its_device
def update_delayed(
    running: torch.Tensor,
    scale: torch.Tensor,
    index: torch.Tensor,
    head: torch.Tensor,
    history: torch.Tensor,
    fp8_max: torch.Tensor,
    *,
    margin: int = 0,
    epsilon: float = 0.0,
    most_recent: bool = False,
    due: bool = True,
) -> torch.Tensor:
    """Update k slots from their running amaxes (docs/numerics.md, delayed scaling). scale, head and history change.

    Args:
        running: float32 [n], the arena's reduced amaxes; not cleared here.
        scale: float32 [n].
        index: int64 [k], where in running and scale each slot is.
        head: int64 [k], where in its history each slot's running entry is.
        history: float32 [k, length], contiguous: one ring a slot.
        fp8_max: float32 [k], each slot's largest code, so that formats may share a launch.
        margin, epsilon: as in scaling.compute_scale.
        most_recent: the scale is made of the running amax alone, else of the largest in the history.
        due: whether scales are recomputed this iteration (histories roll all the same).

    Returns:
        bool [k]: which slots saw a finite amax that is not 0; all others keep their scale and do not roll.
    """
    slots, length = history.shape
    seen = torch.empty(slots, dtype=torch.uint8, device=history.device)
    if slots:
        _update[(triton.cdiv(slots, SLOTS),)](
            running,
            scale,
            index,
            head,
            history,
            fp8_max,
            seen,
            slots,
            length,
            epsilon,
            2.0**-margin,
            MOST_RECENT=most_recent,
            DUE=due,
            SLOTS=SLOTS,
            LENGTH=min(128, triton.next_power_of_2(length)),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return seen.view(torch.bool)


@triton.jit
def _update(
    running, scale, index, head, history, fp8_max, seen, slots, length, epsilon, factor,
    MOST_RECENT: tl.constexpr, DUE: tl.constexpr, SLOTS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    held = slot < slots
    at = tl.load(index + slot, mask=held, other=0)
    value = tl.load(running + at, mask=held, other=0.0)
    value = tl.where(value <= FLT_MAX, value, 0.0)
    is_seen = held & (value > 0)
    first = tl.load(head + slot, mask=held, other=0)
    ring = history + slot * length
    if DUE:
        amax = value
        if not MOST_RECENT:
            for start in range(0, length, LENGTH):
                entry = start + tl.arange(0, LENGTH)[None, :]
                # The running entry is the value at hand, not what the ring holds of it.
                past = held[:, None] & (entry < length) & (entry != first[:, None])
                amax = tl.maximum(amax, tl.max(tl.load(ring[:, None] + entry, mask=past, other=0.0), 1))
        largest = tl.load(fp8_max + slot, mask=held, other=1.0)
        tl.store(scale + at, scale_of(as_bits(amax), largest, epsilon, factor), mask=is_seen)
    tl.debug_barrier()  # other threads of the program have read by now what is overwritten below
    # A ring of one entry rolls onto itself, and its running entry is zero again.
    following = tl.where(first + 1 == length, 0, first + 1)
    rolls = is_seen & (following != first)
    tl.store(ring + first, tl.where(rolls, value, 0.0), mask=held)
    tl.store(ring + following, tl.zeros_like(value), mask=rolls)
    tl.store(head + slot, following, mask=rolls)
    tl.store(seen + slot, is_seen.to(tl.uint8), mask=held)
