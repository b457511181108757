"""Checks that all token ids are inside the vocabulary.

All ranks read together, in rounds of one part each, so no rank waits longer than one part takes, however large the data
is. The result is cached, and so is the progress of a long check.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from ...files.atomic_io import in_words, read_ordinary, replace_file
from ...files.strict_json import load_json
from ...state.collectives import largest
from ..launch.parallel import on_every_rank, on_first_rank
from .corpus import IndexedInfo, check_indexed, corrupt, fingerprint

_PART = 1 << 24  # ids that a rank reads per round
_TICK_NS = 2_000_000_000
_KEEP_S = 60.0  # between two records of progress
_LARGEST_RECORD = 1 << 16
_NONE = (2**62, -1)


class _Seen(NamedTuple):
    """Smallest and largest of the first ``read`` ids."""

    low: int
    high: int
    read: int


def check_ids(prefixes: Sequence[str], vocab_size: int, kept: Path) -> None:
    """Raise ValueError on every rank if an id is not in [0, vocab_size). Collective.

    Args:
        prefixes: prefixes of .bin/.idx pairs.
        kept: cache folder for the smallest and largest id of each data set, so that a large one is read once.
    """

    def start(prefix: str) -> tuple[IndexedInfo, Path, _Seen]:
        info, record = check_indexed(prefix), _record_path(prefix, kept)
        return info, record, _load(record, info)

    states = on_first_rank(lambda: [start(prefix) for prefix in prefixes])
    for prefix, (info, record, state) in zip(prefixes, states, strict=True):
        if not info.tokens:
            raise ValueError(f"{prefix!r} holds no tokens: give data that is not empty.")
        _check(prefix, state, vocab_size)
        if state.read < info.tokens:
            _read_rest(prefix, info, state, vocab_size, record)


def _read_rest(prefix: str, info: IndexedInfo, state: _Seen, vocab_size: int, record: Path) -> None:
    """Read the remaining ids, all ranks together. ``record``: its name is a digest from before the read."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    saved_at = time.monotonic()
    while state.read < info.tokens:
        low, high = on_every_rank(partial(_extremes, prefix, info, state.read + rank * _PART))
        negative, high = largest([-low, high])
        done = min(state.read + ranks * _PART, info.tokens)
        _check(prefix, _Seen(-negative, high, done), vocab_size)
        state = _Seen(min(state.low, -negative), max(state.high, high), done)
        due = done == info.tokens or time.monotonic() - saved_at > _KEEP_S
        if rank == 0 and due and _is_settled(prefix):
            _save(record, prefix, state)
            saved_at = time.monotonic()


def _extremes(prefix: str, info: IndexedInfo, start: int) -> tuple[int, int]:
    """(smallest, largest) id of the part at ``start``."""
    count = min(_PART, info.tokens - start)
    if count <= 0:
        return _NONE
    path = Path(prefix + ".bin")
    try:
        # Read, not mapped: a mapped file that is truncated meanwhile ends the process by SIGBUS.
        part = np.fromfile(path, info.dtype, count, offset=start * info.dtype.itemsize)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({in_words(error)})") from error
    if len(part) != count:
        raise corrupt(path, "it became shorter while it was read")
    return max(int(part.min()), -_NONE[0]), min(int(part.max()), _NONE[0])  # must fit int64, negated too


def _check(prefix: str, seen: _Seen, vocab_size: int) -> None:
    if seen.read and (seen.low < 0 or seen.high >= vocab_size):
        wrong = seen.low if seen.low < 0 else seen.high
        raise ValueError(
            f"{prefix!r} holds the token id {wrong}, and the vocabulary has {vocab_size} ids (0 to "
            f"{vocab_size - 1}): give the tokenizer that made the data (--data.tokenizer), or "
            f"--model.vocab_size."
        )


# -------------------------------------------------------------------------------------------- cached results


def _record_path(prefix: str, cache: Path) -> Path:
    """Path of a data set's record. Its name is a digest, which differs after any write and for any other pair.

    It covers content as far as `fingerprint` reads, and the file system's times and inode numbers; so it is valid on
    one node's view of the files.
    """
    paths = [os.path.realpath(prefix + ending) for ending in (".bin", ".idx")]
    files = [(path, *_times(path), os.stat(path).st_ino) for path in paths]
    return (
        cache / f"{hashlib.sha256(json.dumps([fingerprint(prefix), files]).encode()).hexdigest()[:32]}.json"
    )


def _times(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_ctime_ns


def _is_settled(prefix: str) -> bool:
    """Whether the last write is old enough that a new write gets another time on any file system."""
    return all(time.time_ns() - max(_times(prefix + ending)) > _TICK_NS for ending in (".bin", ".idx"))


def _load(record: Path, info: IndexedInfo) -> _Seen:
    try:
        content = load_json(read_ordinary(record, _LARGEST_RECORD))
        low, high = content["ids from and to"]
        # An earlier version recorded whole data sets only.
        state = _Seen(*map(operator.index, (low, high, content.get("of the first", info.tokens))))
        return state if 0 < state.read <= info.tokens else _Seen(*_NONE, 0)
    except (OSError, ValueError, KeyError, TypeError):  # no record yet, or a damaged one: read the data
        return _Seen(*_NONE, 0)


def _save(record: Path, prefix: str, seen: _Seen) -> None:
    about = {"prefix": prefix, "ids from and to": [seen.low, seen.high], "of the first": seen.read}
    with suppress(OSError):  # an unwritable cache only means another read
        record.parent.mkdir(parents=True, exist_ok=True)
        replace_file(record, json.dumps(about) + "\n")
