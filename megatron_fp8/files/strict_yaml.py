"""YAML that people write, read so that nothing of it is dropped without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .disk import read_ordinary

_LARGEST = 1 << 24
"""Bytes of a file that people write: a device has no end, and a pipe could be read once only."""


class _Loader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error: the first one would be dropped without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"the key in line {line} must be a name, and is a list or a section")
            if key.value in seen:
                raise yaml.YAMLError(
                    f"the key {key.value!r} stands twice, again in line {line}: keep one of them"
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """What a file says. OSError: it cannot be read, is no ordinary file, or too large; ValueError as of ``load_yaml``."""
    return load_yaml(read_ordinary(path, _LARGEST))


def load_yaml(content: bytes) -> Any:
    """What the file says. ValueError, in one line: it is no YAML, or a key stands twice."""
    try:
        return yaml.load(content.decode("utf-8"), _Loader)
    except yaml.parser.ParserError as error:
        mark = error.problem_mark
        if mark is None or not str(error.problem).startswith("expected <block end>"):
            raise ValueError(" ".join(str(error).split())) from error
        raise ValueError(
            f"line {mark.line + 1} does not begin where the other keys of its section do: is it indented too little or"
            " too far?"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date, a number, a character
        raise ValueError(" ".join(str(error).split())) from error
