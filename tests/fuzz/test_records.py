"""What a run left, changed by somebody: reports, comparisons and a resumed training read it or refuse it in one line."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import Phase, assume, given
from hypothesis import strategies as st

from tests.support.draws import draws
from tests.support.file_edits import MARKUP, byte_edits, edited, json_edited, json_edits
from tests.support.fuzz_targets import FIXTURES, fresh
from tests.support.run_in_process import done_or_refused

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


class Elements(HTMLParser):
    """The elements of a page that can load or run something, with their attributes, and all that react to events."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {name for name, _ in attrs}
        if (
            tag in ACTIVE
            or names & {"src", "srcdoc", "action"}
            or any(name.startswith("on") for name in names)
        ):
            self.found.append(f"{tag} {sorted(names)}")


ACTIVE = ("script", "iframe", "object", "embed", "base", "form", "link", "meta", "style")


@pytest.fixture(scope="module")
def own(originals, tmp_path_factory) -> list[str]:
    """Those of a page of what nobody changed."""
    page = tmp_path_factory.mktemp("page") / "page.html"
    assert done_or_refused("report", originals / "run", "--html", page).code == 0
    return Elements(page).found


QUICKLY = [Phase.reuse, Phase.generate]
"""A case that fails is not made smaller: pages take too long."""


@draws(8, often=2, suppress_health_check=[FIXTURES], phases=QUICKLY)
@given(st.sampled_from(FILES[:-1]), st.integers(0, 5), st.lists(st.integers(0, 999), min_size=1, max_size=20))
def test_no_text_of_a_record_is_markup(originals, own, place, name, number, places):
    """Names of keys too."""
    page = place / "page.html"
    fresh(place, originals, "run")
    path = place / "run" / name
    lines = path.read_text().splitlines(keepends=True) if path.suffix == ".jsonl" else [path.read_text()]
    assume(lines)
    line = lines[number % len(lines)]
    texts = list(re.finditer(r'"(?:[^"\\]|\\.)*"', line))
    assume(texts)
    for at in sorted({place % len(texts) for place in places}, reverse=True):
        start, end = texts[at].span()
        line = line[:start] + json.dumps(MARKUP) + line[end:]
    lines[number % len(lines)] = line
    path.write_text("".join(lines))
    if done_or_refused("report", "run", "--html", page).code == 0:
        assert Elements(page).found == own


@pytest.mark.parametrize("command", COMMANDS)
def test_a_whole_run_is_shown(originals, place, command):
    """Else these tests would show nothing."""
    fresh(place, originals, "run")
    (place / "other").symlink_to(originals / "run")
    assert done_or_refused(*command.split()).code == 0
