"""The suite itself: what a file leaves changed is named and put back, long files run first, draws repeat."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import core, given
from hypothesis import strategies as st

from megatron_fp8 import mcore
from megatron_fp8.mcore.patches.patching import PatchSet
from tests.support import draws, order
from tests.support.process_state import left_behind, state
from tests.support.shared_folder import made_once

TESTS = Path(__file__).parents[1]


ROOMS = {"megatron_fp8", "examples", "tests", "benchmarks", "docs", "requirements", ".ci"}
FILES = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "CITATION.cff", "MANIFEST.in"}
SETTINGS = {"Makefile", "setup.py", "pyproject.toml", "mkdocs.yml", ".gitignore"}


def test_nothing_lies_beside_the_rooms():
    """What a run in the checkout writes (`config_logger_dir: "null"` makes a folder of that name) is not committed."""
    listed = subprocess.run(["git", "ls-files"], cwd=TESTS.parent, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout: " + listed.stderr.strip())
    assert {line.partition("/")[0] for line in listed.stdout.splitlines()} == ROOMS | FILES | SETTINGS


def test_tests_lie_as_the_package_does():
    """A folder for each room with modules in it; beside them those of what is no package."""
    package = TESTS.parent / "megatron_fp8"
    rooms = {str(path.parent.relative_to(package)) for path in package.rglob("*.py")}
    tested = {str(path.parent.relative_to(TESTS / "unit")) for path in (TESTS / "unit").rglob("test_*.py")}
    assert tested - rooms == {"benchmarks", "benchmarks/support", "docs", "examples"}
    assert rooms - tested == {"mcore/te"}  # tests/functional/test_te_and_apex.py


# ---------------------------------------------------------------------------------------------------------- left behind


def test_what_is_left_is_named_and_put_back(monkeypatch, tmp_path):
    before, threads, folder = state(), torch.get_num_threads(), os.getcwd()
    monkeypatch.setattr(mcore, "_installed", PatchSet([]))
    monkeypatch.setenv("LEFT", "ham")
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(threads + 1)
    torch.set_float32_matmul_precision("high")
    said = left_behind(before)
    assert [line.partition(":")[0] for line in said] == [
        "megatron_fp8.mcore.install()",
        "environment variables",
        "working directory",
        "torch's default dtype",
        "torch's threads",
        "torch's float32 precision of products",
    ]
    assert said[1] == "environment variables: LEFT was None and is 'ham'"
    assert left_behind(before) == [] and not mcore.is_installed() and os.getcwd() == folder


# ------------------------------------------------------------------------------------------------------------ their order


def table_of(monkeypatch, tmp_path, **rows: dict[str, float]) -> None:
    monkeypatch.setattr(order, "TABLE", tmp_path / "seconds.json")
    order.TABLE.write_text(json.dumps({"files": {}, "tests": {}} | rows))


def test_the_longest_files_run_first_and_whole(monkeypatch, tmp_path):
    table_of(monkeypatch, tmp_path, files={"b.py": 4, "c.py": 90})
    items: list[Any] = [SimpleNamespace(nodeid=f"{name}.py::test_{n}") for name in "abcd" for n in (2, 1)]
    order.longest_first(items)
    assert "".join(item.nodeid[0] for item in items) == "ccbbaadd"
    assert [item.nodeid for item in items[:2]] == ["c.py::test_2", "c.py::test_1"]


def test_the_slow_ones_are_left_out_and_told(monkeypatch, tmp_path):
    table_of(monkeypatch, tmp_path, tests={"a.py::test_2": 4.0, "gone.py::test_1": 2.0})
    items: list[Any] = [SimpleNamespace(nodeid=f"a.py::test_{n}") for n in (3, 2, 1)]
    assert [item.nodeid for item in order.leave_out_slow(items)] == ["a.py::test_2"]
    assert [item.nodeid for item in items] == ["a.py::test_3", "a.py::test_1"]


def test_the_table_is_written_from_what_ran(monkeypatch, tmp_path):
    here = Path(__file__).relative_to(order.ROOT).as_posix()
    order_py = "tests/unit/test_import_order.py"
    table_of(
        monkeypatch,
        tmp_path,
        files={here: 50, "gone.py": 9, "tests/conftest.py": 7},
        tests={f"{here}::test_old": 9, f"{order_py}::test_1": 2.5, "gone.py::test_1": 2},
    )
    reports: list[Any] = [
        SimpleNamespace(nodeid=f"{here}::test_{n}", duration=s) for n, s in enumerate((0.9, 4.6))
    ]
    reports += [SimpleNamespace(nodeid="tests/functional/test_story.py::test_1", duration=2.0)]
    order.write_table(reports)
    assert json.loads(order.TABLE.read_text()) == {
        "files": {"tests/conftest.py": 7, here: 5.5},
        "tests": {f"{here}::test_1": 4.6, f"{order_py}::test_1": 2.5},
    }


# ------------------------------------------------------------------------------------------------------------- hypothesis


def test_every_test_that_draws_says_how_many():
    """By @draws, which keeps the draws of `make test` and makes new ones in `make test-long`."""
    found = 0
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                said = [ast.unparse(decorator) for decorator in node.decorator_list]
                if any(each.startswith("given(") for each in said):
                    found += 1
                    assert any(each.startswith(("draws(", "draws.draws(")) for each in said), (
                        f"{path}: {node.name}"
                    )
    assert found > 8


def drawn(often: int = 1) -> list[int]:
    found = []

    @draws.draws(5, often=often)
    @given(st.integers())
    def draw(number):
        found.append(number)

    draw()
    return found


def test_draws_are_the_same_in_each_run_but_for_the_long_ones_of_another_seed(monkeypatch):
    monkeypatch.setattr(core, "global_force_seed", None)
    assert drawn() == drawn() and len(drawn()) == len(drawn(often=2)) == 5
    monkeypatch.setattr(draws, "TIMES", 20)
    assert len(drawn()) == 100 and len(drawn(often=2)) == 200 and drawn() != drawn()
    of = {}
    for seed in (7, 8):
        monkeypatch.setattr(core, "global_force_seed", seed)  # --hypothesis-seed
        of[seed] = drawn()
        assert of[seed] == drawn()
    assert of[7] != of[8]


def test_the_seed_of_long_tests_is_said_and_can_be_given():
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", "--no-print-directory", "test-long", "SEED=1729"]
    said = subprocess.run(
        command, cwd=TESTS.parent, env=environ, capture_output=True, text=True, check=True
    ).stdout
    assert "--hypothesis-seed=1729" in said and "make test-long SEED=1729 draws them again" in said


# -------------------------------------------------------------------------------------------------------------- made once


def test_a_folder_is_made_once_and_again_after_a_failure(tmp_path_factory):
    made = []

    def make(folder: Path) -> None:
        made.append((folder / "half").exists())
        (folder / "half").touch()
        if len(made) == 1:
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        made_once(tmp_path_factory, "ham", make)
    folders = {made_once(tmp_path_factory, "ham", make) for _ in range(2)}
    assert made == [False, False] and len(folders) == 1
