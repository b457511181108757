"""Output that cannot be written: reported once, never a traceback, and in the exit code; closed streams."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from megatron_fp8.commands.main import Output, main


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_a_command_whose_output_is_lost_says_so_in_one_line_and_fails():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_fp8", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
    line = "error: output cannot be written (No space left on device): send it where there is room.\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_with_closed_streams_a_command_works_and_refuses_as_with_others():
    """`>&-` of a daemon: Python has no streams then."""
    shell = f'{sys.executable} -m megatron_fp8 "$@" <&- >&- 2>&-'
    arguments = ["sh", "-c", shell, "sh", "tokenizer", "--out", "/nowhere/x"]
    assert subprocess.run(arguments, cwd=Path(__file__).parents[3], timeout=200).returncode == 2


def test_a_child_of_a_command_without_streams_has_them(tmp_path):
    """Else its first file has the number of its errors, and what C libraries say goes into it."""
    child = "import os; f = open('file', 'w'); os.write(2, b'noise'); f.write(str(f.fileno()))"
    parent = (
        "import subprocess, sys; from megatron_fp8.commands.main import open_closed_streams;"
        f"open_closed_streams(); subprocess.run([sys.executable, '-c', {child!r}])"
    )
    root = {"PYTHONPATH": str(Path(__file__).parents[3])}
    shell = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", parent]
    assert subprocess.run(shell, cwd=tmp_path, timeout=200, env=os.environ | root).returncode == 0
    assert int((tmp_path / "file").read_text()) > 2


def test_work_goes_on_when_its_output_is_lost_and_it_is_said_once(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    output, done = Output(), []
    with output.guarded():
        for number in range(3):
            print(number, flush=True)
            done.append(number)
        print("words", file=sys.stderr)
    assert done == [0, 1, 2] and output.lost
    said = sys.stderr.getvalue().splitlines()
    assert len(said) == 2 and "No space left" in said[0] and said[1] == "words"


def test_an_exit_of_a_command_that_lost_its_output_is_a_failure(monkeypatch):
    def leave(arguments):
        print("help")
        raise SystemExit(0)

    with mock.patch("megatron_fp8.commands.doctor.main", leave), pytest.raises(SystemExit):
        main(["doctor"])
    monkeypatch.setattr(sys, "stdout", Full())
    with mock.patch("megatron_fp8.commands.doctor.main", leave):
        assert main(["doctor"]) == 1


def test_a_reader_that_has_left_is_not_a_full_disk(monkeypatch):
    stream = mock.Mock()
    stream.write.side_effect = BrokenPipeError
    monkeypatch.setattr(sys, "stdout", stream)
    output = Output()
    with pytest.raises(BrokenPipeError), output.guarded():
        print("words")
    assert not output.lost
