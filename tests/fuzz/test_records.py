"""What a run left, changed by somebody: reports, comparisons and a resumed training read it or refuse it in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.draws import draws
from tests.support.edits import byte_edits, edited, json_edited, json_edits
from tests.support.heard import done_or_refused
from tests.support.victims import FIXTURES, fresh

FILES = ("report.json", "metrics.jsonl", "validation.jsonl", "telemetry.jsonl", "events.jsonl", "config.yaml")
COMMANDS = (
    "report run",
    "report run --html page.html",
    "report run --advice advice.json",
    "diagnose run --against other",
)


def change_line(path: Path, number: int, edits: list) -> None:
    """Edit the JSON of one line of a file, or of the whole of report.json."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    at = number % max(1, len(lines))
    lines[at : at + 1] = [json.dumps(json_edited(json.loads(line), edits)) for line in lines[at : at + 1]]
    path.write_text("\n".join([*lines, ""]))


@draws(4, often=2, suppress_health_check=[FIXTURES])
@given(st.sampled_from(FILES[:-1]), st.integers(0, 5), json_edits(), st.sampled_from(COMMANDS))
def test_other_values_in_a_record(originals, place, name, number, edits, command):
    fresh(place, originals, "run")
    if "other" in command:
        (place / "other").symlink_to(originals / "run")
    change_line(place / "run" / name, number, edits)
    done_or_refused(*command.split())


@draws(4, often=2, suppress_health_check=[FIXTURES])
@given(st.sampled_from(FILES), byte_edits(), st.sampled_from(COMMANDS))
def test_other_bytes_in_a_record(originals, place, name, edits, command):
    fresh(place, originals, "run")
    if "other" in command:
        (place / "other").symlink_to(originals / "run")
    path = place / "run" / name
    path.write_bytes(edited(path.read_bytes(), edits))
    done_or_refused(*command.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_whole_run_is_shown(originals, place, command):
    """Else these tests would show nothing."""
    fresh(place, originals, "run")
    (place / "other").symlink_to(originals / "run")
    assert done_or_refused(*command.split()).code == 0
