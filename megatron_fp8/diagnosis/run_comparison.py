"""The first difference of two runs on the same data: in loss, telemetry and checkpoints.

Within an iteration a difference spreads forward through the sites and back through their gradients. So in the
first iteration that differs, the first differing tensor in that order is the origin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..files.checkpoint import complete_checkpoints, read_metadata, read_tensor
from ..state.arena import is_slot_key
from ..telemetry.health import execution_place, forward_order
from ..telemetry.telemetry import FILE, NO_STATISTICS
from ..train.run_record import FolderNotKnown, RunRecord

Record = dict[str, Any]

_SAME_DATA = {
    "train": ("seed", "global_batch_size", "seq_length", "train_iters"),
    "data": ("paths", "split", "tokenizer"),
}
_STATE = ("optimizer.", "rng.")


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


def compare_runs(ours: Path, theirs: Path) -> tuple[list[str], dict[str, Any]]:
    """(lines for the user, the same as plain values). Raises ValueError if the runs cannot be compared."""
    _check_same_data(ours, theirs)
    report: dict[str, Any] = {"run": str(ours), "against": str(theirs)}
    lines = [
        *_losses(ours, theirs, report),
        *_telemetry(ours, theirs, report),
        *_checkpoints(ours, theirs, report),
        *(f"note        {text}" for path in (ours, theirs) for text in RunRecord(path).unfinished()),
    ]
    return lines, report


def _check_same_data(ours: Path, theirs: Path) -> None:
    for path in (ours, theirs):
        if not (path / "config.yaml").is_file():
            raise ValueError(
                f"{str(path)!r} is not a run's folder: it has no config.yaml. Give two folders of runs"
            )
    first, second = (RunRecord(path).config() for path in (ours, theirs))
    for section, names in _SAME_DATA.items():
        for name in names:
            a, b = (config.get(section, {}).get(name) for config in (first, second))
            if a != b:
                raise ValueError(
                    f"the runs did not read the same data: {section}.{name} is {a!r} in {str(ours)!r} and {b!r} in"
                    f" {str(theirs)!r}. Give two runs in which that is the same"
                )


def _losses(ours: Path, theirs: Path, report: dict[str, Any]) -> list[str]:
    """The first iteration whose losses differ. Raises ValueError if they have no iteration in common."""
    first, second = (
        {line.iteration(): line.content for line in RunRecord(path).metrics()} for path in (ours, theirs)
    )
    for path, rows in ((ours, first), (theirs, second)):
        if not rows:
            raise ValueError(
                f"{str(path)!r} has no losses to compare: metrics.jsonl is missing or empty. Give two runs that trained"
            )
    if not first.keys() & second.keys():
        raise ValueError(
            "the two runs' metrics.jsonl have no iteration in common: give two runs that trained the same iterations"
        )
    for iteration in sorted(first.keys() & second.keys()):
        a, b = (rows[iteration]["lm_loss"] for rows in (first, second))
        if a != b:
            report["loss"] = {"iteration": iteration, "values": [a, b]}
            return [f"loss        differs first in iteration {iteration}: {a} and {b}"]
    report["loss"] = None
    return [f"loss        the same in {len(first.keys() & second.keys())} iterations"]


def _telemetry(ours: Path, theirs: Path, report: dict[str, Any]) -> list[str]:
    """The first site and tensor with different statistics: at all, and by more than a twentieth."""
    first, second = ([line.content for line in RunRecord(path).telemetry()] for path in (ours, theirs))
    without = [str(path) for path, rows in ((ours, first), (theirs, second)) if not rows]
    if without:
        report["telemetry"] = None
        return [
            f"telemetry   {' and '.join(without)} has no {FILE}: train with --telemetry.every=K to see the site where"
            " they part"
        ]
    lines = []
    for name, tolerance, words in (("first", 0.0, "differs first"), ("large", 0.05, "differs by 5 % first")):
        found = first_divergence(first, second, tolerance)
        report[f"telemetry_{name}"] = None if found is None else vars(found)
        if found is None:
            measured = len(common_iterations(first, second))
            lines.append(
                f"telemetry   nothing {words.removesuffix(' first')} in {measured} measured iterations"
            )
        else:
            a, b = found.values
            lines.append(
                f"telemetry   {words} in iteration {found.iteration}, {found.site}, {found.tensor}:"
                f" {found.statistic} {a} and {b}"
            )
    grown = largest_of_weights(first, second, 0.05)
    report["telemetry_weight"] = None if grown is None else vars(grown)
    if grown is not None:
        a, b = grown.values
        lines.append(
            f"weights     one differs by 5 % first in iteration {grown.iteration}, most {grown.site}:"
            f" {grown.statistic} {a:.4g} and {b:.4g}"
        )
    return lines


def _checkpoints(ours: Path, theirs: Path, report: dict[str, Any]) -> list[str]:
    """The first common checkpoint with different weights, and the weight that differs most."""
    try:
        folders = [RunRecord(path).checkpoints() for path in (ours, theirs)]
    except FolderNotKnown as error:
        report["checkpoint"] = None
        return [f"checkpoint  not compared: {error}"]
    first, second = ({path.name: path for path in complete_checkpoints(folder)} for folder in folders)
    common = sorted(first.keys() & second.keys())
    for name in common:
        differences = _differences(first[name], second[name])
        if differences:
            most = max(differences, key=differences.__getitem__)
            report["checkpoint"] = {"name": name, "weight": most, "relative": differences[most]}
            return [
                f"checkpoint  {name} is the first whose weights differ: {len(differences)} tensors, most"
                f" {most}, by {100 * differences[most]:.3g} % of its norm"
            ]
    report["checkpoint"] = None
    if not common:
        return [f"checkpoint  none of the same iteration is in {folders[0]} and {folders[1]}"]
    return [f"checkpoint  the same weights in {', '.join(common)}"]


def _differences(ours: Path, theirs: Path) -> dict[str, float]:
    """Weight -> norm of the difference over its norm, if they differ. Raises ValueError for another model."""
    first, second = read_metadata(ours), read_metadata(theirs)
    result = {}
    for name, entry in first.state_dict_metadata.items():
        if name.startswith(_STATE) or is_slot_key(name):
            continue
        other = second.state_dict_metadata.get(name)
        if other is None or tuple(other.size) != tuple(entry.size):
            raise ValueError(
                f"{str(theirs)!r} is of another model: it has no {name} of shape {list(entry.size)}. Give two runs"
                " of one model"
            )
        a, b = (
            read_tensor(*checkpoint, name).to(torch.float64)
            for checkpoint in ((ours, first), (theirs, second))
        )
        if not torch.equal(a, b):
            norm = float(torch.linalg.vector_norm(a))
            difference = float(torch.linalg.vector_norm(a - b))
            result[name] = difference / norm if norm else relative_difference(norm, difference)
    return result


def first_divergence(ours: Sequence[Record], theirs: Sequence[Record], tolerance: float) -> Divergence | None:
    """The first record in both runs with a statistic that differs by more than ``tolerance``, relative; None
    if there is none.

    Statistics measured in one run only are ignored. Raises ValueError if the runs share none.
    """
    other = {_key(record): record for record in theirs}
    common = [record for record in ours if _key(record) in other]
    if not common:
        raise ValueError("the two runs' telemetry has no iteration, site and tensor in common")
    order = forward_order(dict.fromkeys(record["site"] for record in ours))
    for iteration in sorted({record["iteration"] for record in common}):
        here = [record for record in common if record["iteration"] == iteration]
        for record in sorted(here, key=lambda record: execution_place(record, order)):
            if found := _worst(record, other[_key(record)], tolerance):
                return found
    return None


def largest_of_weights(
    ours: Sequence[Record], theirs: Sequence[Record], tolerance: float
) -> Divergence | None:
    """The largest relative difference of weights' norms, in the first iteration that has one above ``tolerance``.

    Training is chaotic: once runs differ, activations and gradients soon differ everywhere, and weights' norms hardly.
    """
    first, second = ({_key(r): r for r in records if r["tensor"] == "weight"} for records in (ours, theirs))
    name = "l2_norm"
    found = [
        Divergence(*key, name, (a, b), relative)
        for key, record in first.items()
        if key in second
        and math.isfinite(a := _number(record.get(name)))
        and math.isfinite(b := _number(second[key].get(name)))
        and (relative := relative_difference(a, b)) > tolerance
    ]
    return min(found, key=lambda one: (one.iteration, -one.relative), default=None)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def common_iterations(ours: Iterable[Record], theirs: Iterable[Record]) -> list[int]:
    """Iterations with records of both runs."""
    return sorted({record["iteration"] for record in ours} & {record["iteration"] for record in theirs})


def _key(record: Record) -> tuple[Any, Any, Any]:
    return record["iteration"], record["site"], record["tensor"]


_SCALES = {"mean": "std", "min": "cur_amax", "max": "cur_amax"}
"""Statistic -> the one that its difference is relative to: a mean of zero changes by any factor."""
_NOISE = ("dynamic_range", "kurtosis", "max_blockwise_dynamic_range")
"""Statistics that one element can change by any factor: only a tolerance of 0 compares them."""


def _worst(ours: Record, theirs: Record, tolerance: float) -> Divergence | None:
    worst: Divergence | None = None
    for name, our_value in ours.items():
        if name in NO_STATISTICS or name not in theirs or (tolerance and name.startswith(_NOISE)):
            continue
        relative = relative_difference(our_value, theirs[name])
        if tolerance and 0 < relative < math.inf:
            relative = _of_its_scale(name, ours, theirs, relative)
        if relative > tolerance and (worst is None or relative > worst.relative):
            worst = Divergence(
                ours["iteration"], ours["site"], ours["tensor"], name, (our_value, theirs[name]), relative
            )
    return worst


def _of_its_scale(name: str, ours: Record, theirs: Record, relative: float) -> float:
    """The difference over the statistic's scale, if both records have it; of percentages in parts of all values."""
    if "%" in name:
        return abs(ours[name] - theirs[name]) / 100
    scale = _SCALES.get(name)
    values = [record.get(scale) for record in (ours, theirs)] if scale else []
    usable = [value for value in values if isinstance(value, (int, float)) and math.isfinite(value) and value]
    return abs(ours[name] - theirs[name]) / max(usable) if len(usable) == 2 else relative


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
