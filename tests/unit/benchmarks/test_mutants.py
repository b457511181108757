"""benchmarks/mutants.py: which faults it makes of which code, and that a draw is repeated."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import mutants


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("a < b", {"a <= b"}),
        ("a is not None", {"a is None"}),
        ("a + 1", {"a - 1", "2"}),
        ("a and b", {"(a) or (b)"}),
        ("not a", {"(a)"}),
        ("True", {"False"}),
        ("a if b else c", {"c if b else a"}),
        ("'text'", set()),
    ],
)
def test_what_becomes_of_an_expression(line: str, becomes: set[str]) -> None:
    assert {after for _, after in mutants.changes(ast.parse(line), line)} == becomes


def test_asserts_and_annotations_stay() -> None:
    source = "def f(x: Literal[1]) -> Literal[2]:\n    assert x < 1\n"
    assert list(mutants.changes(ast.parse(source), source)) == []


def test_a_draw_is_the_same_again_and_each_is_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one room, since each draw reads all files."""
    monkeypatch.setattr(mutants, "PACKAGE", mutants.PACKAGE / "numerics")
    drawn = mutants.draw(20, 3)
    assert drawn == mutants.draw(20, 3) != mutants.draw(20, 4)
    for one in drawn:
        lines = (mutants.ROOT / str(one["file"])).read_text().splitlines()
        assert lines[int(one["line"]) - 1] == one["before"] != one["after"]
        lines[int(one["line"]) - 1] = str(one["after"])
        ast.parse("\n".join(lines))
        assert mutants.tests_of(str(one["file"]))


@pytest.mark.parametrize(("code", "outcome"), [(0, "missed"), (1, "caught")])
def test_a_file_is_put_back(tmp_path: Path, code: int, outcome: str) -> None:
    file = tmp_path / "megatron_fp8" / "room.py"
    file.parent.mkdir()
    file.write_text("a = 1\nb = a < 2\n")
    mutant: dict[str, str | int] = {
        "file": "megatron_fp8/room.py",
        "line": 2,
        "before": "b = a < 2",
        "after": "b = a <= 2",
    }
    found = []

    def run(*_: object, **__: object) -> mock.Mock:
        found.append(file.read_text())
        return mock.Mock(returncode=code)

    with (
        mock.patch.object(mutants, "ROOT", tmp_path),
        mock.patch.object(mutants, "tests_of", lambda _: ["tests/unit"]),
        mock.patch.object(mutants.subprocess, "run", run),
    ):
        assert mutants.outcome(mutant) == outcome
    assert found == ["a = 1\nb = a <= 2\n"] and file.read_text() == "a = 1\nb = a < 2\n"


def test_recorded_mutants_are_found_where_their_lines_are_now(tmp_path: Path) -> None:
    (tmp_path / "room.py").write_text("b = a < 2\n" + 8 * "a = 1\n" + "b = a < 2\n")
    mutant = {"file": "room.py", "line": 8, "before": "b = a < 2", "after": "b = a <= 2", "outcome": "missed"}
    record = tmp_path / "mutants.json"
    record.write_text(json.dumps({"mutants": [mutant]}))
    with mock.patch.object(mutants, "ROOT", tmp_path), mock.patch.object(mutants, "RESULT", record):
        (found,) = mutants.recorded()
        assert found["line"] == 10 and "outcome" not in found
        (tmp_path / "room.py").write_text("a = 1\n")
        with pytest.raises(SystemExit, match=r"room\.py has no line 'b = a < 2' any more"):
            mutants.recorded()
