"""Every option and key, as the program itself knows them: `python -m benchmarks.options [--write]`

Options are read from the parsers that --help prints, keys from what `megatron-fp8 train --keys` lists. --write puts
them into docs/options.md, between its marks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.core.transformer.transformer_config import MLATransformerConfig

from benchmarks.common import put_between
from megatron_fp8.commands.cli_common import CommandParser
from megatron_fp8.commands.main import COMMANDS, USAGE
from megatron_fp8.mcore.config.fields import REFUSED
from megatron_fp8.train.config.key_help import key_help
from megatron_fp8.train.config.model_section import GPTOptions
from megatron_fp8.train.config.run_config import RunConfig

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
BEGIN, END = "<!-- python -m benchmarks.options --write: from here -->", "<!-- to here -->"
_OF_TRAIN = (
    ("`--config FILE`", "a config file, or the name of one that comes with the package; needed"),
    ("`--data FILE ...`", "same as `data.paths`; the later one wins; repeated `--data` appends"),
    ("`--KEY=VALUE`", "any of the [keys](#keys)"),
    ("`--keys`", "list them"),
)
"""Its other options are keys of the config, and no parser here has them."""

THEIRS = "Section `model`: all other fields of Megatron-Core"
_FOREWORD = (
    "`megatron-fp8 train --keys` prints each with its default and meaning. Megatron-Core validates them. Refused, with"
    " the reason:"
)
_ABOUT_PRECISION = {
    "fp16",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "tp_only_amax_red",
}


def parser_of(command: str) -> CommandParser:
    """The parser whose help the command prints. AssertionError: it prints another's, or none."""
    main = import_module(f"megatron_fp8.commands.{COMMANDS[command]}").main
    met: list[CommandParser] = []

    def print_help(parser: CommandParser, file: Any = None) -> None:
        met.append(parser)

    with mock.patch.object(CommandParser, "print_help", print_help), contextlib.suppress(SystemExit):
        main(["--help"])
    (parser,) = met
    return parser


def options_of(command: str) -> list[list[str]]:
    """[option, what it does] of each; --help and --debug, which all have, left out."""
    if command == "train":
        return [list(row) for row in _OF_TRAIN]
    parser = parser_of(command)
    expanded = parser._get_formatter()._expand_help
    return [
        [_named(action), expanded(action) if action.help else ""]
        for action in parser._actions
        if not {"--help", "--debug"}.intersection(action.option_strings)
    ]


def _named(action: argparse.Action) -> str:
    """As a command line has it."""
    value = str(action.metavar or action.dest.upper())
    if action.choices and not action.metavar:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if action.nargs in ("*", "+"):
        value += " ..."
    words = [*action.option_strings[-1:], *([] if action.nargs == 0 else [value])]
    return f"`{' '.join(words)}`".replace("|", " or ")


def sections() -> Iterator[str]:
    """The page's parts: a table for each command, then one for each section of a config."""
    yield "## Commands"
    for command, said in re.findall(r"^  ([a-z]+) +(.+)", USAGE, re.M):
        table = _table(["option", "what it does"], options_of(command))
        yield f"### {command}\n\n{said[0].upper()}{said[1:]}.\n\n{table}"
    yield "## Keys"
    for title, rows in keys().items():
        if title == THEIRS:
            names = [name for key, *_ in rows if (name := key.strip("`").removeprefix("model.")) in REFUSED]
            yield f"### {title}\n\n{_FOREWORD} {', '.join(f'`{name}`' for name in names)}."
        else:
            yield f"### {title}\n\n{_table(['key', 'default', 'what it does'], rows)}"


def keys() -> dict[str, list[list[str]]]:
    """Title of a table -> its [key, default, what it does]; Megatron-Core's own fields last, of which there are most."""
    theirs = {field.name for field in dataclasses.fields(MLATransformerConfig) if "fp8" not in field.name}
    theirs -= {field.name for field in dataclasses.fields(GPTOptions)} | _ABOUT_PRECISION
    run, own = "The run", "Section `model`: precision, vocabulary and positions"
    found: dict[str, list[list[str]]] = {run: [], own: []}
    fields: list[list[str]] = []
    values = RunConfig().to_dict()
    for key, said in key_help().items():
        section, _, name = key.rpartition(".")
        default = (values[section] if section else values)[name]
        title = own if section == "model" else f"Section `{section}`" if section else run
        rows = fields if section == "model" and name in theirs else found.setdefault(title, [])
        rows.append([f"`{key}`", f"`{default!r}`", said])
    return {**found, THEIRS: fields}


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *([*names, _plain(said)] for *names, said in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([*<|])", r"\\\1", part) for part in parts)


def page() -> str:
    """All of it."""
    return "\n\n".join(sections())


def main() -> int:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/options.md")
    if parser.parse_args().write:
        put_between(PAGE, BEGIN, END, page())
    else:
        print(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
