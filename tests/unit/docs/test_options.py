"""docs/options.md says what the program says now."""

import re

import pytest

from benchmarks import options
from megatron_fp8.commands.main import COMMANDS, main
from megatron_fp8.mcore.config.fields import REFUSED
from megatron_fp8.train.config.run_config import known_keys


def test_the_page_is_what_the_program_says():
    assert options.page() in options.PAGE.read_text(encoding="utf-8"), "python -m benchmarks.options --write"


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"train"}))
def test_options_that_help_shows_have_their_row(command, capsys):
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert not end.code
    shown = set(re.findall(r"^  (--[a-z0-9-]+)(?=$|[ ,])", capsys.readouterr().out, re.M))
    rows = {name.strip("`").split()[0] for name, _ in options.options_of(command)}
    assert shown - {"--debug"} == {name for name in rows if name.startswith("--")}


def test_every_key_has_its_row():
    rows = [name.strip("`") for rows in options.keys().values() for name, *_ in rows]
    assert sorted(rows) == sorted(known_keys())


def test_every_key_is_on_the_page():
    """In a row; of Megatron-Core's own fields those that are refused, by name."""
    page = options.page()
    listed = re.findall(r"`(\w+)`[,.]", page[page.index(options.THEIRS) :])
    rows = {name.strip("`").removeprefix("model.") for name, *_ in options.keys()[options.THEIRS]}
    assert set(listed) == rows & REFUSED.keys() and len(listed) > 10
    for title, others in options.keys().items():
        assert title == options.THEIRS or all(f"| {name} |" in page for name, *_ in others)
