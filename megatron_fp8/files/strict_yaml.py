"""Strict YAML: unique keys, bounded size, nothing dropped silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .atomic_io import read_ordinary

_LARGEST = 1 << 22
"""Limit in bytes of a hand-written file: a device has no end."""
_MOST = 100_000
"""Limit of entries with aliases expanded: ten lines can expand to more than any memory. Each takes 50 us."""
_DEEPEST = 64
"""Limit of nested sections and lists; a run's config has four levels."""
_LONGEST_NUMBER = 1000
"""Limit of a whole number's characters: Python writes at most 4,300 digits, and is slow to read base 60."""
_INT, _MERGE = "tag:yaml.org,2002:int", "tag:yaml.org,2002:merge"


def read_yaml(path: Path) -> Any:
    """Parse a YAML file. Raises OSError if it cannot be read, is not ordinary or too large; else as ``load_yaml``."""
    return load_yaml(read_ordinary(path, _LARGEST))


def load_yaml(content: bytes) -> Any:
    """Parse YAML.

    Raises ValueError, in one line, if it is not YAML, has a key twice, or is larger than any config: more than 64
    levels, or more than 100,000 entries with aliases expanded.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} of it is no UTF-8: save it as UTF-8") from error
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            _Check(loader).size(root)
            return loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.parser.ParserError as error:
        mark = error.problem_mark
        if mark is None or not str(error.problem).startswith("expected <block end>"):
            raise ValueError(" ".join(str(error).split())) from error
        raise ValueError(
            f"line {mark.line + 1} does not begin where the other keys of its section do: is it indented too little or"
            " too far?"
        ) from error
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


_TOO_DEEP = f"it is nested deeper than {_DEEPEST} levels"
_TOO_MANY = f"it has more than {_MOST:,} entries"


class _Loader(yaml.SafeLoader):
    """Stops at too many entries, before the end of the file."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._entries = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._entries += 1
        if self._entries > _MOST:
            raise yaml.YAMLError(_TOO_MANY)
        return super().compose_node(parent, index)


class _Check:
    """Checks a document before its construction; raises YAMLError."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}

    def size(self, node: yaml.Node, depth: int = 0) -> tuple[int, int]:
        """Number of entries and levels of a node, including its contents, with aliases expanded."""
        line = node.start_mark.line + 1
        if node in self._sizes:
            entries, levels = self._sizes[node]
            if not entries:
                raise yaml.YAMLError(f"what begins in line {line} has an alias of itself in it")
            return entries, levels
        self._sizes[node] = 0, 0  # placeholder, to detect recursion
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            self._keys(node)
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        elif isinstance(node, yaml.ScalarNode) and node.tag != _MERGE:
            self._scalar(node)
        within = isinstance(node, yaml.CollectionNode)
        if within and depth >= _DEEPEST:
            raise yaml.YAMLError(_TOO_DEEP)
        sizes = [self.size(part, depth + 1) for part in parts]
        entries = 1 + sum(entries for entries, _ in sizes)
        levels = within + max((levels for _, levels in sizes), default=0)
        if levels > _DEEPEST:
            raise yaml.YAMLError(_TOO_DEEP)
        if entries > _MOST:
            raise yaml.YAMLError(f"{_TOO_MANY} where aliases repeat what begins in line {line}")
        self._sizes[node] = entries, levels
        return entries, levels

    def _keys(self, section: yaml.MappingNode) -> None:
        """Check that each key is a name and occurs once: PyYAML would silently drop the first one."""
        names: set[str] = set()
        for key, _ in section.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"the key in line {line} must be a name, and is a list or a section")
            name = _MERGE if key.tag == _MERGE else self._scalar(key)
            if not isinstance(name, str):
                raise yaml.YAMLError(
                    f"the key {key.value[:60]!r} in line {line} must be a name, and is read as"
                    f" {type(name).__name__}: put it in quotes"
                )
            if name in names:
                raise yaml.YAMLError(
                    f"the key {key.value!r} stands twice, again in line {line}: keep one of them"
                )
            names.add(name)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        """The scalar's value, which the loader caches. PyYAML raises various errors if a text does not fit its tag."""
        line = node.start_mark.line + 1
        if node.tag == _INT and len(node.value) > _LONGEST_NUMBER:
            raise yaml.YAMLError(f"the number in line {line} has too many digits")
        try:
            value = self._loader.construct_object(node)
        except (ValueError, IndexError, KeyError, AttributeError, OverflowError) as error:
            kind, why = node.tag.rpartition(":")[2], f": {error}" if isinstance(error, ValueError) else ""
            raise yaml.YAMLError(f"{node.value[:60]!r} in line {line} is no {kind}{why}") from error
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise yaml.YAMLError(f"the text in line {line} has half of a character (\\ud800 to \\udfff)")
        return value
