"""Arenas: amaxes and health of many tensors, updated once an iteration.

Each (GEMM site, role) has a slot in one arena per reduction group. A cast writes its amax and its count of non-finite
elements into the slot; ``Fp8State.finish_iteration`` then, for every arena,

* reduces both rows over the group in one collective, whatever the number of slots;
* for delayed scaling, recomputes scales and rolls histories, vectorised over all slots (on a GPU in one launch for each
  format, and nothing is read back once every slot has a scale);
* adds up the iteration's health, which the optimizer step consults, and clears the rows.

Leaving a context does nothing. Transformer Engine updates when its autocast context is left, which is why delayed
scaling there cannot be combined with BF16 layers, recompute or a module that is called twice. Rejected.

The counts are max-reduced with the amaxes, since one collective has one operator: a count is the largest of any rank.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from .. import kernels
from ..numerics.formats import FloatFormat
from ..numerics.scaling import compute_scale
from ..numerics.subnormals import keeping_subnormals
from ..recipe import DelayedScaling
from .counts import Counter, IterationCounts
from .history import History
from .observer import Observer
from .ranks import collected, from_rank, same_everywhere

Group = Any
"""A torch.distributed process group, or None for a single process."""


class Slot:
    """Where one tensor's casts record (``Quantizer.record``). Belongs to one arena; ``name`` is given when the model is
    named."""

    def __init__(self, arena: Arena, index: int, delayed: DelayedScaling | None, fmt: FloatFormat):
        self.arena, self.index, self.delayed, self.fmt = arena, index, delayed, fmt
        self.name = f"slot{index}"
        self.warm = False
        self.column = 0  # its place among the slots that share its delayed recipe and format

    def count(self, nonfinite: torch.Tensor) -> None:
        """Count so many NaN and Inf, without an amax."""
        self.arena.rows[1, self.index] += nonfinite

    @property
    def scale(self) -> torch.Tensor:
        """float32 [], the delayed scale of the last update. A copy: a later update does not reach into saved tensors."""
        return self.arena.scale[self.index].clone()


class Arena:
    """The slots of one reduction group.

    Args:
        group: the ranks that share amaxes; None for a single process.
        device: where everything below is.
        counter, observer: its Fp8State's, which changes the observer.

    Attributes (n slots, and spare room until the first reduction):
        rows: float32 [2, n]: running amaxes; counts of NaN and Inf.
        scale: float32 [n], delayed scales.
        last_amax, last_nonfinite: float32 [n], both rows of the last iteration, over all ranks of the group.
        own_nonfinite: as last_nonfinite, of this rank alone.
        own_damage: bool [2, n], of this rank: delayed scales that are no finite number above 0; amaxes that are NaN, or
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
        self._agreed: int | None = None  # slots that all ranks are known to share

    @property
    def counts(self) -> IterationCounts:
        """The counts of the calling thread (Counter)."""
        return self.counter.here

    @property
    def world_size(self) -> int:
        """Ranks that share this arena."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def add(self, delayed: DelayedScaling | None, fmt: FloatFormat) -> Slot:
        """A new slot; ``delayed`` is the recipe that owns its history, None for the other recipes."""
        slot = Slot(self, len(self.slots), delayed, fmt)
        self.slots.append(slot)
        if len(self.slots) > self.rows.shape[1]:
            # Doubling keeps building a model of n slots linear in n.
            extra = max(64, len(self.slots))
            self.rows = torch.cat(
                [self.rows, torch.zeros(2, extra, device=self.device, dtype=torch.float32)], 1
            )
            self.scale = torch.cat([self.scale, torch.ones(extra, device=self.device, dtype=torch.float32)])
        if delayed is not None:
            known = self._histories.get((delayed, fmt.name))
            if known is None:
                known = self._histories[delayed, fmt.name] = History(delayed.amax_history_len, self.device)
            known.add(slot)
        return slot

    def history(self, delayed: DelayedScaling, fmt: FloatFormat) -> tuple[torch.Tensor, torch.Tensor]:
        """(int64 [k] slot indices, float32 [amax_history_len, k] rows) of the slots of one recipe and format.

        Row 0 is the running one (zero between iterations); the last row is the latest iteration's. A copy.
        """
        held = self._histories[delayed, fmt.name]
        held.grow()
        return held.index, held.rings.unrolled()

    def histories(self) -> list[History]:
        """Of each recipe and format. No copies."""
        return list(self._histories.values())

    def saved_slot(self, slot: Slot) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps of a delayed slot: float32 scale [1] and amax_history [length], uint8 warm [1] (CPU).

        amax_history[0] is the running amax of an iteration that has begun, the last entry is the latest iteration's.
        Nothing is read back.
        """
        assert slot.delayed is not None
        held = self._histories[slot.delayed, slot.fmt.name]
        held.grow()
        history = held.rings.entries(slot.column)
        history[0] = self.rows[0, slot.index]
        warm = torch.tensor([slot.warm], dtype=torch.uint8, device="cpu")
        return {
            "scale": self.scale[slot.index : slot.index + 1].clone(),
            "amax_history": history,
            "warm": warm,
        }

    def load_slot(self, slot: Slot, saved: dict[str, torch.Tensor]) -> None:
        """Put back what ``saved_slot`` gave; of a history of another length the latest entries that fit."""
        assert slot.delayed is not None
        held = self._histories[slot.delayed, slot.fmt.name]
        held.grow()
        history = saved["amax_history"].to(self.device)
        self.scale[slot.index] = saved["scale"].to(self.device)[0]
        self.rows[0, slot.index] = history[0]
        held.rings.load(slot.column, history)
        was_warm, slot.warm = slot.warm, bool(saved["warm"])
        held.cold += was_warm - slot.warm

    def start_again(self, slot: Slot) -> None:
        """Forget a delayed slot's history: it is cold, as a tensor that was never cast.

        Its scale stays for captured CUDA graphs, which have no cold start: their next replay uses it, and makes another.
        """
        assert slot.delayed is not None
        held = self._histories[slot.delayed, slot.fmt.name]
        held.grow()
        held.rings.load(slot.column, torch.zeros(1, device=self.device, dtype=torch.float32))
        self.rows[0, slot.index] = 0
        held.cold += slot.warm
        slot.warm = False

    @torch.inference_mode(False)
    def _trim(self) -> None:
        """Drop the spare capacity, so that collectives and updates touch slots only."""
        if self.rows.shape[1] != len(self.slots):
            self.rows = self.rows[:, : len(self.slots)].contiguous()
            self.scale = self.scale[: len(self.slots)].contiguous()

    def check_names(self) -> None:
        """RuntimeError, on every rank, unless all ranks of the group hold the same slots in the same order.

        Collective. ``reduce`` calls it on all ranks together: the first time, and when slots were added on any rank.
        """
        described = "\n".join(f"{s.name} {s.fmt.name} {s.delayed}" for s in self.slots)
        digest = int.from_bytes(hashlib.sha256(described.encode()).digest()[:7], "big")
        if not same_everywhere([len(self.slots), digest], self.group):
            counts = from_rank(
                0, [count for _, count in collected([len(self.slots)], self.group)], self.group
            )
            raise RuntimeError(
                f"ranks of one amax group hold different FP8 tensors (slots per rank: {counts}; mine are"
                f" {', '.join(s.name for s in self.slots[:4])}, ...): build the same layers, with the same fp8 settings,"
                " on every rank of a pipeline stage"
            )
        self._agreed = len(self.slots)

    def _count_damage(self) -> None:
        """What no cast can have recorded, and no update made, counts as one more value that is not finite, so that all
        ranks skip the step. A maximum over ranks takes no NaN."""
        amax, nonfinite = self.rows
        self.own_damage = torch.stack(
            [~(self.scale > 0) | self.scale.isinf(), ~amax.isfinite() & (nonfinite == 0)]
        )
        nonfinite += self.own_damage.sum(0)
        amax.masked_fill_(amax.isnan(), torch.inf)

    @keeping_subnormals
    def reduce(self, ran: bool = True) -> torch.Tensor:
        """Max both rows over the group, of the slots that all ranks share; nothing is read back.

        Args:
            ran: whether anything ran on this rank in this iteration.

        Returns:
            float32 [3]: whether slots are left for ``reduce_new``, the sum of non-finite counts, and whether anything ran
            on any rank. One collective, or none for a single rank.
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
        # Ranks send as much as they agreed on, and one number that tells whether somebody has more: sizes cannot differ.
        flags = [self.rows.new_full((1,), flag) for flag in (len(self.slots) > agreed, ran)]
        wire = torch.cat([self.rows[:, :agreed].reshape(-1), *flags])
        dist.all_reduce(wire, op=dist.ReduceOp.MAX, group=self.group)
        self.rows[:, :agreed] = wire[:-2].view(2, agreed)
        self.counts.amax_collectives += 1
        return torch.stack([wire[-2], self.rows[1].sum(), wire[-1]])

    @keeping_subnormals
    def reduce_new(self) -> float:
        """The same of the slots that came since ranks last agreed; the sum of non-finite counts of all slots.

        Collective: where ``reduce`` said that any rank has such.
        """
        agreed = self._agreed
        self.check_names()
        late = self.rows[:, agreed:].contiguous()
        dist.all_reduce(late, op=dist.ReduceOp.MAX, group=self.group)
        self.rows[:, agreed:] = late
        self.counts.amax_collectives += 1
        return float(self.rows[1].sum())

    @keeping_subnormals
    def update(self, iteration: int) -> None:
        """Scales and histories from the reduced rows (numerics: Delayed scaling), then clear the rows.

        An Inf amax changes nothing; a slot that was not cast keeps scale and history; the scale is recomputed every
        interval-th iteration, iteration 0 included.
        """
        self._trim()
        self.last_amax, self.last_nonfinite = self.rows[0].clone(), self.rows[1].clone()
        for (delayed, _), held in self._histories.items():
            self._update_delayed(delayed, held, iteration % delayed.interval == 0)
        self.rows.zero_()

    def capture_refusal(self) -> str | None:
        """Why an update could not be captured as part of a CUDA graph, None if it could."""
        cold = [slot.name for slot in self.slots if slot.delayed is not None and not slot.warm]
        if cold:
            return (
                f"{len(cold)} tensors have no delayed scale yet ({', '.join(cold[:3])}{', ...' if cold[3:] else ''}):"
                " train one iteration more without a graph, in which each of them is quantised"
            )
        if self.rows.shape[1] != len(self.slots) or (self.world_size > 1 and self._agreed != len(self.slots)):
            return "no iteration has been finished with all of its layers: train one without a graph"
        late = [delayed.interval for delayed, _ in self._histories if delayed.interval != 1]
        if late:
            return f"scales are due every {late[0]} iterations, which the host decides: set the interval to 1"
        return None

    def settle_unread(self) -> torch.Tensor:
        """``reduce`` and ``update`` with nothing read back, for a graph; float32 [], the sum of non-finite counts.

        Only where ``capture_refusal`` is None. A collective over the group, if that has more than one rank.
        """
        self._count_damage()
        if self.world_size > 1:
            dist.all_reduce(self.rows, op=dist.ReduceOp.MAX, group=self.group)
        self.update(0)
        return self.last_nonfinite.sum()

    def _update_delayed(self, delayed: DelayedScaling, held: History, due: bool) -> None:
        held.grow()
        if kernels.run_on(self.device):
            seen = self._update_in_one_launch(delayed, held, due)
            if due:
                held.warm_up(seen)
            return
        value = self.rows[0].index_select(0, held.index)
        value.masked_fill_(value.isinf(), 0)
        seen = value != 0
        held.rings.put(value)
        if due:
            amax = value if delayed.amax_compute_algo == "most_recent" else held.rings.largest()
            fresh = compute_scale(
                amax, held.slots[0].fmt, margin=delayed.margin, epsilon=delayed.amax_epsilon
            )
            kept = self.scale.index_select(0, held.index)
            self.scale.index_copy_(0, held.index, torch.where(seen, fresh, kept))
            held.warm_up(seen)
        held.rings.roll(seen)

    def _update_in_one_launch(self, delayed: DelayedScaling, held: History, due: bool) -> torch.Tensor:
        from ..kernels.multi_amax import update_delayed  # loads Triton

        return update_delayed(
            self.rows[0],
            self.scale,
            held.index,
            held.rings.head,
            held.rings.rows,
            held.rings.maxima,
            held.fp8_max,
            length=held.rings.length,
            margin=delayed.margin,
            epsilon=delayed.amax_epsilon,
            most_recent=delayed.amax_compute_algo == "most_recent",
            due=due,
        )
