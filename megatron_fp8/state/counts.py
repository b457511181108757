"""What an iteration did, counted on this rank."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class IterationCounts:
    """What one iteration did on this rank. ``nonfinite`` sums the slots' counts after the reduction."""

    fp8_gemms: int = 0
    hp_gemms: int = 0
    casts: int = 0
    amax_collectives: int = 0
    scaling_collectives: int = 0
    nonfinite: int = 0

    def __bool__(self) -> bool:
        """Whether anything was counted."""
        return any(vars(self).values())

    def since(self, before: IterationCounts) -> IterationCounts:
        """Returns these counts minus the earlier ones."""
        return IterationCounts(**{name: value - vars(before)[name] for name, value in vars(self).items()})

    def add(self, other: IterationCounts) -> None:
        """Count what the other has, too."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
