"""Finds the first difference of two runs' records: iteration, site, tensor.

Within an iteration a difference spreads forward through the sites and back through their gradients. So in the
first iteration that differs, the first differing tensor in that order is the origin. Records are in the order
in which the model created its modules. This is the order of computation except for Megatron-Core's attention,
which creates ``linear_proj`` before the layers that feed it. For other models the module order is assumed to
be the order of computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]

_FORWARD = ("input", "weight", "output")
_BACKWARD = ("grad_output", "dgrad", "wgrad")
_NO_STATISTICS = ("iteration", "site", "tensor", "partial", "went_bad")


@dataclass(frozen=True)
class Divergence:
    """The first difference: statistic, tensor, iteration, and the two values.

    ``relative``: difference over the larger magnitude; infinite if only one value is a number.
    """

    iteration: int
    site: str
    tensor: str
    statistic: str
    values: tuple[Any, Any]
    relative: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**vars(self), "relative": self.relative if math.isfinite(self.relative) else None}


def first_divergence(ours: Sequence[Record], theirs: Sequence[Record], tolerance: float) -> Divergence | None:
    """The first record in both runs with a statistic that differs by more than ``tolerance``, relative; None
    if there is none.

    Statistics measured in one run only are ignored. Raises ValueError if the runs share none.
    """
    other = {_key(record): record for record in theirs}
    common = [record for record in ours if _key(record) in other]
    if not common:
        raise ValueError("the two runs' telemetry has no iteration, site and tensor in common")
    order = _forward_order(dict.fromkeys(record["site"] for record in ours))
    for iteration in sorted({record["iteration"] for record in common}):
        here = [record for record in common if record["iteration"] == iteration]
        for record in sorted(here, key=lambda record: _order_key(record, order)):
            if found := _worst(record, other[_key(record)], tolerance):
                return found
    return None


def common_iterations(ours: Iterable[Record], theirs: Iterable[Record]) -> list[int]:
    """Iterations with records of both runs."""
    return sorted({record["iteration"] for record in ours} & {record["iteration"] for record in theirs})


def _key(record: Record) -> tuple[Any, Any, Any]:
    return record["iteration"], record["site"], record["tensor"]


def _order_key(record: Record, order: dict[str, int]) -> tuple[int, int, int]:
    """Sort key of its position in the iteration: forward, then backward in reverse."""
    tensor, place = record["tensor"].partition(".")[0], order[record["site"]]
    if tensor in _FORWARD:
        return 0, place, _FORWARD.index(tensor)
    return 1, -place, _BACKWARD.index(tensor) if tensor in _BACKWARD else len(_BACKWARD)


def _forward_order(sites: Iterable[str]) -> dict[str, int]:
    """Site -> position in the forward pass, for sites in module order."""
    found = list(sites)
    last = {name.rpartition(".")[0]: place for place, name in enumerate(found)}

    def when(place: int) -> tuple[int, bool]:
        module, _, name = found[place].rpartition(".")
        projects = name == "linear_proj"
        return (last[module] if projects else place), projects

    return {found[place]: number for number, place in enumerate(sorted(range(len(found)), key=when))}


def _worst(ours: Record, theirs: Record, tolerance: float) -> Divergence | None:
    worst: Divergence | None = None
    for name, our_value in ours.items():
        if name in _NO_STATISTICS or name not in theirs:
            continue
        relative = relative_difference(our_value, theirs[name])
        if relative > tolerance and (worst is None or relative > worst.relative):
            worst = Divergence(
                ours["iteration"], ours["site"], ours["tensor"], name, (our_value, theirs[name]), relative
            )
    return worst


def relative_difference(a: Any, b: Any) -> float:
    """|a - b| over the larger magnitude. 0 for equal values, including NaN and None; infinite if only one is finite."""
    numbers = [float("nan") if value is None else float(value) for value in (a, b)]
    finite = [math.isfinite(number) for number in numbers]
    if not any(finite):
        return 0.0 if str(numbers[0]) == str(numbers[1]) else math.inf
    if not all(finite):
        return math.inf
    largest = max(map(abs, numbers))
    return abs(numbers[0] - numbers[1]) / largest if largest else 0.0
