"""Standard streams that are closed when a command starts: /dev/null takes their place, in child processes too."""

import os
import subprocess
import sys

import pytest

from tests.support.command import ROOT

SCRIPT = """
import os, sys
from megatron_fp8.commands.stdio import open_closed_streams
first = os.open("/", os.O_RDONLY) if "late" in sys.argv else None
open_closed_streams()
names = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
print("said"), print("said", file=sys.stderr), sys.stdin.read()
assert not sys.stdout.isatty() and sys.__stdout__ is sys.stdout
child = [os.path.exists(f"/proc/self/fd/{number}") and os.get_inheritable(number) for number in range(3)]
os.write(int(sys.argv[1]), repr((names, child)).encode())
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_what_is_closed_goes_nowhere(closed):
    read, write = os.pipe()
    shell = " ".join(f"{number}>&-" for number in closed)
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", SCRIPT, str(write)],
        pass_fds=[write], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, timeout=200, check=False,
    )  # fmt: skip
    os.close(write)
    with open(read, "rb") as pipe:
        names, inherited = eval(pipe.read())
    assert done.returncode == 0, done.stderr
    assert [names[number] for number in closed] == ["/dev/null"] * len(closed) and all(inherited)
    assert (b"said" in done.stdout, b"said" in done.stderr) == (1 not in closed, 2 not in closed)


def test_a_number_that_something_else_has_by_now_stays_its():
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 1>&-', "sh", sys.executable, "-c", SCRIPT, "2", "late"],
        cwd=ROOT, stderr=subprocess.PIPE, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "'/'" in done.stderr.decode(), done.stderr
