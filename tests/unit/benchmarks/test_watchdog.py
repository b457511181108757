"""The benchmark of the watchdog: its thread watches while steps run, and what it took is counted."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

from benchmarks import watchdog


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
