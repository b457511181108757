"""A forking python is told, heard and ended as python is, also by torchrun; none of its processes imports torch."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from benchmarks.support.forking_interpreter import stood_for
from tests.support.command import environment

SCRIPT = """
import os, sys
imported = "megatron.core" in sys.modules
print(sys.argv[1:], os.environ["WORD"], os.getcwd(), imported, os.path.basename(sys.executable), flush=True)
print("said", file=sys.stderr)
{end}
"""


def write(folder: Path, end: str) -> str:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(end=end))
    return str(path)


def test_it_reads_a_pipe_and_writes_in_the_encoding_that_it_is_told(forking_python, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import sys; sys.stdout.reconfigure(errors='replace'); print(sys.stdin.read(), '\xe9')")
    pipe, nothing = {"input": b"ham"}, {"stdin": subprocess.DEVNULL}
    for given, coding, said in ((pipe, "latin-1", b"ham \xe9\n"), (nothing, "ascii", b" ?\n")):
        env = environment(PYTHONIOENCODING=coding)
        done = subprocess.run([forking_python, str(path)], env=env, capture_output=True, check=True, **given)
        assert done.stdout == said


def test_the_command_behind_it_is_found(forking_python, tmp_path):
    script = write(tmp_path, "print(os.getpid(), flush=True); import time; time.sleep(3600)")
    with subprocess.Popen(
        [forking_python, script], env=environment(WORD="ham"), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        command = int(process.stdout.readline())
        assert stood_for()[process.pid] == command != process.pid
        os.kill(command, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def test_a_signal_that_is_ignored_from_the_start_is_ignored_until_the_command_listens(
    forking_python, tmp_path
):
    """As `trap "" USR1` of a shell has it for what it starts."""
    path = tmp_path / "script.py"
    path.write_text(
        "import signal, sys, time; ignored = signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7)); print(ignored, flush=True); time.sleep(3600)"
    )
    command = ["bash", "-c", 'trap "" USR1; exec "$@"', "--", forking_python, str(path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"True\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait() == 7


def test_a_killed_one_takes_its_command_with_it(forking_python, tmp_path):
    """What it started writes to the pipe until it is gone: the pipe's end is seen then, long before the hour."""
    script = write(tmp_path, "import time; time.sleep(3600)")
    with subprocess.Popen(
        [forking_python, script],
        env=environment(WORD="ham"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.kill()
        assert process.stdout.read() == b""
