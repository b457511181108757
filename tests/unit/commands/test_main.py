"""The command line's own part: which command, and readers that leave."""

import errno
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from unittest import mock

from megatron_fp8.commands.main import COMMANDS, USAGE, main


def test_bad_input_whose_last_words_find_no_reader_is_bad_input():
    """`megatron-fp8 ... 2>&1 | head`: they wait in a buffer, which is written when the command has ended."""
    root, buffered = Path(__file__).parents[3], {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-m", "megatron_fp8"]  # prints its usage and ends with 2
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=root, env=buffered
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
    assert process.returncode == 2


def test_a_reader_that_leaves_before_the_first_step_ends_a_training_as_failed_and_says_so(capsys):
    from megatron_fp8.commands import train as app

    launch = mock.Mock(rank=0)
    launch.barrier.tell = lambda code, line, say: say()
    with mock.patch.object(app, "prepare", side_effect=BrokenPipeError):
        assert app._run([], launch, None, False) == 1
    assert capsys.readouterr().err.startswith("error: training failed: whoever read its output has left")


def test_ctrl_c_ends_with_a_word(capsys):
    with mock.patch("megatron_fp8.commands.doctor.main", side_effect=KeyboardInterrupt):
        assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_unknown_command_is_named_with_the_nearest_one(capsys):
    assert main(["trian"]) == 2
    assert "'trian' is not a command" in (said := capsys.readouterr().err) and "Did you mean 'train'?" in said


def test_what_is_no_command_is_refused_as_any_bad_input(capsys):
    """In a line that a terminal shows, whatever was typed."""
    assert main(["x" * 100_000]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: 'xxx") and said.count("\n") == 1 and len(said) < 2000


def test_a_file_that_the_system_refuses_is_one_line_of_any_command(capsys, monkeypatch):
    """A disk that fills, a folder of another user: nobody can find all of them before the work."""

    def formats(arguments):
        raise PermissionError(errno.EACCES, "Permission denied", "runs/logs")

    monkeypatch.setattr("megatron_fp8.commands.formats.main", formats)
    assert main(["formats"]) == 1
    assert capsys.readouterr().err == "error: 'runs/logs': Permission denied\n"


def test_every_command_is_in_the_help(capsys):
    assert main([]) == 2 and main(["--help"]) == 0
    assert capsys.readouterr().out.count(USAGE) == 2
    for command in COMMANDS:
        assert f"\n  {command} " in USAGE


def test_the_version_names_what_decides_results(capsys, monkeypatch):
    assert main(["--version"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["megatron_fp8", "torch", "megatron-core"]
    monkeypatch.setattr(metadata, "version", mock.Mock(side_effect=metadata.PackageNotFoundError))
    assert main(["--version"]) == 0 and "megatron-core is not installed" in capsys.readouterr().out
