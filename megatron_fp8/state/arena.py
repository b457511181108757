"""Arenas: amaxes and health of many tensors, updated once an iteration.

Each (GEMM site, role) has a slot in one arena per reduction group. A cast writes its amax and its count of non-finite
elements into the slot. ``Fp8State.finish_iteration`` then, for every arena,

* reduces both rows over the group in one collective, whatever the number of slots;
* for delayed scaling, recomputes scales and rolls histories, vectorised over all slots (on a GPU one launch per
  format, and no value goes to the host once every slot has a scale);
* sums the iteration's non-finite counts, which the optimizer step checks, and clears the rows.

Rejected: an update when a context is left, as Transformer Engine's autocast does. There delayed scaling cannot be
combined with BF16 layers, recompute or a module that is called twice.

The counts are max-reduced with the amaxes, since one collective has one operator: a count is the largest of any rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import kernels
from ..backends.base import RunningAmax
from ..numerics.formats import FloatFormat
from ..numerics.scaling import compute_scale
from ..numerics.subnormals import keep_subnormals
from ..recipe import DelayedScaling
from .amax_history import History
from .collectives import broadcast_value, equal_on_ranks, gather_to_first
from .iteration import Counter
from .observer_protocol import Observer

Group = Any
"""A torch.distributed process group, or None for a single process."""


class SlotViews(NamedTuple):
    """Views of a slot's numbers in its arena; scale: float32 [], delayed."""

    running: RunningAmax
    scale: torch.Tensor


class Slot:
    """The entry of one tensor in an arena, to which its casts record (``Quantizer.record``). ``name`` is set when the
    model's modules get their names."""

    def __init__(self, arena: Arena, index: int, delayed: DelayedScaling | None, fmt: FloatFormat):
        self.arena, self.index, self.delayed, self.fmt = arena, index, delayed, fmt
        self.name = f"slot{index}"
        self.warm = False
        self.column = 0  # its index among the slots that share its delayed recipe and format

    @cached_property
    @torch.inference_mode(False)
    def views(self) -> SlotViews:
        """Its numbers, until the arena is resized."""
        rows, index = self.arena.rows, self.index
        running = RunningAmax(rows[0, index], rows.view(torch.int32)[0, index], rows[1, index])
        return SlotViews(running, self.arena.scale[index])

    def count(self, nonfinite: torch.Tensor) -> None:
        """Adds a count of NaN and Inf (a scalar tensor), without an amax."""
        self.arena.rows[1, self.index] += nonfinite

    @property
    def scale(self) -> torch.Tensor:
        """float32 [], the delayed scale of the last update. A copy: later updates do not change saved tensors."""
        return self.views.scale.clone()


class Arena:
    """The slots of one reduction group.

    Args:
        group: the ranks that share amaxes; None for a single process.
        device: of all tensors below.
        counter, observer: the Fp8State's, which replaces the observer.

    Attributes (n slots, and spare capacity until the first reduction):
        rows: float32 [2, n]: running amaxes; counts of NaN and Inf.
        scale: float32 [n], delayed scales.
        last_amax, last_nonfinite: float32 [n], both rows of the last iteration, over all ranks of the group.
        own_nonfinite: as last_nonfinite, of this rank alone.
        own_damage: bool [2, n], of this rank: delayed scales that are not finite and above 0; amaxes that are NaN, or
            Inf where no Inf was cast.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        counter: Counter | None = None,
        observer: Observer | None = None,
    ):
        self.group, self.device = group, device
        self.counter = Counter() if counter is None else counter
        self.observer = observer
        self.slots: list[Slot] = []
        self.rows = torch.zeros(2, 0, device=device, dtype=torch.float32)
        self.scale = torch.ones(0, device=device, dtype=torch.float32)
        self.last_amax = torch.zeros(0, device=device, dtype=torch.float32)
        self.last_nonfinite = torch.zeros(0, device=device, dtype=torch.float32)
        self.own_nonfinite = torch.zeros(0, device=device, dtype=torch.float32)
        self.own_damage = torch.zeros(2, 0, device=device, dtype=torch.bool)
        self._histories: dict[tuple[DelayedScaling, str], History] = {}
        self._agreed: int | None = None  # number of slots that all ranks have confirmed to share

    @property
    def world_size(self) -> int:
        """Ranks that share this arena."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def add(self, delayed: DelayedScaling | None, fmt: FloatFormat) -> Slot:
        """Adds a slot; ``delayed`` is the recipe that owns its history, None for the other recipes."""
        slot = Slot(self, len(self.slots), delayed, fmt)
        self.slots.append(slot)
        if len(self.slots) > self.rows.shape[1]:
            # Doubling makes the cost of adding n slots linear in n.
            extra = max(64, len(self.slots))
            rows = torch.zeros(2, extra, device=self.device, dtype=torch.float32)
            scale = torch.ones(extra, device=self.device, dtype=torch.float32)
            self._resize(torch.cat([self.rows, rows], 1), torch.cat([self.scale, scale]))
        if delayed is not None:
            key = delayed, fmt.name
            if key not in self._histories:
                self._histories[key] = History(delayed.amax_history_len, self.device)
            self._histories[key].add(slot)
        return slot

    def restorer(self) -> Callable[[], None]:
        """Returns a function that restores the running rows, and removes slots that were added since, none of them
        delayed."""
        count, rows, scale, values = len(self.slots), self.rows, self.scale, self.rows.clone()

        def restore() -> None:
            if len(self.slots) > count:
                del self.slots[count:]
                self._resize(rows, scale)
            self.rows.copy_(values)

        return restore

    def history(self, delayed: DelayedScaling, fmt: FloatFormat) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (int64 [k] slot indices, float32 [amax_history_len, k] rows) for the slots of one recipe and
        format. A copy.

        Row 0 is the running one (zero between iterations); the last row is the latest iteration's.
        """
        histories = self._histories[delayed, fmt.name]
        histories.grow()
        return histories.index, histories.rings.unrolled()

    def _history_of(self, slot: Slot) -> History:
        """The histories of which a delayed slot's is one."""
        assert slot.delayed is not None
        histories = self._histories[slot.delayed, slot.fmt.name]
        histories.grow()
        return histories

    def histories(self) -> list[History]:
        """Returns the histories, one per recipe and format. No copies."""
        return list(self._histories.values())

    def saved_slot(self, slot: Slot) -> dict[str, torch.Tensor]:
        """Returns a delayed slot's checkpoint state: float32 scale [1] and amax_history [length], uint8 warm [1] (CPU).

        amax_history[0] is the running amax of an unfinished iteration, the last entry is the latest iteration's. No
        host sync.
        """
        history = self._history_of(slot).rings.entries(slot.column)
        history[0] = self.rows[0, slot.index]
        warm = torch.tensor([slot.warm], dtype=torch.uint8, device="cpu")
        return {
            "scale": self.scale[slot.index : slot.index + 1].clone(),
            "amax_history": history,
            "warm": warm,
        }

    def load_slot(self, slot: Slot, saved: dict[str, torch.Tensor]) -> None:
        """Restores what ``saved_slot`` returned; from a history of another length the latest entries that fit."""
        histories, history = self._history_of(slot), saved["amax_history"].to(self.device)
        self.scale[slot.index] = saved["scale"].to(self.device)[0]
        self.rows[0, slot.index] = history[0]
        histories.rings.load(slot.column, history)
        was_warm, slot.warm = slot.warm, bool(saved["warm"])
        histories.cold += was_warm - slot.warm

    def reset_history(self, slot: Slot) -> None:
        """Clears a delayed slot's history: the slot is cold again, like that of a tensor that was never cast.

        Its scale stays for captured CUDA graphs, which have no cold start: their next replay uses it and computes a
        new one.
        """
        empty = torch.zeros(1, device="cpu", dtype=torch.float32)
        self.load_slot(slot, {**self.saved_slot(slot), "amax_history": empty, "warm": empty})

    @torch.inference_mode(False)
    def _trim(self) -> None:
        """Drops the spare capacity, so that collectives and updates process slots only."""
        if self.rows.shape[1] != len(self.slots):
            count = len(self.slots)
            self._resize(self.rows[:, :count].contiguous(), self.scale[:count].contiguous())

    def _resize(self, rows: torch.Tensor, scale: torch.Tensor) -> None:
        self.rows, self.scale = rows, scale
        for slot in self.slots:
            vars(slot).pop("views", None)

    def check_names(self) -> None:
        """Raises RuntimeError, on every rank, unless all ranks of the group hold the same slots in the same order.

        Collective. ``reduce`` calls it on all ranks together: the first time, and after any rank has added slots.
        """
        described = "\n".join(f"{s.name} {s.fmt.name} {s.delayed}" for s in self.slots)
        digest = int.from_bytes(hashlib.sha256(described.encode()).digest()[:7], "big")
        if not equal_on_ranks([len(self.slots), digest], self.group):
            counts = broadcast_value(
                0, [count for _, count in gather_to_first([len(self.slots)], self.group)], self.group
            )
            raise RuntimeError(
                f"ranks of one amax group hold different FP8 tensors (slots per rank: {counts}; mine are"
                f" {', '.join(s.name for s in self.slots[:4])}, ...): build the same layers, with the same fp8 settings,"
                " on every rank of a pipeline stage"
            )
        self._agreed = len(self.slots)

    def _count_damage(self) -> None:
        """Counts each scale and amax that no update or cast can have written as one more non-finite value.

        Then all ranks skip the step. NaN amaxes become Inf, since a max-reduction may drop NaN.
        """
        amax, nonfinite = self.rows
        self.own_damage = torch.stack(
            [~(self.scale > 0) | self.scale.isinf(), ~amax.isfinite() & (nonfinite == 0)]
        )
        nonfinite += self.own_damage.sum(0)
        amax.masked_fill_(amax.isnan(), torch.inf)

    @keep_subnormals
    def reduce(self, ran: bool = True) -> torch.Tensor:
        """Max-reduces both rows over the group, for the slots that all ranks share. No value goes to the host.

        Args:
            ran: whether this rank ran anything in this iteration.

        Returns:
            float32 [3]: whether ``reduce_new`` has slots to reduce, the sum of non-finite counts, and whether any
            rank ran anything. One collective, or none for a single rank.
        """
        self._trim()
        self._count_damage()
        self.own_nonfinite = self.rows[1].clone()
        if self.world_size == 1:
            return torch.stack([self.rows.new_zeros(()), self.rows[1].sum(), self.rows.new_full((), ran)])
        if self._agreed is None:
            self.check_names()
        agreed = self._agreed
        assert agreed is not None
        # All ranks send the slots they agreed on, and a flag for additional ones, so that message sizes cannot differ.
        flags = [self.rows.new_full((1,), flag) for flag in (len(self.slots) > agreed, ran)]
        wire = torch.cat([self.rows[:, :agreed].reshape(-1), *flags])
        dist.all_reduce(wire, op=dist.ReduceOp.MAX, group=self.group)
        self.rows[:, :agreed] = wire[:-2].view(2, agreed)
        self.counter.current.amax_collectives += 1
        return torch.stack([wire[-2], self.rows[1].sum(), wire[-1]])

    @keep_subnormals
    def reduce_new(self) -> float:
        """Reduces the slots that were added since ranks last agreed; returns the sum of non-finite counts of all slots.

        Collective. Call it if ``reduce`` found such slots on any rank.
        """
        agreed = self._agreed
        self.check_names()
        added = self.rows[:, agreed:].contiguous()
        dist.all_reduce(added, op=dist.ReduceOp.MAX, group=self.group)
        self.rows[:, agreed:] = added
        self.counter.current.amax_collectives += 1
        return float(self.rows[1].sum())

    @keep_subnormals
    def update(self, iteration: int) -> None:
        """Updates scales and histories from the reduced rows (numerics: Delayed scaling), then clears the rows.

        An Inf amax changes nothing. A slot that was not cast keeps its scale and history. Scales are recomputed every
        interval-th iteration, starting with iteration 0.
        """
        self._trim()
        self.last_amax, self.last_nonfinite = self.rows[0].clone(), self.rows[1].clone()
        for (delayed, _), histories in self._histories.items():
            self._update_delayed(delayed, histories, iteration % delayed.interval == 0)
        self.rows.zero_()

    def capture_refusal(self) -> str | None:
        """Returns why an update cannot be captured in a CUDA graph, None if it can."""
        cold = [slot.name for slot in self.slots if slot.delayed is not None and not slot.warm]
        if cold:
            return (
                f"{len(cold)} tensors have no delayed scale yet ({', '.join(cold[:3])}{', ...' if cold[3:] else ''}):"
                " train one iteration more without a graph, in which each of them is quantized, and override the recipe"
                " of those that training never quantizes (gradients of frozen first layers, layers that do not run)"
            )
        if self.rows.shape[1] != len(self.slots) or (self.world_size > 1 and self._agreed != len(self.slots)):
            return "no iteration has been finished with all of its layers: train one without a graph"
        intervals = [delayed.interval for delayed, _ in self._histories if delayed.interval != 1]
        if intervals:
            return f"scales are updated every {intervals[0]} iterations, which the host decides: set the interval to 1"
        return None

    def warm_up(self) -> None:
        """Marks cold slots that ``settle_unread`` gave a scale as warm; goes to the host only while any slot is cold."""
        for histories in self._histories.values():
            if histories.cold:
                amax = self.last_amax.index_select(0, histories.index)
                histories.warm_up((amax != 0) & amax.isfinite())

    def settle_unread(self) -> torch.Tensor:
        """``reduce`` and ``update`` for a CUDA graph, without a host sync; returns float32 [], the sum of non-finite
        counts.

        Only if ``capture_refusal`` is None. A collective if the group has more than one rank.
        """
        self._count_damage()
        self.own_nonfinite = self.rows[1].clone()
        if self.world_size > 1:
            dist.all_reduce(self.rows, op=dist.ReduceOp.MAX, group=self.group)
            self.counter.current.amax_collectives += 1
        self.update(0)
        return self.last_nonfinite.sum()

    def _update_delayed(self, delayed: DelayedScaling, histories: History, due: bool) -> None:
        histories.grow()
        if kernels.run_on(self.device):
            was_cast = self._update_in_one_launch(delayed, histories, due)
            if due:
                histories.warm_up(was_cast)
            return
        value = self.rows[0].index_select(0, histories.index)
        value.masked_fill_(value.isinf(), 0)
        was_cast = value != 0
        histories.rings.put(value)
        if due:
            amax = value if delayed.amax_compute_algo == "most_recent" else histories.rings.largest()
            fresh = compute_scale(
                amax, histories.slots[0].fmt, margin=delayed.margin, epsilon=delayed.amax_epsilon
            )
            current = self.scale.index_select(0, histories.index)
            self.scale.index_copy_(0, histories.index, torch.where(was_cast, fresh, current))
            histories.warm_up(was_cast)
        histories.rings.roll(was_cast)

    def _update_in_one_launch(self, delayed: DelayedScaling, histories: History, due: bool) -> torch.Tensor:
        from ..kernels.delayed_update import update_delayed  # loads Triton

        return update_delayed(
            self.rows[0],
            self.scale,
            histories.index,
            histories.rings.head,
            histories.rings.rows,
            histories.rings.maxima,
            histories.fp8_max,
            length=histories.rings.length,
            margin=delayed.margin,
            epsilon=delayed.amax_epsilon,
            most_recent=delayed.amax_compute_algo == "most_recent",
            due=due,
        )


SAVED_PARTS = ("scale", "amax_history", "warm")
"""The saved tensors of a slot."""
PREFIX = "fp8_state"
"""The part of a checkpoint key between a linear's name and its slots."""


def is_slot_key(key: str) -> bool:
    """Whether a checkpoint key belongs to FP8 state."""
    return f".{PREFIX}." in key


def must_be_finite(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a checkpoint tensor that must not hold NaN or Inf.

    All of it, except a history's running amax, the first of its entries [..., length]: it may be Inf and never
    becomes a scale.
    """
    return tensor[..., 1:] if is_slot_key(key) and key.endswith(".amax_history") else tensor


def saved_slots(slots: Mapping[str, Slot]) -> dict[str, torch.Tensor]:
    """Returns ``NAME.scale`` (float32 [1]), ``.amax_history`` (float32 [length]), ``.warm`` (uint8 [1]) of each slot."""
    return {
        f"{name}.{part}": tensor.cpu()
        for name, slot in slots.items()
        for part, tensor in slot.arena.saved_slot(slot).items()
    }


def load_slots(slots: Mapping[str, Slot], saved: Mapping[str, torch.Tensor]) -> None:
    """Restores what ``saved_slots`` returned; from a history of another length the latest entries that fit."""
    for name, slot in slots.items():
        slot.arena.load_slot(slot, {part: saved[f"{name}.{part}"] for part in SAVED_PARTS})


def check_saved(expected: Collection[str], saved: Mapping[str, torch.Tensor], remedy: str) -> None:
    """Raises ValueError unless the saved state has exactly these keys, with possible shapes."""
    missing, unknown = sorted(set(expected) - saved.keys()), sorted(saved.keys() - set(expected))
    if missing or unknown:
        raise ValueError(
            f"the saved FP8 state is of another model or recipe: {len(missing)} entries are missing"
            f" ({', '.join(missing[:3])}), {len(unknown)} are unknown ({', '.join(unknown[:3])}). {remedy}, or start with"
            " cold scales by not loading this"
        )
    for key, tensor in saved.items():
        history = key.endswith(".amax_history")
        fits = tensor.ndim == 1 and tensor.numel() > 0 if history else tensor.numel() == 1
        if not fits:
            raise ValueError(f"the saved FP8 state is damaged: {key} has the shape {tuple(tensor.shape)}")
