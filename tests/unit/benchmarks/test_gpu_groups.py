"""A GPU run's processes: order, time boxes, checks that die, hang or raise, results on disk, and how a run is resumed."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import gpu_command, gpu_groups, gpu_plan
from benchmarks.gpu_groups import Run
from benchmarks.gpu_plan import Group
from benchmarks.gpu_records import Records, selected

HERE = {
    "device": "a GPU",
    "dry": True,
    "versions": {"torch": "2.13"},
    "python": "3.11",
    "commit": "c",
    "date": "d",
}
COMMAND = (sys.executable, "-m", "tests.support.gpu_check_stub")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def records(folder: Path, source: str = "1") -> Records:
    made = Records(folder, "results", "Title", HERE | {"source": source})
    made.write()
    return made


def group(name: str, *checks: str, seconds: float = 30, each: float = 20) -> Group:
    return Group(name, "stand-in", checks, seconds, each)


def run(
    found: Records, *groups: Group, seconds: float = 60, names: set[str] | None = None
) -> dict[str, dict]:
    """Results by check, as they are on disk."""
    names = names or {check for g in groups for check in g.checks}
    Run(found, seconds, True, start=20, least=0.2, command=COMMAND).groups(
        gpu_command.to_do(groups, names, found)
    )
    read = json.loads((found.folder / "results.json").read_text())
    return {result["check"]: result for result in read["results"]}


def ran(folder: Path) -> list[str]:
    return [line.rsplit(" in ", 1)[0] for line in (folder / "ran").read_text().splitlines()]


def test_a_check_that_dies_hangs_or_raises_costs_itself_only(folder: Path):
    names = ("passes", "aborts", "passes after", "killed", "hangs", "raises", "fails", "elsewhere", "disk")
    found = run(records(folder), group("first", *names, each=2), group("second", "passes again"))
    assert list(found) == [*names, "passes again"], "in order"
    assert ran(folder) == list(found), "each once"
    verdicts = {name: result["verdict"] for name, result in found.items()}
    failed = {"aborts", "killed", "hangs", "raises", "fails"}
    assert {name for name, verdict in verdicts.items() if verdict == "FAIL"} == failed
    assert (verdicts["elsewhere"], found["elsewhere"]["detail"]) == ("not run", "needs another GPU")
    first = {name: found[name]["detail"].splitlines()[0] for name in failed}
    assert first == {
        "aborts": "its process ended with SIGABRT",
        "killed": "its process ended with SIGKILL",
        "hangs": "no end within 2 s",
        "raises": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "fails": "1 is not 2",
    }
    assert "terminate called" in found["aborts"]["detail"] and "in aborts" in found["aborts"]["detail"]
    assert 'gpu_check_stub.py", line' in found["hangs"]["detail"], "where it hung"
    processes = {line.rsplit(" ", 1)[1] for line in (folder / "ran").read_text().splitlines()}
    assert len(processes) == 6, "one for each group, and a new one after each that died, hung or raised"
    seen = found["disk"]["detail"]
    assert "passes PASS, aborts FAIL" in seen and "disk not run, passes again not run" in seen
    kept = json.loads((folder / "results.json").read_text())["processes"]
    assert [p["ended"] for p in kept].count("exit code 0") == 3
    (aborted,) = [p for p in kept if p["ended"] == "SIGABRT"]
    assert "terminate called" in aborted["output"]
    text = (folder / "results.md").read_text()
    assert "4 PASS, 5 FAIL, 1 not run: aborts, killed, hangs, raises, fails failed" in text
    assert "The process of first ended with SIGABRT" in text


def test_time_boxes(folder: Path, capsys: pytest.CaptureFixture[str]):
    found = run(
        records(folder),
        group("first", "passes 1", "hangs", "passes 2", seconds=2),
        group("second", "passes 3"),
    )
    for name in ("hangs", "passes 2"):
        assert (found[name]["verdict"], found[name]["detail"]) == (
            "not run",
            "the 2 s of its group were over",
        ), name
    assert found["passes 3"]["verdict"] == "PASS", "the next group has its own box"
    found = run(
        records(folder), group("first", "passes 1", "hangs"), group("second", "passes 3"), seconds=1.5
    )
    for name in ("hangs", "passes 3"):
        assert found[name]["detail"] == "the run's 0.025 minutes were over", name
        assert found[name]["verdict"] == "not run"
    assert "not run  passes 3" in capsys.readouterr().out


def test_a_process_that_cannot_start_names_its_checks(folder: Path):
    broken = replace(group("broken", "passes 1", "passes 2"), module="broken")
    without = replace(group("training", "passes 3"), megatron=True)
    with mock.patch.object(gpu_plan, "installed", return_value=False):
        found = run(records(folder), broken, without, group("second", "passes 4"))
    for name in ("passes 1", "passes 2"):
        assert found[name]["verdict"] == "not run"
        assert found[name]["detail"] == "its process ended with exit code 1 before it began: no such GPU"
    assert found["passes 3"]["detail"].startswith("megatron-core==0.16.1 is not installed (make gpu-wheels")
    assert found["passes 4"]["verdict"] == "PASS"


def test_resume(folder: Path):
    groups = (group("first", "passes", "fails", "elsewhere"), group("second", "passes 2", "passes 3"))
    run(records(folder), *groups, names={"passes", "fails", "elsewhere", "passes 2"})
    again = records(folder / "other")
    again.folder = folder
    again.environment["source"] = "2"
    again.resume()
    (folder / "ran").unlink()
    found = run(again, *groups)
    assert ran(folder) == ["passes 3", "fails"], (
        "what was not run, then what failed; what passed or is final is kept"
    )
    assert {name: result["source"] for name, result in found.items()} == {
        "passes": "1", "fails": "2", "elsewhere": "1", "passes 2": "1", "passes 3": "2",
    }  # fmt: skip
    assert "Of earlier code: passes, elsewhere, passes 2." in (folder / "results.md").read_text()
    again.environment["versions"] = {"torch": "2.13", "transformer-engine": "2.9"}
    again.resume()
    (folder / "ran").unlink()
    run(again, *groups)
    assert ran(folder) == ["elsewhere", "fails"], "what did not apply may do so where more is installed"
    again.environment["versions"] = {"torch": "2.11"}
    with pytest.raises(
        ValueError, match=r"is of a GPU.*torch 2\.13.*; this is .*torch 2\.11.*leave out --resume"
    ):
        again.resume()
    (folder / "results.json").write_text('{"results": 3')
    with pytest.raises(ValueError, match=r"cannot be gone on with .*leave out --resume"):
        again.resume()


def test_a_process_that_does_not_end_is_ended(folder: Path):
    lingers = Run(records(folder), 60, True, start=20, stop=0.3, least=0.2, command=COMMAND)
    lingers.groups([(group("first", "lingers"), ("lingers",))])
    (process,) = lingers.records.processes
    assert process["ended"] == "SIGKILL, from outside" and process["seconds"] < 20
    assert lingers.records.results["lingers"]["verdict"] == "PASS"


def test_rows_of_a_process_that_dies_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """With the GPU's clocks just after they were measured."""
    monkeypatch.setattr(gpu_groups, "power_state", lambda: {"clocks.sm": "1980 MHz"})
    made = records(folder)
    Run(made, 60, least=0.2, command=COMMAND).groups([(group("bench first", "rows"), ("rows",))])
    found = made.results["rows"]
    assert found["verdict"] == "FAIL" and found["detail"].startswith("its process ended with exit code 4")
    (row,) = found["rows"]
    assert row["rate"] == "told again"
    text = (folder / "results.md").read_text()
    assert "1e+03 ms ± 0%" in text and "After bench first: clocks.sm 1980 MHz." in text


def test_an_interrupted_run_ends_its_process(folder: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(gpu_command, "Run", partial(Run, command=COMMAND))
    groups = [group("first", "passes", "hangs"), group("second", "passes 2")]
    threading.Thread(target=terminate_while, args=(folder, "hangs"), daemon=True).start()
    assert gpu_command.main("results", "Title", "", groups, ["--dry-run", "--out", str(folder)]) == 1
    found = json.loads((folder / "results.json").read_text())["results"]
    assert [(r["verdict"], r["detail"]) for r in found] == [
        ("PASS", "right"), ("not run", "the run was ended while it ran"), ("not run", "not reached"),
    ]  # fmt: skip
    assert "interrupted" in capsys.readouterr().err
    pid = int((folder / "ran").read_text().split()[-1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def terminate_while(folder: Path, check: str) -> None:
    """SIGTERM to this process once a stand-in's check runs, and the results on disk say so."""
    running = f'"check": "{check}",\n   "group": "first",\n   "verdict": "not run",\n   "detail": "the run was ended'
    while not (folder / "ran").exists() or running not in (folder / "results.json").read_text():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)


def test_what_is_selected():
    names = ("gemm mxfp8", "graph mxfp8", "bench gemm")
    assert selected(names, "gemm") == {"gemm mxfp8", "bench gemm"}
    assert selected(names, "graph,bench") == {"graph mxfp8", "bench gemm"}
    assert selected(names, "") == set(names)
    with pytest.raises(ValueError, match="no check has 'gem8' in its name: there are gemm mxfp8"):
        selected(names, "gem8,gemm")


def test_the_plan_has_every_check():
    """In the order of a first half hour, and no module has a check that no plan runs."""
    assert [g.name for g in gpu_plan.CHECK] == [
        "variants", "digests", "codes", "gemm", "added products", "own product", "mx scales", "no waiting",
        "bench roofline", "bench gemm", "bench quantise", "gradients", "experts", "grouped product", "graph",
        "captured step", "update", "masters", "attention", "training", "graph training", "fused", "compiled", "te linear",
        "training te", "sanitiser",
    ]  # fmt: skip
    planned: dict[str, set[str]] = {}
    for each in (*gpu_plan.CHECK, *gpu_plan.BENCH):
        planned.setdefault(each.module, set()).update(each.checks)
        assert 0 < each.each <= each.seconds
    for module, checks in planned.items():
        assert set(importlib.import_module(module).checks()) == checks, module
