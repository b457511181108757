"""Which files of tests run first: the longest, so that none is left for the end, when other processes have nothing to do.

pytest-xdist hands out whole files in the order in which they were collected (`--dist loadfile --no-loadscope-reorder`).
seconds.json has the files that take long, with what they took once; that they were measured on another machine is of
no matter. `make test ARGS=--write-seconds` writes it anew.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("seconds.json")
LONG_S = 3.0
"""Shorter files are not in the table; they go in the order of their names, after those that are."""


def file_of(nodeid: str) -> str:
    """The path of a test's file, relative to the root."""
    return nodeid.partition("::")[0]


def longest_first(items: list[pytest.Item]) -> None:
    """Sort in place, whole files; the order inside of each stays."""
    seconds = json.loads(TABLE.read_text())
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))


def seconds_by_file(reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """What each file took, with its fixtures; the longest first."""
    total: Counter[str] = Counter()
    for report in reports:
        total[file_of(report.nodeid)] += report.duration
    return dict(total.most_common())


def write_table(found: dict[str, float]) -> None:
    """Replace the rows of the files that ran; drop those of files that are gone."""
    kept = {file: s for file, s in json.loads(TABLE.read_text()).items() if (ROOT / file).is_file()}
    long = {file: s for file, s in (kept | found).items() if s >= LONG_S}
    rows = sorted(long.items(), key=lambda row: -row[1])
    TABLE.write_text("{\n" + ",\n".join(f'  "{file}": {s:.0f}' for file, s in rows) + "\n}\n")
