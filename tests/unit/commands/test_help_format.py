"""Every command's help fits 80 columns."""

from __future__ import annotations

import pytest

from megatron_fp8.commands.help_format import fit_help
from megatron_fp8.commands.main import COMMANDS, main


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


def test_what_fits_stays_and_what_does_not_goes_on():
    text = "A sentence that is\nwritten over two lines.\n\n  short   as it is\n  name    goes on below itself\n\nEnd."
    assert fit_help(text, 24) == (
        "A sentence that is\nwritten over two lines.\n\n  short   as it is\n  name    goes on below\n"
        "          itself\n\nEnd."
    )
    command = "  tool run --first=1 --second='a b' --third=3"
    assert fit_help(command, 30) == "  tool run --first=1 \\\n      --second='a b' \\\n      --third=3"
    long = "  a first column of its own that is long   said of it"
    assert fit_help(long, 50) == "  a first column of its own that is long\n      said of it"
