"""What becomes of a file that somebody else had in his hands: bytes cut, flipped and put in, other values in its JSON.

An edit is plain data, drawn without knowing the file, so that hypothesis can make it smaller and a test can name it:

    edited(data, [("flip", 8, b"\\x80")])              one bit of the ninth byte
    json_edited(content, [(3, "value", None)])        the fourth node of a JSON tree is null
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from tests.support.process_monitor import TRAP

ByteEdit = tuple[str, int, bytes]
"""(what happens, where: from the start, or negative from the end; with which bytes)."""

JsonEdit = tuple[int, str, Any]
"""(number of the node in the order of the file, what happens to it, with which value)."""

MARKUP = "</script><script>run()</script><img src=x onerror=run()>"
"""Text that would be code in a page that does not escape it."""

_NUMBERS = (0, 1, 2, 127, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_BYTES = sorted(
    {
        *(number.to_bytes(8, "little")[:size] for number in _NUMBERS for size in (1, 4, 8)),
        *(struct.pack("<f", value) for value in (float("nan"), float("inf"), -1.0)),
        *(
            b"\n", b"\0", b'"', b"{", b"}", b"[", b"]", b",", b"../", b"NaN", b"1e999", b"\xff\xfe",
            b"\xed\xa0\x80",
        ),
        *(b"- &a *a\n", b"!!python/object/apply:os.system [x]", MARKUP.encode(), b"\x1b[2J"),
    }
)  # fmt: skip


def byte_edits(most: int = 3) -> st.SearchStrategy[list[ByteEdit]]:
    """One to ``most`` edits of bytes."""
    place = st.integers(-40, 400) | st.integers(-(2**20), 2**20)
    content = st.sampled_from(_BYTES) | st.binary(max_size=12)
    kinds = st.sampled_from(("flip", "put", "insert", "drop", "cut", "repeat"))
    return st.lists(st.tuples(kinds, place, content), min_size=1, max_size=most)


def edited(data: bytes, edits: Sequence[ByteEdit]) -> bytes:
    """The bytes after the edits, one after another."""
    for kind, place, content in edits:
        at = place % (len(data) + 1)
        size = max(1, len(content))
        head, part, tail = data[:at], data[at : at + size], data[at + size :]
        if kind == "flip":
            data = (
                head + (bytes([part[0] ^ (content[0] if content else 1)]) + part[1:] if part else b"") + tail
            )
        elif kind == "put":
            data = head + content + tail
        elif kind == "insert":
            data = head + content + part + tail
        elif kind == "drop":
            data = head + tail
        elif kind == "repeat":
            data = head + part * 3 + tail
        else:
            data = head
    return data


_LEAVES: list[Any] = [
    *(None, True, False, -1, 0, 1, 7, 2**31, 2**63, 10**400, 0.5, -0.0, 1e300, float("nan"), float("inf")),
    *(
        "",
        " ",
        "x",
        "../x",
        "/dev/zero",
        "long" * 100,
        "a\0b",
        "\ud800",
        MARKUP,
        "\x1b[2J",
        "NaN",
        "bf16",
        "custom",
        "os.system",
        f"{TRAP}.leave",
    ),
    *([], [1], [[]], [None, "x"], {}, {"a": 1}, {"": None}),
]


def json_edits(most: int = 3) -> st.SearchStrategy[list[JsonEdit]]:
    """One to ``most`` edits of a JSON tree."""
    number = st.integers(0, 60) | st.integers(0, 10**5)
    kinds = st.sampled_from(("value", "value", "value", "remove", "rename", "add", "wrap", "swap"))
    return st.lists(st.tuples(number, kinds, st.sampled_from(_LEAVES)), min_size=1, max_size=most)


def json_edited(content: Any, edits: Sequence[JsonEdit]) -> Any:
    """The tree after the edits; the given one stays as it is."""
    root = {"": copy.deepcopy(content)}
    for number, kind, drawn in edits:
        value = copy.deepcopy(drawn)  # a leaf may be edited later
        nodes = list(_nodes(root))
        parent, key = nodes[number % len(nodes)]
        if kind == "value":
            parent[key] = value
        elif kind == "wrap":
            parent[key] = [parent[key]]
        elif kind == "swap":
            other, name = nodes[(number * 7 + 1) % len(nodes)]
            parent[key] = copy.deepcopy(other[name])
        elif kind == "add" and isinstance(parent[key], dict):
            parent[key]["more"] = value
        elif kind == "add" and isinstance(parent[key], list):
            parent[key].append(value)
        elif parent is root:
            continue  # there has to be something
        elif isinstance(parent, dict):
            taken = parent.pop(key)
            if kind == "rename":
                parent[f"{key}s"] = taken
        elif kind == "remove":
            del parent[key]
    return root[""]


def _nodes(parent: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a tree, from the outside in."""
    keys = parent.keys() if isinstance(parent, dict) else range(len(parent))
    for key in list(keys):
        yield parent, key
        if isinstance(parent[key], (dict, list)):
            yield from _nodes(parent[key])


def planted(content: Any, number: int, text: str, dumps: Callable[[Any], str]) -> str:
    """``dumps(content)`` with ``text``, whatever it is, in the place of one node of the tree."""
    mark = "-planted-here-"
    written = dumps(json_edited(content, [(number, "value", mark)]))
    return written.replace(f'"{mark}"', text).replace(mark, text)
