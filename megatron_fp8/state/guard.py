"""The guard: finds tensors with several unhealthy iterations in a row.

The arena has the largest magnitude of each tensor, the scale that its casts used, and how many of its elements were not
finite. That tells three illnesses:

    not finite   NaN or Inf was cast
    saturates    the amax lies beyond what the scale lets FP8 hold, by a factor: what is above became the largest value
    underflows   the amax lies so far below it that most of FP8's range goes unused: what is small became zero

A margin puts every amax that many powers of two below the largest value, because the user asked for the headroom. So
underflow counts from there, and no further down than where the amax itself becomes zero.

Only delayed scaling can have the last two, since its scale is made from earlier iterations: every other scale is made
from the tensor itself, and puts its amax at the top of the range. What such a recipe loses inside a tensor the amax
does not tell; telemetry does (underflows%). Rejected: counting underflows in every cast, for all who never switch the
guard on.

A tensor is ill when it showed the same illness in ``patience`` iterations in a row. One that was not cast in an
iteration is as ill as it was. All ranks of a reduction group see the same figures, so they find the same.

A site with an ill tensor moves for good to the next rung of the guard's ladder, by whoever owns the sites
(mcore/guard.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from .arena import Arena, Slot

Illness = Literal["not finite", "saturates", "underflows"]


@dataclass(frozen=True)
class Thresholds:
    """When a tensor is ill.

    Args:
        patience: iterations in a row, at least 1.
        saturation: amax over the largest value that the scale lets FP8 hold, above 1.
        unused_bits: binary orders of magnitude between the two, the other way, beyond the recipe's margin; at least 1.
            E4M3 has 18 from its largest to its smallest value, E5M2 has 32.

    Raises:
        ValueError: a threshold is out of range.
    """

    patience: int = 3
    saturation: float = 2.0
    unused_bits: int = 10

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"patience={self.patience} must be at least 1 iteration")
        if not 1 < self.saturation < float("inf"):
            raise ValueError(
                f"saturation={self.saturation} must be a number above 1: amax over what FP8 can hold"
            )
        if not 1 <= self.unused_bits <= 100:
            raise ValueError(
                f"unused_bits={self.unused_bits} must be from 1 to 100 binary orders of magnitude"
            )


class Finding(NamedTuple):
    """A tensor that is ill.

    Attributes:
        slot: SITE.ROLE, or SITE.ROLE.GEMM.
        illness: which.
        iterations: for how many in a row.
        figure: this iteration's: non-finite elements (the most of any rank), or amax over the largest value that its
            scale lets FP8 hold.
    """

    slot: str
    illness: Illness
    iterations: int
    figure: float

    def __str__(self) -> str:
        what = (
            f"{self.figure:.0f} elements"
            if self.illness == "not finite"
            else f"amax {self.figure:.3g} of FP8's range"
        )
        return f"{self.illness} for {self.iterations} iterations ({what})"


class Move(NamedTuple):
    """A site that runs in another way since the guard found it ill.

    Attributes:
        site: its name.
        to: 'bf16', or the name of a recipe.
        iteration: the first one that ran so, counted from 0.
        why: what was found, in words.
    """

    site: str
    to: str
    iteration: int
    why: str


def saved_moves(state: Mapping[str, Any]) -> list[Move]:
    """The moves in a checkpoint's numbers, one a site; none if it was saved without."""
    return [Move(*move) for move in state.get("guard", [])]


def as_overrides(state: Mapping[str, Any]) -> dict[str, str]:
    """The same as overrides by name, for what runs the model as training did."""
    return {move.site: move.to for move in saved_moves(state)}


LADDERS = {"bf16": ("bf16",), "ladder": ("delayed", "tensorwise", "blockwise", "bf16")}
"""Where ill sites may go: out of FP8 at once, or first to scales that follow more closely."""


class Guard:
    """What one model's guard remembers: how long each tensor has been ill, and which sites have moved.

    Args:
        ladder: a key of LADDERS.

    ``moves``: by site, the last of each.
    """

    def __init__(self, thresholds: Thresholds, ladder: str = "bf16"):
        self.thresholds, self.ladder = thresholds, LADDERS[ladder]
        self.moves: dict[str, Move] = {}
        self._rows: dict[str, tuple[Illness, int]] = {}

    def is_set_as(self, other: Guard) -> bool:
        """Whether another looks for the same and moves to the same."""
        return (self.thresholds, self.ladder) == (other.thresholds, other.ladder)

    def next_rung(self, recipe: str, illness: Illness) -> str:
        """Where a site goes from this recipe. No scale helps against NaN and Inf: out of FP8."""
        if illness == "not finite" or recipe not in self.ladder:
            return "bf16"
        return self.ladder[self.ladder.index(recipe) + 1]

    def moved(self, move: Move) -> None:
        """Take note of a move: what the site's tensors showed counts no more."""
        self.moves[move.site] = move
        self._rows = {name: row for name, row in self._rows.items() if not name.startswith(f"{move.site}.")}

    def look(self, arena: Arena) -> list[Finding]:
        """The tensors that have been ill for long enough, from an arena whose amaxes are reduced and whose scales are
        still those that were used. One value a slot is read back."""
        slots = arena.slots
        if not slots:
            return []
        amax, nonfinite = arena.rows[:, : len(slots)]
        largest = torch.tensor([s.fmt.max for s in slots], dtype=torch.float32, device=arena.device)
        used = torch.tensor(
            [s.delayed is not None and s.warm for s in slots], device=arena.device, dtype=torch.bool
        )
        share = torch.where(used & amax.isfinite(), amax * arena.scale[: len(slots)] / largest, 1.0)
        figures = torch.stack([amax, nonfinite, share]).tolist()
        found = []
        for slot, a, bad, part in zip(slots, *figures, strict=True):
            if a == 0 and not bad:
                continue  # not cast, or all zero
            illness = self._illness(slot, bad, part)
            if illness is None:
                self._rows.pop(slot.name, None)
                continue
            before, row = self._rows.get(slot.name, (illness, 0))
            row = row + 1 if before == illness else 1
            self._rows[slot.name] = (illness, row)
            if row >= self.thresholds.patience:
                found.append(Finding(slot.name, illness, row, bad if illness == "not finite" else part))
        return found

    def _illness(self, slot: Slot, nonfinite: float, share: float) -> Illness | None:
        if nonfinite:
            return "not finite"
        if share > self.thresholds.saturation:
            return "saturates"
        margin = 0 if slot.delayed is None else slot.delayed.margin
        unused = share < 2.0 ** -(self.thresholds.unused_bits + margin)
        all_zero = share <= slot.fmt.smallest / 2 / slot.fmt.max
        return "underflows" if unused or all_zero else None
