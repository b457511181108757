"""Who may train a comparison's runs, what is said of it, and what becomes of a trainer whose comparison is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from megatron_fp8.files.run_lock import LockHeld, RunLock
from megatron_fp8.study import compare_runs as launch


def test_a_second_comparison_of_a_folder_is_refused_at_once(tmp_path):
    out, began = tmp_path / "out", time.monotonic()
    with launch.lock_folder(out):
        with pytest.raises(LockHeld, match=r"--out=.* is in use by another run"), launch.lock_folder(out):
            pass
        assert time.monotonic() - began < 60
    assert not out.exists(), "nothing was written"


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="Linux alone tells a child of its parent's death"
)
def test_a_trainer_ends_with_a_comparison_that_is_killed():
    reader, writer = os.pipe()
    if not (parent := os.fork()):
        sleeping = subprocess.Popen(["sleep", "3600"], preexec_fn=launch._ended_with_parent())
        os.write(writer, str(sleeping.pid).encode())
        time.sleep(3600)
        os._exit(1)
    child = int(os.read(reader, 20))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + 200
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left := alive(child):
        os.kill(child, signal.SIGKILL)
    assert not left


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class Run:
    """A run that somebody else is training, and finishes."""

    def __init__(self, folder: Path, lacking: list[str]) -> None:
        self.folder, self.name, self.iterations, self._lacking = folder, "mxfp8, seed 1", 6, lacking
        self.finished = False

    def check_existing(self) -> None:
        pass

    def lacks(self) -> str:
        return self._lacking.pop(0)


def test_a_run_that_another_process_finishes_is_not_trained_again(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    lock = RunLock(folder, "run_dir", environ={})
    lock.take(print)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: lock.release())
    monkeypatch.setattr(launch, "time", clock)
    monkeypatch.setattr(launch, "_train", None)
    launch.train_all(type("Comparison", (), {"runs": [Run(folder, [""])]})())
    assert "mxfp8, seed 1 was finished by another process meanwhile" in capsys.readouterr().err


def test_an_interrupt_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "_train", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        launch.train_all(type("Comparison", (), {"runs": [Run(tmp_path / "run", ["its config"])]})())
    assert "the same command goes on from here" in capsys.readouterr().err.splitlines()[-1]
