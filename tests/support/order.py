"""Which files of tests run first, and which tests `make test-quick` leaves to `make test`.

pytest-xdist hands out whole files in the order in which they were collected (`--dist loadfile --no-loadscope-reorder`):
the longest first, so that none is left for the end, when other processes have nothing to do. `--quick` leaves out the
slowest unit tests: one in a hundred takes two fifths of the time.

seconds.json has the files and the unit tests that take long, with what they took once; that they were measured on
another machine is of no matter. `make test ARGS=--write-seconds` writes it anew.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("seconds.json")
LONG_FILE_S = 3.0
"""Shorter files are not in the table; they go in the order of their names, after those that are."""
SLOW_TEST_S = 1.0
UNIT = "tests/unit/"


def file_of(nodeid: str) -> str:
    """The path of a test's file, relative to the root."""
    return nodeid.partition("::")[0]


def longest_first(items: list[pytest.Item]) -> None:
    """Sort in place, whole files; the order inside of each stays."""
    seconds = json.loads(TABLE.read_text())["files"]
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))


def leave_out_slow(items: list[pytest.Item]) -> list[pytest.Item]:
    """Take out of the list what the table says takes SLOW_TEST_S or longer; those that were."""
    slow = json.loads(TABLE.read_text())["tests"]
    left = [item for item in items if item.nodeid in slow]
    items[:] = [item for item in items if item.nodeid not in slow]
    return left


def seconds_by(key: Callable[[str], str], reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """What the tests of each key took, of their ids, with their fixtures; the longest first."""
    total: Counter[str] = Counter()
    for report in reports:
        total[key(report.nodeid)] += report.duration
    return dict(total.most_common())


def write_table(reports: Iterable[pytest.TestReport]) -> None:
    """Replace the rows of the files that ran; drop those of files that are gone."""
    ran = list(reports)
    files, tests = seconds_by(file_of, ran), seconds_by(str, [r for r in ran if r.nodeid.startswith(UNIT)])
    before = json.loads(TABLE.read_text())
    here = {file for file in map(file_of, [*before["files"], *before["tests"]]) if (ROOT / file).is_file()}
    kept = here - {*files}
    rows = {
        "files": _rows(before["files"], kept, files, LONG_FILE_S),
        "tests": _rows(before["tests"], kept, tests, SLOW_TEST_S),
    }
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")


def _rows(
    before: dict[str, float], kept: set[str], found: dict[str, float], least: float
) -> dict[str, float]:
    rows = {name: s for name, s in before.items() if file_of(name) in kept}
    rows |= {name: round(s, 1) for name, s in found.items() if s >= least}
    return dict(sorted(rows.items(), key=lambda row: -row[1]))
