"""A run under torchrun that is told to stop: it saves and ends, however often it is told."""

import os
import re
import signal
import time
from contextlib import suppress

import pytest

from benchmarks.kills import LIMIT_S, Run, write_config
from megatron_fp8.files.checkpoint import check_files, latest_checkpoint, read_manifest


@pytest.mark.parametrize(
    ("name", "told", "code"),
    [
        ("SIGUSR1", "one rank", 0),
        ("SIGINT", "torchrun", 1),  # torchrun ends with an error when it is told to; its ranks do not
    ],
)
def test_a_run_that_is_told_to_stop_saves_and_ends(tmp_path, forking_python, name, told, code):
    """Told once, then, but for Ctrl-C, whose second one means now, again and again while it saves."""
    config = write_config(tmp_path, 5000, asynchronous=False)
    with Run(tmp_path, config, "run", restarts=0, python=forking_python) as run:
        run.until(lambda: "\niteration     3/" in run.log.read_text(), "its third iteration")
        os.kill(run.ranks()[1] if told == "one rank" else run.process.pid, signal.Signals[name])
        run.until(
            lambda: (
                "stopped by" in run.log.read_text() or (name != "SIGINT" and _tell(run, signal.Signals[name]))
            ),
            "it stopped",
        )
        assert run.process.wait(LIMIT_S) == code, run.log.read_text()
    said = re.search(
        rf"^stopped by {name} after (\d+) of 5000 iterations, saved, .*resume=auto", run.log.read_text(), re.M
    )
    assert said, run.log.read_text()
    last = latest_checkpoint(run.checkpoints)
    assert last.name == f"iter_{int(said[1]):07d}"
    check_files(last, read_manifest(last))


def _tell(run, number):
    """Send every rank the signal for a while; false."""
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        for pid in run.ranks().values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.01)
    return False
