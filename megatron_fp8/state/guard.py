"""The guard: finds tensors with several unhealthy iterations in a row.

The arena has the amax of each tensor, the scale of its casts, and its number of non-finite elements. They show three
faults:

    not finite   NaN or Inf was cast
    saturates    the amax is above the largest value that FP8 can represent at this scale, by a factor
    underflows   the amax is so far below it that most of FP8's range is unused: small values became zero

A margin puts every amax that many powers of two below the largest value, because the user requested the headroom. So
underflow is measured from there, and at most down to where the amax itself becomes zero.

Only delayed scaling can have the last two, since its scale comes from earlier iterations. Every other scale comes from
the tensor itself and puts its amax at the top of the range; the amax does not show small values that such a cast loses,
but telemetry does (underflows%). Rejected: counting underflows in every cast, also for users without the guard.

A tensor is unhealthy after the same fault in ``patience`` iterations in a row; an iteration in which it was not cast
does not count. All ranks of a reduction group see the same figures, so they find the same.

A site with an unhealthy tensor moves permanently to the next rung of the guard's ladder; the owner of the sites moves
it (mcore/iteration.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from .arena import Arena, Slot

Illness = Literal["not finite", "saturates", "underflows"]


@dataclass(frozen=True)
class Thresholds:
    """Limits beyond which the guard finds a tensor unhealthy.

    Args:
        patience: iterations in a row, at least 1.
        saturation: amax over the largest value that FP8 can represent at its scale, above 1.
        unused_bits: powers of two by which the amax may be below that value, beyond the recipe's margin; at least 1.
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
    """An unhealthy tensor.

    Attributes:
        slot: SITE.ROLE, or SITE.ROLE.GEMM.
        illness: the fault.
        iterations: how many in a row had it.
        figure: of this iteration: non-finite elements (the most of any rank), or amax over the largest value that FP8
            can represent at its scale.
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
    """A change of a site's precision by the guard.

    Attributes:
        site: its name.
        to: 'bf16', or the name of a recipe.
        iteration: the first one with the new precision, counted from 0.
        why: the finding as text.
    """

    site: str
    to: str
    iteration: int
    why: str


def saved_moves(state: Mapping[str, Any]) -> list[Move]:
    """Returns the moves in a checkpoint's state, one a site; none if it has no guard state."""
    return [Move(*move) for move in state.get("guard", [])]


def as_overrides(state: Mapping[str, Any]) -> dict[str, str]:
    """Returns the same moves as overrides by name, to run the model with the precision of its training."""
    return {move.site: move.to for move in saved_moves(state)}


LEFT = " (left)"
"""End of the names of slots whose site moved; a linear in BF16 counts NaN and Inf in them."""

LADDERS = {"bf16": ("bf16",), "ladder": ("delayed", "tensorwise", "blockwise", "bf16")}
"""Ladders of an unhealthy site: out of FP8 at once, or first to recipes with more recent scales."""


class Guard:
    """The guard of one model: how many iterations each tensor has been unhealthy, and which sites have moved.

    Args:
        ladder: a key of LADDERS.

    ``moves``: site -> its last move.
    """

    def __init__(self, thresholds: Thresholds, ladder: str = "bf16"):
        self.thresholds, self.ladder = thresholds, LADDERS[ladder]
        self.moves: dict[str, Move] = {}
        self._rows: dict[str, tuple[Illness, int]] = {}

    def is_set_as(self, other: Guard) -> bool:
        """Whether another guard has the same thresholds and ladder."""
        return (self.thresholds, self.ladder) == (other.thresholds, other.ladder)

    def next_rung(self, recipe: str, illness: Illness) -> str:
        """Returns a site's next recipe or 'bf16'. NaN and Inf lead out of FP8, since no scale helps against them."""
        if illness == "not finite" or recipe not in self.ladder:
            return "bf16"
        return self.ladder[self.ladder.index(recipe) + 1]

    def moved(self, move: Move) -> None:
        """Records a move and clears the counts of the site's tensors."""
        self.moves[move.site] = move
        self._rows = {name: row for name, row in self._rows.items() if not name.startswith(f"{move.site}.")}

    def rows(self) -> list[tuple[str, Illness, int]]:
        """Returns (tensor, illness, iterations in a row) of tensors that are unhealthy now, for a checkpoint."""
        return [(name, *row) for name, row in self._rows.items()]

    def load_rows(self, rows: Iterable[Sequence[Any]]) -> None:
        """Continues with the result of ``rows``, after the checkpoint's moves were applied."""
        self._rows = {name: (illness, count) for name, illness, count in rows}

    def look(self, arena: Arena) -> list[Finding]:
        """Returns the tensors that have been unhealthy for long enough.

        The arena's amaxes must be reduced and its scales not yet updated. One host sync, with three values a slot.
        """
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
