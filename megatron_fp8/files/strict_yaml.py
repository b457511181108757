"""Strict YAML: PyYAML's safe loader with unique keys and bounded size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .atomic_io import read_regular

_LARGEST = 1 << 22
"""Limit in bytes of a hand-written file: a device has no end."""
_MOST = 100_000
"""Limit of entries with aliases expanded: ten lines can expand to more than any memory. Each takes 50 us."""
_DEEPEST = 64
"""Limit of nested sections and lists; a run's config has four levels."""
_LONGEST_NUMBER = 1000
"""Limit of a whole number's characters: Python writes at most 4,300 digits, and is slow to read base 60."""
_INT, _TEXT, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("int", "str", "merge"))


def read_yaml(path: Path) -> Any:
    """Parse a YAML file. Raises OSError if it cannot be read, is not ordinary or too large; else as ``load_yaml``."""
    return load_yaml(read_regular(path, _LARGEST))


def load_yaml(content: bytes) -> Any:
    """Parse YAML.

    Raises ValueError, in one line, if it is not YAML, has a key twice, or is larger than any config: more than 64
    levels, or more than 100,000 entries with aliases expanded.
    """
    try:
        return yaml.load(content.decode("utf-8"), _Loader)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} of it is no UTF-8: save it as UTF-8") from error
    except yaml.parser.ParserError as error:
        mark = error.problem_mark
        if mark is None or not str(error.problem).startswith("expected <block end>"):
            raise ValueError(" ".join(str(error).split())) from error
        raise ValueError(
            f"line {mark.line + 1} does not begin where the other keys of its section do: is it indented too little or"
            " too far?"
        ) from error
    # Where a text does not fit its tag, PyYAML raises errors of its own and of Python.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split())) from error


class _Loader(yaml.SafeLoader):
    """Checks each part of a document before anything is made of it."""

    _depth = _entries = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        """A part of the document, with its number of entries and levels, aliases expanded."""
        line = self.peek_event().start_mark.line + 1
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth, self._entries = self._depth + 1, self._entries + 1
        if self._depth > _DEEPEST + 1:
            raise yaml.YAMLError(f"it is nested deeper than {_DEEPEST} levels")
        if self._entries > _MOST:
            raise yaml.YAMLError(f"it has more than {_MOST:,} entries")
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias:
            if not hasattr(node, "entries"):
                raise yaml.YAMLError(f"what begins in line {line} has an alias of itself in it")
            return node
        parts = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
            self._check_keys(node)
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        elif node.tag == _INT and len(node.value) > _LONGEST_NUMBER:
            raise yaml.YAMLError(f"the number in line {line} has too many digits")
        elif not node.value.isascii():
            node.value.encode()  # raises ValueError for half of a character (\ud800 to \udfff)
        node.entries = 1 + sum(part.entries for part in parts)
        node.levels = isinstance(node, yaml.CollectionNode) + max((part.levels for part in parts), default=0)
        if node.levels > _DEEPEST:
            raise yaml.YAMLError(f"it is nested deeper than {_DEEPEST} levels")
        if node.entries > _MOST:
            raise yaml.YAMLError(
                f"it has more than {_MOST:,} entries where aliases repeat what begins in line {line}"
            )
        return node

    def _check_keys(self, section: yaml.MappingNode) -> None:
        """Check that each key is a name and occurs once: PyYAML would silently drop the first one."""
        names: set[str] = set()
        for key, _ in section.value:
            line = key.start_mark.line + 1
            if key.tag not in (_TEXT, _MERGE):
                name = f"{key.value[:60]!r} " if isinstance(key, yaml.ScalarNode) else ""
                raise yaml.YAMLError(
                    f"the key {name}in line {line} must be a name, and is read as {key.tag.rpartition(':')[2]}: put it in"
                    " quotes"
                )
            if key.value in names:
                raise yaml.YAMLError(
                    f"the key {key.value!r} stands twice, again in line {line}: keep one of them"
                )
            names.add(key.value)
