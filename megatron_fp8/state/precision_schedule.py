"""Phases of a run in high precision: warm-up and the end (healing).

The plan says what a site runs; the phases say in which iterations it applies. The phase depends on the iteration
number alone, so it is right in a resumed run, a recomputation and an evaluation between two iterations without any
stored state. Rejected: a flag that the training loop sets, and has to save and restore.

Outside the FP8 phase every site runs in the model's own dtype, bit for bit as without FP8. A healing phase of parts
takes only these GEMMs out of FP8; the others cast as before, with the same codes. In either case delayed scaling still
records the amaxes of operands that nothing casts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["warm-up", "fp8", "healing"]


@dataclass(frozen=True)
class PrecisionSchedule:
    """The phases of one run; iterations count from 0.

    Attributes:
        warmup, healing: fractions of the run, at its start and its end, in high precision. Rounded to iterations; a
            fraction above 0 is at least one iteration.
        parts: what runs in high precision in the healing phase, as keys of overrides (``'*:fprop'``); (): everything.
        length: iterations of the whole run, None if not set yet. Required if a fraction is above 0.

    Raises ValueError: the length is no positive integer, or leaves no iteration to FP8.
    """

    warmup: float = 0.0
    healing: float = 0.0
    length: int | None = None
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        length = self.length
        if length is None:
            return
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"a training length of {length!r} iterations: it must be an integer above 0")
        if self.start >= self.stop:
            raise ValueError(
                f"fp8_high_precision_warmup={self.warmup:g} and fp8_high_precision_healing={self.healing:g} leave none of"
                f" {length} iterations to FP8: lower one of them, or train longer"
            )

    @property
    def trivial(self) -> bool:
        """Whether FP8 runs in every iteration."""
        return not (self.warmup or self.healing)

    @property
    def known(self) -> bool:
        """Whether ``at`` works: the length is set or not needed."""
        return self.trivial or self.length is not None

    @property
    def start(self) -> int:
        """The first iteration of the FP8 phase."""
        return self._iterations(self.warmup)

    @property
    def stop(self) -> int:
        """The first iteration after the FP8 phase, if there is a healing phase."""
        return self.require_length() - self._iterations(self.healing)

    def at(self, iteration: int) -> Phase:
        """Returns the phase of an iteration. ValueError if a fraction is above 0 and the length is not set."""
        if self.trivial:
            return "fp8"
        if iteration < self.start:
            return "warm-up"
        return "healing" if self.healing and iteration >= self.stop else "fp8"

    def casts_in(self, phase: Phase | None) -> bool:
        """Whether some site casts in this phase."""
        return phase == "fp8" or (phase == "healing" and bool(self.parts))

    def require_length(self) -> int:
        """Returns the length; ValueError if it is not set."""
        if self.length is None:
            raise ValueError(
                f"fp8_high_precision_warmup={self.warmup:g} and fp8_high_precision_healing={self.healing:g} are fractions"
                " of a training whose length is not set: call"
                " megatron_fp8.mcore.iteration.set_training_length(config, iterations) before the first iteration"
            )
        return self.length

    def describe(self, high_precision: str = "bf16", quantized: str = "fp8") -> list[dict[str, Any]]:
        """Returns [{phase, precision, first, last}, ...] for reports, iterations from 1; empty if FP8 runs in all of
        them. With ``parts`` the healing phase has their precision as well: {'parts': {'*:fprop': 'bf16'}}.

        Args:
            high_precision: the name of the model's own dtype.
            quantized: 'fp8' or 'fp4'.
        """
        if self.trivial:
            return []
        ends: list[tuple[Phase, str, int, int]] = [
            ("warm-up", high_precision, 0, self.start),
            ("fp8", quantized, self.start, self.stop),
            ("healing", quantized if self.parts else high_precision, self.stop, self.require_length()),
        ]
        return [
            {"phase": phase, "precision": precision, "first": first + 1, "last": last}
            | (
                {"parts": dict.fromkeys(self.parts, high_precision)}
                if self.parts and phase == "healing"
                else {}
            )
            for phase, precision, first, last in ends
            if first < last
        ]

    @staticmethod
    def precision_in_words(entry: Mapping[str, Any]) -> str:
        """Returns the precision of an entry of ``describe``: 'BF16', or 'FP4 with *:fprop in BF16'."""
        parts = [f"{part} in {precision.upper()}" for part, precision in entry.get("parts", {}).items()]
        return entry["precision"].upper() + (f" with {', '.join(parts)}" if parts else "")

    def _iterations(self, fraction: float) -> int:
        if not fraction:
            return 0
        return max(1, round(fraction * self.require_length()))
