"""The fenced blocks of a page of documentation, as a reader sees them, and what a test makes of them.

    ```python        run, all of a page in one namespace and folder
    ```              commands, if the first line begins with a program: each is checked against the program itself
    any other        shown, not run: output, data

An HTML comment before a block, which no reader sees, changes that: ``<!-- not run: REASON -->``, and, with lines of
Python that make what a fragment takes for granted, ``<!-- before: ... -->``.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = frozenset(
    [
        "megatron-fp8", "torchrun", "python", "pip", "make", "bash", "sbatch", "srun", "source", "cat",
        "export", "jupyter", "kubectl",
    ]
)  # fmt: skip
_FENCE = re.compile(
    r"(?:^<!-- (?P<kind>not run|before):(?P<said>.*?)-->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """One block. `reason`: why it is not run; `before`: hidden code that goes before it; `line`: of its fence, from 1."""

    language: str
    text: str
    reason: str
    before: str
    line: int

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command line, comments and variables before it left out; none if it is no such block."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        first = joined.split(maxsplit=1)[:1]
        if self.language not in ("", "bash") or not (first and (first[0] in PROGRAMS or "=" in first[0])):
            return []
        found = [shlex.split(line, comments=True) for line in joined.splitlines()]
        return [words for words in map(_without_variables, found) if words]


def _without_variables(words: list[str]) -> list[str]:
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, from top to bottom."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        kind, said = match["kind"], (match["said"] or "").strip("\n")
        found.append(
            Block(
                match["language"],
                textwrap.dedent(match["text"]),
                said.strip() if kind == "not run" else "",
                textwrap.dedent(said) if kind == "before" else "",
                text.count("\n", 0, match.start("indent")) + 1,
            )
        )
    return found
