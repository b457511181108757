"""`--data FILE ...` of a command line, which is short for `--data.paths`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator


def data_as_paths(arguments: Iterable[str]) -> Iterator[str]:
    """The arguments with `--data.paths` in the place of each `--data FILE ...` and `--data=FILE`.

    As of other options the later one counts: `--data` stands in the place of a config's `data.paths`, and of a
    `--data.paths` before it. A second `--data` adds to the first, and `--data.paths+=FILE` to whatever is before it.

    Raises ValueError: `--data` names no file, as where a variable of the shell is empty.
    """
    adding = taking = False  # to an earlier --data; the words that follow one
    missing = False

    def named(file: str) -> str:
        nonlocal adding, missing
        before, adding, missing = adding, True, False
        return f"--data.paths+={file}" if before else f"--data.paths={json.dumps([file], ensure_ascii=False)}"

    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not argument.startswith("--"):
            yield named(argument) if taking else argument
            continue
        if missing:
            break
        taking = missing = argument == "--data"
        adding = adding and name != "--data.paths"
        if not taking:
            yield named(value) if name == "--data" and equals else argument
    if missing:
        raise ValueError(
            "--data names no file: write --data FILE ..., or leave it out, which takes data.paths of the config."
        )
