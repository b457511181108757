"""A forked command is told, runs, ends and is heard as a real process of the same arguments."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.support.fork_server import python, started
from tests.support.command import environment

SCRIPT = """
import atexit, os, sys
atexit.register(print, "at exit")
print(sys.argv, os.environ["WORD"], os.getcwd(), __name__, sys.stdin.read())
print("said", file=sys.stderr)
{end}
"""
ENDS = {
    "the end": ("", 0),
    "a code": ("sys.exit(3)", 3),
    "nothing to say": ("sys.exit(None)", 0),
    "a text": ("sys.exit('the reason')", 1),
    "an error": ("raise ValueError('the reason')", 1),
}


@pytest.mark.parametrize("end", ENDS)
def test_it_is_heard_as_a_real_process(tmp_path: Path, end: str) -> None:
    script, (code, exit_code) = tmp_path / "script.py", ENDS[end]
    script.write_text(SCRIPT.format(end=code))
    env = environment(WORD="ham")
    forked = python(str(script), "--a", "b c", env=env, timeout=200, cwd=tmp_path)
    real = subprocess.run(
        [sys.executable, str(script), "--a", "b c"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert (forked.returncode, forked.stdout) == (real.returncode, real.stdout)
    assert forked.returncode == exit_code and "ham" in forked.stdout and "at exit" in forked.stdout
    assert forked.stderr.splitlines()[0] == "said"
    assert forked.stderr.splitlines()[-1] == real.stderr.splitlines()[-1]


def test_a_module_runs_as_main_and_nothing_is_imported_again(tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(
        "import sys, torch\n"
        "print(__name__, sys.argv[1:], 'megatron.core' in sys.modules, torch.get_num_threads())\n"
        "from megatron_fp8.mcore import is_installed\n"
        "print(is_installed())\n"
    )
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    done = python("-m", "told", "x", env=environment(PYTHONPATH=path), timeout=200)
    assert (done.stdout, done.stderr) == ("__main__ ['x'] True 1\nFalse\n", "")


def test_one_that_hangs_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('before', flush=True)\ntime.sleep(3600)\n")
    for timeout in (2, 20, 100):  # until it has begun, on a busy machine
        with pytest.raises(subprocess.TimeoutExpired) as caught:
            python(str(script), env=environment(), timeout=timeout)
        if caught.value.stdout:
            break
    assert caught.value.stdout == b"before\n"


def test_nobody_else_takes_its_exit_code(tmp_path: Path) -> None:
    """multiprocessing asks for the ends of its children whenever any thread starts one, and each is read once."""
    process = started(["-m", "this"], environment(), str(tmp_path), *[str(tmp_path / "said")] * 2)
    assert process not in multiprocessing.active_children()
    process.join()
    assert process.exitcode == 0
