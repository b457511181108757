"""Processes that need not import torch and Megatron-Core again: forked from one that has.

The fork server of `multiprocessing` imports preload.py once for each pytest process: four seconds of a core. The ranks of
ranks.py, and the commands that `python` runs, are its children and start within 0.1 s. It has no threads and has computed
nothing, so OpenMP and gloo start anew in every child.

A forked command differs from a real process in what happens before its first line: the interpreter's start, imports, and
environment variables that are read at import. Tests of these, of signals and of launchers start real processes.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.stack_size import with_room

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["benchmarks.support.preload"])
multiprocessing.util.get_temp_dir()  # of the server's socket, whose path is short: a test may set a long folder later


def python(
    *command: str, env: Mapping[str, str], timeout: float, cwd: str | Path | None = None
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, ...)`.

    `command` begins with a script's path or with '-m' and a module.
    """
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        process = started(command, env, str(cwd or os.getcwd()), *map(str, said))
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout, *(path.read_bytes() for path in said))
        return subprocess.CompletedProcess(command, process.exitcode, *(path.read_text() for path in said))


class Forked:
    """As `subprocess.Popen([python, *command], stdout=FILE, stderr=STDOUT, env=...)`, of what a program does with it.

    Lines on stderr go to a file of their own beside that of stdout. `preexec_fn` is not called: the fork server is the
    child's parent.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: Any,
        stderr: int,
        env: Mapping[str, str],
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        assert stderr == subprocess.STDOUT
        said = (stdout.name, f"{stdout.name}.stderr")
        self._process = started(list(command[1:]), env, os.getcwd(), *said)
        self.args = command

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; TimeoutExpired if it does not come in time."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


def started(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    stdout: str,
    stderr: str,
    *,
    stdin: str = os.devnull,
    executable: str = sys.executable,
    ignored: Sequence[int] = (),
    name: str = "python",
) -> Any:
    """A running process of a command, which writes to these two files, reads `stdin` and starts with signals `ignored`.

    `executable`: its `sys.executable`; `name`: up to 15 bytes, in /proc/PID/comm.
    """
    arguments = (list(command), dict(env), cwd, stdin, stdout, stderr, executable, ignored, name)
    process = CONTEXT.Process(target=with_room, args=(_as_command, *arguments))
    process.start()
    # At each start, from any thread, multiprocessing asks for the ends of all its children, and each can be read once.
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    return process


def _as_command(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    stdin: str,
    stdout: str,
    stderr: str,
    executable: str,
    ignored: Sequence[int],
    name: str,
) -> None:
    """What the interpreter does with its command line, in a forked child."""
    Path("/proc/self/comm").write_text(name)
    # What forks may have been started by nohup, or in the background, which ignores Ctrl-C.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signal_number in ignored:
        signal.signal(signal_number, signal.SIG_IGN)
    # Appended: a file that several processes write to is opened by each of them anew.
    appended = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, (path, flags) in enumerate(((stdin, os.O_RDONLY), (stdout, appended), (stderr, appended))):
        stream = os.open(path, flags)
        os.dup2(stream, number)
        os.close(stream)
    # The server's own streams know what its stdout was: whether one can seek in it, for one.
    coding = env.get("PYTHONIOENCODING")
    sys.stdin = os.fdopen(0, encoding=coding, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding=coding, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding=coding, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.executable = executable
    entries = env.get("PYTHONPATH", "").split(os.pathsep)
    first = cwd if command[0] == "-m" else str(Path(command[0]).resolve().parent)
    sys.path[:] = [first, *entries, *(entry for entry in sys.path if entry not in entries)]
    import torch

    from benchmarks.support.gloo import share_device

    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    share_device()
    if command[0] == "-m":
        sys.argv[:] = command[1:]
        code = _exit_code(lambda: runpy.run_module(command[1], run_name="__main__", alter_sys=True))
    else:
        sys.argv[:] = command
        code = _exit_code(lambda: runpy.run_path(command[0], run_name="__main__"))
    sys.exit(code)


def _exit_code(program: Callable[[], Any]) -> int:
    """Runs a program to its end, functions of atexit included; prints what ended it, as the interpreter does."""
    code = 0
    try:
        program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, (int, type(None))):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # multiprocessing's children leave by os._exit, without them
    return code
