"""Pickles that a stranger could have made: opcodes that build, change and call what they name."""

from __future__ import annotations

import struct
from typing import Any

from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, StorageMeta, TensorStorageMetadata
from torch.serialization import _get_layout

from megatron_fp8.files.checkpoint_metadata import PLAIN
from tests.support.process_monitor import TRAP

HOSTILE = [
    ("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("builtins", "setattr"), ("torch", "load"),
    ("torch", "Size.mro"), ("torch.serialization", "_get_layout.cache"), ("collections", "namedtuple"),
    ("torch.distributed.checkpoint.metadata", "os"), ("copyreg", "_reconstructor"), (TRAP, "leave"),
]  # fmt: skip
NAMES = [
    "_value_", "_name_", "__class__", "__dict__", "__defaults__", "__kwdefaults__", "__name__", "__bases__", "__doc__",
    "__setstate__", "__new__", "__init__", "cache", "append", "chunks", "fqn", "x", "torch.strided", "echo x", "cpu",
]  # fmt: skip


def text(value: str) -> bytes:
    """Opcodes that put text on the stack."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def named(found: tuple[str, str]) -> bytes:
    """Opcodes that put what a module has under a name on the stack."""
    return b"c" + "\n".join([*found, ""]).encode()


MEMBER = named(("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")) + b"K\x00\x85R"
"""A member of the format's enum, which is this process's own."""


def _items(pairs: list[tuple[bytes, bytes]]) -> bytes:
    return b"}" + b"".join(key + value + b"s" for key, value in pairs)


def expressions() -> st.SearchStrategy[bytes]:
    """Opcodes that put one value on the stack: numbers, texts, what is allowed and what is not; calls of them,
    objects of them, and states that are set: of fresh objects and of whatever else."""
    names = st.sampled_from(NAMES).map(text)
    known = st.sampled_from(sorted(PLAIN)).map(named)
    things = st.integers(0, 9).flatmap(lambda n: known if n else st.sampled_from(HOSTILE).map(named))
    leaves = st.sampled_from([b"N", b"K\x00", b"K\x01", b"\x88", b")", b"]", b"}", MEMBER]) | names | things

    def more(inner: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
        several = st.lists(inner, max_size=3).map(lambda values: b"(" + b"".join(values) + b"t")
        states = st.lists(st.tuples(names, inner), min_size=1, max_size=2).map(_items)
        slots = states.map(lambda state: b"N" + state + b"\x86")
        made = st.tuples(things, several, st.sampled_from([b"R", b"\x81"])).map(b"".join)
        built = st.tuples(known | st.just(MEMBER) | made, states | slots, st.just(b"b")).map(b"".join)
        grown = st.tuples(inner, inner, st.sampled_from([b"a", b"\x86", b"R", b"b"])).map(b"".join)
        return made | built | built | grown | several

    return st.recursive(leaves, more, max_leaves=5)


def programs() -> st.SearchStrategy[bytes]:
    """One or two values, each thrown away; the pickle of something whole may come behind, or an end (``b"."``)."""
    return st.lists(expressions(), min_size=1, max_size=2).map(
        lambda values: b"".join(v + b"0" for v in values)
    )


def of_the_process() -> list[Any]:
    """What such pickles would change of this process: classes, an enum's members, a function."""
    members = [(dict(vars(member)), type(member)) for member in _MEM_FORMAT_ENCODING]
    of_classes = [
        (dict(vars(each)), each.__name__, each.__bases__) for each in (TensorStorageMetadata, StorageMeta)
    ]
    return [members, of_classes, _get_layout.__defaults__, _get_layout.__name__, sorted(vars(_get_layout))]
