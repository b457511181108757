"""`megatron-fp8 diagnose A --against B`: the first difference between two runs on the same data."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from ..files.checkpoint import complete_checkpoints, read_metadata, read_tensor
from ..files.strict_json import spelled_out
from ..files.terminal import printable
from ..state.arena import is_slot_key
from ..telemetry.divergence import common_iterations, first_divergence, relative_difference
from ..telemetry.output import FILE
from ..train.run_record import PlaceNotKnown, RunRecord

_SAME_DATA = {
    "train": ("seed", "global_batch_size", "seq_length", "train_iters"),
    "data": ("paths", "split", "tokenizer"),
}
_DIAGNOSIS_OPTIONS = (
    *("iteration", "batches", "share", "budget", "out", "plot"),
    *("recipe", "fp8", "config"),
)
"""Options that do not apply to a comparison."""
_STATE = ("optimizer.", "rng.")


def compare(options: argparse.Namespace) -> None:
    """Print where the runs diverge, and write it to --json. Raises ValueError if they cannot be compared."""
    for name in _DIAGNOSIS_OPTIONS:
        if getattr(options, name) is not None:
            raise ValueError(f"--against compares two finished runs: leave out --{name}")
    first, second = (_run(Path(path)) for path in (options.checkpoint, options.against))
    _check_same_data(first, second)
    report: dict[str, Any] = {"run": str(first), "against": str(second)}
    lines = [
        *_losses(first, second, report),
        *_telemetry(first, second, report),
        *_checkpoints(first, second, report),
        *(f"note        {text}" for path in (first, second) for text in RunRecord(path).unfinished()),
    ]
    print(printable("\n".join(lines)), flush=True)
    if options.json:
        try:
            text = json.dumps(spelled_out(report), indent=1, allow_nan=False)
            Path(options.json).write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"{options.json!r} cannot be written ({error.strerror}): give another file"
            ) from error


def _run(path: Path) -> Path:
    if not (path / "config.yaml").is_file():
        raise ValueError(
            f"{str(path)!r} is not a run's folder: it has no config.yaml. Give two folders of runs"
        )
    return path


def _check_same_data(ours: Path, theirs: Path) -> None:
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
            return [f"loss        differs first in iteration {iteration}: {' and '.join(told_apart(a, b))}"]
    report["loss"] = None
    return [f"loss        the same in {len(first.keys() & second.keys())} iterations"]


def told_apart(a: Any, b: Any) -> tuple[str, str]:
    """Two numbers with four significant digits, or with more if needed to show a difference."""
    if not all(isinstance(value, (int, float)) for value in (a, b)):
        return str(a), str(b)
    for digits in range(4, 18):
        texts = f"{a:.{digits}g}", f"{b:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


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
        parting = first_divergence(first, second, tolerance)
        report[f"telemetry_{name}"] = None if parting is None else parting.as_dict()
        if parting is None:
            measured = len(common_iterations(first, second))
            lines.append(
                f"telemetry   nothing {words.removesuffix(' first')} in {measured} measured iterations"
            )
        else:
            a, b = told_apart(*parting.values)
            lines.append(
                f"telemetry   {words} in iteration {parting.iteration}, {parting.site}, {parting.tensor}:"
                f" {parting.statistic} {a} and {b}"
            )
    return lines


def _checkpoints(ours: Path, theirs: Path, report: dict[str, Any]) -> list[str]:
    """The first common checkpoint with different weights, and the weight that differs most."""
    try:
        folders = [RunRecord(path).checkpoints() for path in (ours, theirs)]
    except PlaceNotKnown as error:
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
