"""Pinned versions are those that the suite runs with, and each has a reason above it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

FILE = Path(__file__).parents[2] / "requirements" / "constraints.txt"


def blocks() -> Iterator[tuple[str, list[str]]]:
    """(comment, lines after it) of each paragraph but the first, which is of the file."""
    for block in FILE.read_text().split("\n\n")[1:]:
        lines = block.strip().splitlines()
        yield (
            " ".join(line for line in lines if line.startswith("#")),
            [line for line in lines if not line.startswith("#")],
        )


def test_each_has_a_reason():
    assert all(reason and pins for reason, pins in blocks())
    listed = [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]
    assert listed == [pin for _, pins in blocks() for pin in pins] and len(listed) > 20


@pytest.mark.parametrize("line", [pin for _, pins in blocks() for pin in pins])
def test_it_is_what_is_installed(line):
    wanted = Requirement(line)
    if wanted.marker is None or wanted.marker.evaluate():
        assert metadata.version(wanted.name) in wanted.specifier
