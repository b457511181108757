"""Samples skipped after a loss spike.

    checkpoints/left_out.json    {"left_out": [{"first": 40, "last": 48, "iteration": 12, "went_back_to": 10,
                                                "why": "..."}, ...], "sha256": "..."}

Places in the order of samples, from `first` to before `last`. What is counted as consumed are the samples that are not
left out: so a run that leaves some out goes on, in every number, as one whose data never had them. The file is written
before training goes on, and lies beside the checkpoints, so that a run that resumes from one that is older than the spike
leaves them out too; checkpoints that are saved later hold them in their manifest. A digit that changes in it would train
on other samples, so it has a checksum, as manifests have theirs; earlier versions were the list alone, without one.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..files.disk import read_ordinary, refuse_link_out, replace_file
from ..files.manifest import checksum
from ..files.strict_json import load_json

FILE = "left_out.json"
_RECORDS, _LARGEST = "left_out", 1 << 24

Range = tuple[int, int]


def place(kept: int, ranges: Iterable[Range]) -> int:
    """Where in the order of all samples the one is that `kept` others of those not left out come before."""
    for first, last in sorted(ranges):
        if kept < first:
            break
        kept += last - first
    return kept


def read(folder: Path) -> list[dict[str, Any]]:
    """The records beside a folder's checkpoints; none if there is no file. ValueError: it cannot be read, or holds
    something else than was written. A list without a checksum is taken as it is, with a warning."""
    path = folder / FILE
    try:
        refuse_link_out(path)
        found = load_json(read_ordinary(path, _LARGEST))
        if isinstance(found, dict):
            if found.get("sha256") != checksum(found):
                raise ValueError("its checksum differs: it is not what was written")
            found = found.get(_RECORDS)
        else:
            warnings.warn(
                f"{str(path)!r} is of an earlier version, which had no checksum: it is taken as it is.",
                stacklevel=2,
            )
        _check(found)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} is no list of samples to leave out ({error}): bring it back, or remove it to read them all."
        ) from error
    return list(found)


def _check(records: Any) -> None:
    """ValueError unless these are records whose ranges lie one beside the other: one counted twice moves all samples."""
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError("it holds something else than a list of objects")
    for record in records:
        first, last = record.get("first"), record.get("last")
        if type(first) is not int or type(last) is not int or not 0 <= first < last:
            raise ValueError(f"no range of samples is from first={first!r} to before last={last!r}")
    ranges = sorted(ranges_of(records))
    for (_, end), (first, last) in itertools.pairwise(ranges):
        if first < end:
            raise ValueError(f"samples {first} to {min(end, last) - 1} are in it twice")


def write(folder: Path, records: Sequence[dict[str, Any]]) -> None:
    """Put these records beside the checkpoints. Raises OSError."""
    content = {_RECORDS: list(records)}
    replace_file(folder / FILE, json.dumps({**content, "sha256": checksum(content)}, indent=1) + "\n")


def together(folder: Path, saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is left out from a checkpoint on: what its manifest says (``saved``) and, as the file in its ``folder`` says,
    what was left out after it was saved. ValueError: as `read`, or they do not fit together."""
    found = {(record["first"], record["last"]): record for record in [*saved, *read(folder)]}
    records = [found[key] for key in sorted(found)]
    try:
        _check(records)
    except ValueError as error:
        raise ValueError(
            f"{str(folder / FILE)!r} and the checkpoint's manifest say different things ({error}): bring the file back,"
            " or remove it to leave out what the manifest says."
        ) from error
    return records


def ranges_of(records: Iterable[dict[str, Any]]) -> list[Range]:
    """Their ranges alone."""
    return [(record["first"], record["last"]) for record in records]
