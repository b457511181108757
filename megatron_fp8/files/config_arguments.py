"""Arguments of the command line: `--config NAME` of an example config, and `--data FILE ...`.

The repository's examples/configs has the only copy; building a wheel copies it to `configs/` in the package (setup.py),
so that an installed package has them too.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "examples" / "configs")
"""Folders of an installed package and of a checkout."""


def example_configs() -> dict[str, Path]:
    """Name -> file of every shipped config."""
    return {path.stem: path for folder in _FOLDERS for path in sorted(folder.glob("*.yaml"))}


def config_hint(word: str) -> str:
    """' Did you mean --config ...?' for a command-line word that names a shipped config or a YAML file; else ''."""
    is_config = word in example_configs() or word.endswith((".yaml", ".yml"))
    return f" Did you mean --config {word}?" if is_config else ""


def which_config(given: str) -> str:
    """For messages: shipped configs with a similar name, and the list of all."""
    names = list(example_configs())
    name = Path(given).stem.lower()
    near = [
        known_name for known_name in names if name and known_name.startswith(name)
    ] or difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"{hint}Shipped ones, by name: {', '.join(names)}."


def find_config(given: str) -> str:
    """The file for `--config=given`: the path itself if it exists, else the shipped config of this name.

    Any other name is returned unchanged; opening it then raises the error.
    """
    if os.path.exists(given) or os.path.basename(given) != given:
        return given
    shipped = example_configs().get(given.removesuffix(".yaml"))
    return given if shipped is None else str(shipped)


def data_as_paths(arguments: Iterable[str]) -> Iterator[str]:
    """Replace each `--data FILE ...` and `--data=FILE` in the arguments by `--data.paths`.

    As with other options, later ones replace earlier ones: `--data` replaces a config's `data.paths` and an earlier
    `--data.paths`. A second `--data` adds to the first, and `--data.paths+=FILE` to whatever precedes it.

    Raises ValueError if `--data` names no file, as with an empty shell variable.
    """
    adding = taking = False  # to an earlier --data; following words belong to --data
    missing = False

    def paths_option(file: str) -> str:
        nonlocal adding, missing
        append, adding, missing = adding, True, False
        return f"--data.paths+={file}" if append else f"--data.paths={json.dumps([file], ensure_ascii=False)}"

    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not argument.startswith("--"):
            yield paths_option(argument) if taking else argument
            continue
        if missing:
            break
        taking = missing = argument == "--data"
        adding = adding and name != "--data.paths"
        if not taking:
            yield paths_option(value) if name == "--data" and equals else argument
    if missing:
        raise ValueError(
            "--data names no file: write --data FILE ..., or leave it out, which takes data.paths of the config."
        )
