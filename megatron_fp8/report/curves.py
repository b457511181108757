"""Curves of a run over iterations (loss, gradient norm, speed, memory) and its events.

Events are skipped steps, starts, saves and actions of the guard. events.jsonl has an object for each start from
a checkpoint and for each save: {"iteration", "event", "text"}. Skipped steps are in metrics.jsonl, the guard's
actions in report.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files.records import Line

_POINTS = 4000
"""Most points per curve, above the width of a screen. Longer curves show extremes of neighbouring iterations."""


@dataclass(frozen=True)
class Quantity:
    """A quantity plotted over iterations.

    Attributes:
        name: its field in metrics.jsonl or validation.jsonl.
        title, unit: labels.
        log: use a logarithmic axis.
        scale: factor from the field to ``unit``.
    """

    name: str
    title: str
    unit: str
    log: bool = False
    scale: float = 1.0


QUANTITIES = (
    Quantity("lm_loss", "Loss", "nats per token"),
    Quantity("grad_norm", "Gradient norm", "before clipping", log=True),
    Quantity("tokens_per_s", "Speed", "tokens/s"),
    Quantity("peak_memory", "Peak memory", "MiB", scale=2.0**-20),
    Quantity("learning_rate", "Learning rate", ""),
    Quantity("loss_scale", "Loss scale", "FP16", log=True),
    Quantity("mtp_loss", "Loss of multi-token prediction", "nats per token"),
    Quantity("nonfinite", "NaN and Inf in casts", "values"),
)
VALIDATION = Quantity("validation_loss", "Validation loss", "nats per token")


@dataclass(frozen=True)
class Curve:
    """Values over increasing iterations.

    Attributes:
        iterations: int64 [n].
        values: float64 [n], in the quantity's unit; NaN if there is no number.
        gaps: (first iteration, last iteration, text): ranges of NaN, Infinity or null.
    """

    iterations: NDArray[np.int64]
    values: NDArray[np.float64]
    gaps: tuple[tuple[int, int, str], ...]

    @property
    def finite(self) -> NDArray[np.float64]:
        """The finite values, in order."""
        return self.values[np.isfinite(self.values)]

    def thinned(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """At most _POINTS points: the smallest and the largest value of each interval."""
        count = len(self.values)
        if count <= _POINTS:
            return self.iterations, self.values
        stretches = np.array_split(np.arange(count), _POINTS // 2)
        low = [part[np.argmin(np.nan_to_num(self.values[part], nan=np.inf))] for part in stretches]
        high = [part[np.argmax(np.nan_to_num(self.values[part], nan=-np.inf))] for part in stretches]
        selected = np.unique([low, high])
        return self.iterations[selected], self.values[selected]


def read_curves(lines: Iterable[Line], quantities: Iterable[Quantity]) -> dict[str, Curve]:
    """Quantity name -> curve, from a file's lines. If an iteration occurs twice, the last counts.

    Omits quantities that are missing or null in every line. Raises ValueError.
    """
    quantities = tuple(quantities)
    found: dict[str, dict[int, float | None]] = {quantity.name: {} for quantity in quantities}
    for line in lines:
        iteration = line.iteration()
        for name, values in found.items():
            if name in line.content:
                values[iteration] = line.number_of(name)
    return {
        quantity.name: _curve(found[quantity.name], quantity.scale)
        for quantity in quantities
        if any(value is not None for value in found[quantity.name].values())
    }


def _curve(found: dict[int, float | None], scale: float) -> Curve:
    iterations = sorted(found)
    values = (
        np.array([np.nan if found[i] is None else found[i] for i in iterations], dtype=np.float64) * scale
    )
    return Curve(
        np.array(iterations, dtype=np.int64), np.where(np.isfinite(values), values, np.nan), _gaps(found)
    )


def _gaps(found: dict[int, float | None]) -> tuple[tuple[int, int, str], ...]:
    gaps: list[tuple[int, int, str]] = []
    before = None
    for iteration in sorted(found):
        word = nonfinite_text(found[iteration])
        if word is not None and gaps and before == gaps[-1][1] and gaps[-1][2] == word:
            gaps[-1] = (gaps[-1][0], iteration, word)
        elif word is not None:
            gaps.append((iteration, iteration, word))
        before = iteration
    return tuple(gaps)


def nonfinite_text(value: float | None) -> str | None:
    """'null', 'NaN', 'Infinity' or '-Infinity'; None for a number."""
    if value is None:
        return "null"
    if np.isnan(value):
        return "NaN"
    return None if np.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


@dataclass(frozen=True)
class Event:
    """An event in the iterations ``first`` to ``last``. ``kind``: one word; ``text``: a description."""

    first: int
    last: int
    kind: str
    text: str


def skipped_steps(lines: Iterable[Line]) -> list[Event]:
    """One event per range of consecutive skipped steps. Raises ValueError for an invalid line."""
    found: list[Event] = []
    counts: dict[int, float] = {}
    for line in lines:
        if "skipped" in line.content and line.number_of("skipped"):
            counts[line.iteration()] = line.number_of("nonfinite") or 0 if "nonfinite" in line.content else 0
        else:
            counts.pop(line.iteration(), None)
    stretches: list[list[int]] = []
    for iteration in sorted(counts):
        if stretches and stretches[-1][-1] == iteration - 1:
            stretches[-1].append(iteration)
        else:
            stretches.append([iteration])
    for stretch in stretches:
        values = sum(counts[i] for i in stretch)
        text = "step skipped" if len(stretch) == 1 else f"{len(stretch)} steps skipped"
        text += f"; FP8 casts met {values:,.0f} values that were NaN or infinite" if values else ""
        found.append(Event(stretch[0], stretch[-1], "skip", text))
    return found


def recorded_events(lines: Iterable[Line]) -> list[Event]:
    """The events of events.jsonl. Raises ValueError."""
    return [
        Event(line.iteration(), line.iteration(), line.text("event"), line.text("text")) for line in lines
    ]


def guard_moves(report: Mapping[str, Any], path: str) -> list[Event]:
    """Sites that the guard moved to another precision, from report.json (iterations from 0). Raises ValueError if
    invalid."""
    try:
        return [
            Event(
                move["iteration"] + 1,
                move["iteration"] + 1,
                "guard",
                f"{move['site']} to {move['to']}: {move['why']}",
            )
            for move in report.get("guard", ())
        ]
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{path!r} is no run's report: the guard's moves cannot be understood ({error!r})."
        ) from error
