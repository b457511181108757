"""What a command does that a stranger's code would do: programs that it starts, pickles that name code, a trap that is
imported. Python's own audit events tell of it, whoever calls and whatever is caught; of imports its finders."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_fp8.files.checkpoint_metadata import PLAIN

TRAP = "trap_of_a_fuzzer"
"""A module that is nowhere: what draws name code by. Whoever asks for it would have run it."""
_OWN = {"uname", "cc", os.path.basename(os.environ.get("CC", "cc"))}
"""Programs that commands start themselves: Python's `platform` asks for the processor, kernels are compiled."""
_PROGRAM = {
    "os.system": 0, "os.exec": 0, "os.posix_spawn": 0, "os.spawn": 1, "subprocess.Popen": 0, "pty.spawn": 0,
}  # fmt: skip
"""Events that start a program -> which of their arguments names it."""

_heard: list[list[str]] = []


@contextmanager
def watched() -> Iterator[list[str]]:
    """The list that is yielded gets a line for each of these things that happens inside, in any thread."""
    _listen()
    seen: list[str] = []
    finder = _Finder()
    _heard.append(seen)
    sys.meta_path.insert(0, finder)
    try:
        yield seen
    finally:
        sys.meta_path.remove(finder)
        _heard.remove(seen)


@functools.cache
def _listen() -> None:
    """Once: Python has no way to take an audit hook back."""
    sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _heard:
        return
    wrong = event == "pickle.find_class" and arguments not in PLAIN
    if event in _PROGRAM:
        wrong = os.path.basename(os.fsdecode(arguments[_PROGRAM[event]])) not in _OWN
    if wrong:
        _tell(f"{event} {arguments[:2]!r}")


class _Finder:
    """Finds nothing. The audit event of imports is of `import` statements alone, and not of importlib."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == TRAP:
            _tell(f"import {name}")


def _tell(line: str) -> None:
    for seen in _heard:
        seen.append(line)
