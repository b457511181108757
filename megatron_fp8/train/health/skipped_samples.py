"""Samples skipped after a loss spike.

    checkpoints/left_out.json    {"left_out": [{"first": 40, "last": 48, "iteration": 12, "went_back_to": 10,
                                                "why": "..."}, ...], "sha256": "..."}

Ranges are positions in the order of samples, from `first` to before `last`. Excluded samples do not count as consumed.
So a run that excludes some continues, in every number, like a run whose data never had them. The file is written before
training continues. It lies beside the checkpoints, so that a run which resumes from before the spike excludes the
samples too; later checkpoints store them in their manifest. One changed digit would select other samples, so the file
has a checksum like a manifest; earlier versions wrote only the list, without a checksum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...files.atomic_io import as_value_error, replace_file
from ...files.manifest import read_with_checksum, with_checksum
from ...files.strict_json import COUNT, check_shape
from ...files.terminal import warn_user

FILE = "left_out.json"
_RECORDS, _LARGEST = "left_out", 1 << 24

Range = tuple[int, int]


def sample_position(kept: int, ranges: Iterable[Range]) -> int:
    """Position among all samples of sample number `kept` (from 0) among those that are not excluded."""
    for first, last in sorted(ranges):
        if kept < first:
            break
        kept += last - first
    return kept


def read(folder: Path) -> list[dict[str, Any]]:
    """The records beside a folder's checkpoints; none if there is no file.

    Raises ValueError if the file cannot be read or its checksum differs. A list without a checksum is accepted, with a
    warning.
    """
    path = folder / FILE
    try:
        content = read_with_checksum(path, _LARGEST)
        if isinstance(content, dict):
            content = content.get(_RECORDS)
        else:
            warn_user(f"{str(path)!r} is of an earlier version, which had no checksum: it is used unchecked.")
        _check(content)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} is no list of samples to leave out ({error}): bring it back, or remove it to read them all."
        ) from error
    return list(content)


def _check(records: Any) -> None:
    """Raise ValueError unless these are records with disjoint ranges: a sample counted twice shifts all later ones."""
    check_shape(records, [{"first": COUNT, "last": COUNT}])
    ranges = sorted(ranges_of(records))
    for (_, end), (first, last) in itertools.pairwise([(0, 0), *ranges]):
        if first >= last:
            raise ValueError(f"no range of samples is from {first} to before {last}")
        if first < end:
            raise ValueError(f"samples {first} to {min(end, last) - 1} are in it twice")


def write(folder: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write these records beside the checkpoints. Raises OSError."""
    replace_file(folder / FILE, with_checksum({_RECORDS: list(records)}))


def merge_records(folder: Path, saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All excluded samples: those in a checkpoint's manifest (``saved``), and later ones from the file in ``folder``.

    Raises ValueError as `read`, or if the two contradict each other.
    """
    by_range = {(record["first"], record["last"]): record for record in [*saved, *read(folder)]}
    records = [by_range[key] for key in sorted(by_range)]
    with as_value_error(
        f"{str(folder / FILE)!r} and the checkpoint's manifest contradict each other",
        ": bring the file back, or remove it to leave out what the manifest says.",
        ValueError,
    ):
        _check(records)
    return records


def ranges_of(records: Iterable[dict[str, Any]]) -> list[Range]:
    """The ranges of the records."""
    return [(record["first"], record["last"]) for record in records]
