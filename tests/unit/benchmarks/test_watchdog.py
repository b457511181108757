"""The benchmark of the watchdog: its thread watches while steps run, and what it took is counted."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace
from typing import Any

from benchmarks import common, watchdog
from benchmarks.common import Timing


def test_a_block_is_watched_and_its_thread_ends(tmp_path):
    took: list[str] = []

    def step() -> None:
        took.extend(each.name for each in threading.enumerate())
        time.sleep(0.1)

    contender: Any = SimpleNamespace(step=step)
    looks, used, seconds = watchdog.watched(contender, tmp_path)
    assert took.count("watchdog") == watchdog.STEPS and "watchdog" not in [
        t.name for t in threading.enumerate()
    ]
    assert 1 <= looks <= 10 * seconds + 1 and 0 < used < seconds and seconds >= 0.1 * watchdog.STEPS


def test_the_report_is_of_a_step_and_of_a_look(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    times = {
        name: Timing((ms / 1e3,) * 3)
        for name, ms in {"without": 800, "with": 820, "without again": 810}.items()
    }
    record = {**common.environment([]), "measured": "CPU time"}
    watchdog.report(times, [(10, 0.001, 1.0), (20, 0.001, 2.0), (10, 0.0008, 1.0)], record, "python")
    said = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("|")] for line in said.splitlines()]
    assert cells[2][1:4] == ["without", "200.0", "1.0000"] and cells[3][1:4] == ["with", "205.0", "1.0250"]
    assert "10.0 looks a second, 80 µs of CPU time each, 0.080% of a core (medians of 3 blocks)" in said
    assert json.loads((tmp_path / "watchdog.json").read_text())["results"]["with"] == [0.82] * 3
