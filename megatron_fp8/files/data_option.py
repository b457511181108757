"""The command-line option `--data FILE ...`, short for `--data.paths`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator


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
