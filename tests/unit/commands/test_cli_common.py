"""What all commands share: help of 80 columns, errors as one line, the start of ranks."""

from __future__ import annotations

import errno
import warnings

import pytest

from megatron_fp8.commands.cli_common import (
    CheckpointParser,
    CommandParser,
    _of_this_process,
    fit_help,
    run_command,
)
from megatron_fp8.commands.main import COMMANDS, main
from megatron_fp8.train.launch.environment import find_launch

BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7", "HOME": "/home"}


def test_a_batch_script_is_one_process_and_its_steps_are_several():
    """SLURM tells a batch script of all tasks, which only srun starts."""
    assert find_launch(_of_this_process(BATCH)).world_size == 1
    assert find_launch(_of_this_process({**BATCH, "SLURM_STEP_NUM_TASKS": "4"})).world_size == 4
    assert (
        find_launch(_of_this_process({**BATCH, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})).rank == 1
    )
    assert _of_this_process(BATCH)["HOME"] == "/home"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "model.safetensors"), 2),
        (OSError(errno.ENAMETOOLONG, "File name too long", "long"), 2),
        (OSError(errno.ENOSPC, "No space left on device", "out"), 1),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 1),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_files_and_ranks_do_while_a_command_works_is_one_line(capsys, error, code):
    """2 where what was asked for is at fault, 1 where another attempt may work."""

    def work():
        raise error

    assert run_command(CommandParser("import", "help"), [], lambda *_: work) == code
    said = capsys.readouterr().err.splitlines()
    assert said == [f"error: {error}"]


def test_own_warnings_are_lines_and_those_of_libraries_are_left_out(monkeypatch):
    """Of a checkpoint that `latest` names and that is gone, say, which another one stands in for."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back what the command sets

    def warn(*_):
        for module in ("megatron_fp8.files.checkpoint", "megatron.core.utils", "torch.storage", "megatron"):
            warnings.warn_explicit(f"of {module}", UserWarning, "a file", 1, module)
        return lambda: None

    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        assert run_command(CommandParser("import", "help"), [], warn) == 0
        assert [str(each.message) for each in met] == ["of megatron_fp8.files.checkpoint"]
        assert (
            warnings.formatwarning(met[0].message, UserWarning, "a file", 1) == f"warning: {met[0].message}\n"
        )


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits(command: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["--help"] if command is None else [command, "--help"]
    try:
        assert main(arguments) == 0
    except SystemExit as left:
        assert left.code == 0
    out = capsys.readouterr().out
    assert out and [line for line in out.splitlines() if len(line) > 80] == []
    assert not out.partition("\n\n")[2].startswith(" "), "a sentence stands before the examples"
    assert command is None or "Exit codes" in out


def test_what_fits_stays_and_what_does_not_goes_on():
    text = "A sentence that is\nwritten over two lines.\n\n  short   as it is\n  name    goes on below itself\n\nEnd."
    assert fit_help(text, 24) == (
        "A sentence that is\nwritten over two lines.\n\n  short   as it is\n  name    goes on below\n"
        "          itself\n\nEnd."
    )
    command = "  tool run --first=1 --second=2 --third=3"
    assert fit_help(command, 30) == "  tool run --first=1 \\\n      --second=2 --third=3"
    long = "  a first column of its own that is long   said of it"
    assert fit_help(long, 50) == "  a first column of its own that is long\n      said of it"


def test_options_of_the_run_that_commands_of_a_checkpoint_take() -> None:
    """The tokenizer too: an import without one is refused with this remedy."""
    options, rest = CheckpointParser("generate", "help").parse(
        ["runs/x", "--data.tokenizer=bytes", "--model.fp8=e4m3"]
    )
    assert options.checkpoint == "runs/x" and rest == ["--data.tokenizer=bytes", "--model.fp8=e4m3"]
    for other in ("--data.paths=x", "--model.fp8", "--recipy=x"):
        with pytest.raises(
            ValueError, match=r"--model\.NAME=VALUE, --data\.tokenizer=VALUE, --checkpoint\.accept=VALUE"
        ):
            CheckpointParser("generate", "help").parse(["runs/x", other])
    with pytest.raises(ValueError, match=r"unrecognized arguments: --data\.tokenizer=x"):
        CommandParser("import", "help").parse(["--data.tokenizer=x"])
