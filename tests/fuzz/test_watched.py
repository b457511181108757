"""A command that runs what it should not fails its case, even if it hides the error and is done."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import subprocess
from collections.abc import Callable

import pytest

from tests.support import run_in_process
from tests.support.process_monitor import TRAP
from tests.support.run_in_process import done_or_refused


class Bomb:
    def __reduce__(self):
        return print, ("it went off",)


WRONG: dict[str, Callable[[], object]] = {
    "os.system": lambda: os.system("true"),
    "subprocess.Popen": lambda: subprocess.run(["true"], check=True),
    "os.posix_spawn": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0),
    "pickle.find_class": lambda: pickle.loads(pickle.dumps(Bomb())),
    "import": lambda: importlib.import_module(f"{TRAP}.inside"),
}


@pytest.mark.parametrize("event", WRONG)
def test_a_command_that_runs_code_fails(monkeypatch, event):
    def main(arguments: list[str]) -> int:
        with contextlib.suppress(ImportError):
            WRONG[event]()
        return 0

    monkeypatch.setattr(run_in_process, "main", main)
    with pytest.raises(AssertionError, match=event):
        done_or_refused("report")


def test_what_commands_start_themselves_is_no_fault(monkeypatch):
    monkeypatch.setattr(
        run_in_process, "main", lambda arguments: subprocess.run(["uname", "-p"], check=False).returncode * 0
    )
    assert done_or_refused("report").code == 0
