"""A verified cache of Megatron-Core's sample indices.

    cache/indices/NAME/             NAME is a digest of all inputs
        ...-document_index.npy, ... Megatron-Core's files
        digests.json                SHA-256 of each of them

Megatron-Core opens them by `numpy.load(allow_pickle=True)`, which executes pickles, and uses any numbers in them as
positions in the data. In a folder that others can write to, or after a power failure, the content may be anything.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import megatron.core
import numpy as np

from ...files.atomic_io import discard, in_words, ordinary, read_ordinary, write_file
from ...files.checkpoint import digest
from ...files.strict_json import load_json
from . import corpus

_DIGESTS, _LARGEST = "digests.json", 1 << 20
_LAYOUT = 2  # 1 had no digests


def index_name(prefixes: list[str], settings: list[Any]) -> str:
    """A digest of all inputs of Megatron-Core's sample indices.

    Megatron-Core's own key has the data's paths and the settings, so it would not notice a rewritten file.
    """
    fingerprints = [[prefix, corpus.fingerprint(prefix)] for prefix in prefixes]
    text = json.dumps([_LAYOUT, megatron.core.__version__, fingerprints, settings])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def index_folder(kept: Path, name: str) -> Path:
    """The folder of these indices if it is valid, else a new folder to build them in."""
    cached = kept / name
    if cached.is_dir():
        if not (problem := damage(cached)):
            return cached
        warnings.warn(
            f"the indices of samples in {str(cached)!r} are not used but built again: {problem}.",
            stacklevel=2,
        )
    try:
        folder = kept / f".{name}.{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            f"data.cache_dir={str(kept.parent)!r} cannot be written ({in_words(error)}): give another folder with "
            "--data.cache_dir."
        ) from error
    return folder


def keep_indices(built: Path, folder: Path) -> None:
    """Rename complete indices to their final name: a folder with that name is always complete."""
    if built == folder:
        return
    with suppress(OSError):  # no space, or another run was faster; this run keeps its files open
        write_file(
            built / _DIGESTS, json.dumps({path.name: digest(path) for path in sorted(built.iterdir())})
        )
        if not folder.is_dir() or damage(folder):
            discard(folder)
        built.rename(folder)


def damage(folder: Path) -> str:
    """What is wrong with cached indices; '' if they are complete, unchanged and plain numbers."""
    try:
        digests = load_json(read_ordinary(folder / _DIGESTS, _LARGEST))
        names = {path.name for path in folder.iterdir()} - {_DIGESTS}
        if not isinstance(digests, dict) or names != set(digests):
            return "its files are not those that were built"
    except (OSError, ValueError) as error:
        return f"{_DIGESTS} cannot be read ({in_words(error)})"
    for name in sorted(names):
        path = folder / name
        try:
            ordinary(path.lstat())
            if path.suffix == ".npy":
                _check_plain(path)
            if digest(path) != digests[name]:
                return f"{name} is not what was built"
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            return f"{name} is no file of plain numbers ({in_words(error)})"
    return ""


def _check_plain(path: Path) -> None:
    """Raise ValueError unless a file is NumPy's format, with integers and the declared length."""
    with path.open("rb") as stream:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"its format is {version}")
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        expected = stream.tell() + math.prod(shape) * dtype.itemsize
        size = path.stat().st_size
    if dtype.kind not in "iu":
        raise ValueError(f"it holds {dtype}")
    if size != expected:
        raise ValueError(f"it has {size} bytes and should have {expected}")
