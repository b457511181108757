"""A `python` for programs that start python themselves, examples and torchrun: what it runs is forked (fork_server.py).

    with forking_python(folder) as path:
        subprocess.run(["bash", "examples/reshard.sh"], env={..., "PYTHON": path})

`path` is a small script. It sends its arguments, environment and folder to this process, which forks the command; the
command writes to the script's own stdout and stderr. The script passes on the signals by which programs are told to
stop, and which of them it was started to ignore. It ends as the command does, and a killed script takes the command with
it. In the command, `sys.executable` is the script again: what torchrun starts is forked too. Its stdin is the script's if
that is a pipe, else empty.
Those who look at process ids or command lines see the script's; `stood_for` has the processes behind them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import uuid
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

from benchmarks.support.fork_server import started

# -I and -S: without site-packages it starts in 20 ms.
SCRIPT = """#!{python} -IS
import json, os, signal, socket, stat, sys
def pass_on(number, frame):
    try:
        asked.send(bytes([number]))
    except OSError:
        return  # the command has ended, and so does this
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({address!r})
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    ignored = [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]
    piped = stat.S_ISFIFO(os.stat(0).st_mode)
    request = [os.getpid(), sys.argv[1:], dict(os.environ), os.getcwd(), ignored, piped]
    asked.sendall(json.dumps(request).encode() + b"\\n")
    for number in numbers:
        signal.signal(number, pass_on)
    code = int(asked.makefile().read())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)  # at its usual end Python stops listening first, and a late signal would kill it
"""


STANDS_FOR = "for "
"""What the name of a forked command begins with; then comes the script's process id."""


def stood_for() -> dict[int, int]:
    """The process ids of forked commands, by those of their scripts."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if (name := path.read_text().strip()).startswith(STANDS_FOR):
                found[int(name.removeprefix(STANDS_FOR))] = int(path.parent.name)
    return found


@contextlib.contextmanager
def forking_python(folder: Path) -> Iterator[str]:
    """Writes the script into `folder` and serves it; yields its path."""
    path, address = (
        folder / "forking-python",
        f"\0forking-{uuid.uuid4().hex}",
    )  # no file that could go or be too long
    path.write_text(SCRIPT.format(python=sys.executable, address=address))
    path.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        threading.Thread(target=_listen, args=(listener, str(path)), daemon=True).start()
        yield str(path)
        listener.shutdown(socket.SHUT_RDWR)


def _listen(listener: socket.socket, path: str) -> None:
    while True:
        try:
            asked, _ = listener.accept()
        except OSError:  # shut down
            return
        threading.Thread(target=_serve, args=(asked, path), daemon=True).start()


def _serve(asked: socket.socket, path: str) -> None:
    """One command, from its start to its end or to that of the script that asked for it."""
    with asked:
        said = b""
        while b"\n" not in said:
            if not (more := asked.recv(1 << 16)):
                return  # killed before it had asked
            said += more
        request, _, signals = said.partition(b"\n")
        pid, command, env, cwd, ignored, piped = json.loads(request)
        if command[0] == "-u":  # of torchrun, and only about when lines are seen
            del command[0]
        stdin, stdout, stderr = (f"/proc/{pid}/fd/{number}" for number in range(3))
        process = started(
            command, env, cwd, stdout, stderr, stdin=stdin if piped else os.devnull,
            executable=path, ignored=ignored, name=f"{STANDS_FOR}{pid}",
        )  # fmt: skip
        _pass_on(signals, process.pid)
        while process.sentinel not in wait([process.sentinel, asked]):
            signals = asked.recv(64)
            if not signals:  # the script is gone
                process.kill()
                break
            _pass_on(signals, process.pid)
        process.join()
        with contextlib.suppress(ConnectionError):
            asked.sendall(str(process.exitcode).encode())
            asked.shutdown(socket.SHUT_WR)
            while asked.recv(
                64
            ):  # signals that came too late: closed before they are read, it would reset the script's end
                pass


def _pass_on(signals: bytes, pid: int) -> None:
    """Signals that the script was sent, a byte each."""
    for number in signals:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
