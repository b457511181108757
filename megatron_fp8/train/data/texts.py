"""Text files: read, cut into documents, and what of them is lost on the way to ids, which is said."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ...files.disk import read_ordinary
from .tokenizers import Tokenizer

PIECE_BYTES = 1 << 16
"""Longer files are cut at line ends into documents of at most this size, so that every split gets some."""
_PACKED = {
    rb"\x1f\x8b": "gzip",
    rb"PK\x03\x04": "zip",
    rb"\x28\xb5\x2f\xfd": "zstandard",
    rb"BZh[1-9]1AY&SY": "bzip2",  # less of it may be a word
    rb"\xfd7zXZ": "xz",
}
"""What packed files begin with."""


def read(path: Path) -> bytes:
    """A file's bytes.

    Raises ValueError: it cannot be read, or is packed.
    """
    try:
        text = read_ordinary(path, sys.maxsize)
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ValueError(
            f"data.paths has {str(path)!r}: {reason}. Give text files, or the prefix of a .bin/.idx pair."
        ) from error
    if packed := next((name for start, name in _PACKED.items() if re.match(start, text)), None):
        raise ValueError(
            f"data.paths has {str(path)!r}, which is packed ({packed}): unpack it, and give the text."
        )
    return text


def pieces(text: bytes) -> Iterable[bytes]:
    """Documents of a text: at line ends, or in a longer line between two characters of UTF-8."""
    start = 0
    while start < len(text):
        end = len(text)
        if end - start > PIECE_BYTES:
            newline = text.rfind(b"\n", start, start + PIECE_BYTES)
            end = newline + 1 if newline > start else start + PIECE_BYTES
            inside = next((back for back in range(4) if text[end - back] & 0xC0 != 0x80), 0)
            end -= inside
        yield text[start:end]
        start = end


def look_at(paths: Sequence[Path]) -> None:
    """Warn of files that are given as text and are empty, or whose lines are JSON."""
    empty = [str(path) for path in paths if path.is_file() and not path.stat().st_size]
    if empty and len(empty) < len(paths):
        warnings.warn(f"data.paths has {len(empty)} empty files, such as {empty[0]!r}.", stacklevel=2)
    if lines := next((str(path) for path in paths if path.suffix == ".jsonl"), None):
        warnings.warn(
            f"data.paths has {lines!r}: its lines are learned as they are, names and quotes of JSON too. Megatron-LM's"
            " tools/preprocess_data.py makes a .bin/.idx pair of the texts in it.",
            stacklevel=2,
        )


@dataclass
class Lost:
    """What a tokenizer could not say: of ``tokens``, ``unknown`` are its token for that; ``undecodable`` characters are
    U+FFFD in the place of bytes that are not UTF-8; ``left_out`` ones are not there at all."""

    tokens: int = 0
    unknown: int = 0
    undecodable: int = 0
    left_out: int = 0

    def add(self, text: bytes, ids: np.ndarray, tokenizer: Tokenizer) -> None:
        """Count in a document."""
        self.tokens += len(ids)
        self.left_out += tokenizer.left_out(text)
        if tokenizer.unknown is not None:
            self.unknown += int((ids == tokenizer.unknown).sum())
        if tokenizer.decodes:
            meant = text.count("\ufffd".encode())
            self.undecodable += text.decode("utf-8", errors="replace").count("\ufffd") - meant

    def say(self) -> None:
        """A warning of each that is not 0."""
        if self.unknown:
            warnings.warn(
                f"data: the tokenizer has no token for {self.unknown:,} of {self.tokens:,} pieces of the text, which"
                " are all learned as its one token for the unknown: is it the one for this text?",
                stacklevel=2,
            )
        if self.left_out:
            warnings.warn(
                f"data: the tokenizer has no token for {self.left_out:,} characters of the text, nor one for the unknown:"
                " they are left out. Is it the one for this text?",
                stacklevel=2,
            )
        if self.undecodable:
            warnings.warn(
                f"data: {self.undecodable:,} places in the text are not UTF-8, and are learned as U+FFFD: save the files"
                " as UTF-8.",
                stacklevel=2,
            )


def lost_of(record: Any) -> Lost:
    """What `dataclasses.asdict` made of one, also with fewer fields, as earlier versions; nothing of what is not that."""
    if not isinstance(record, dict):
        return Lost()
    values: list[Any] = [record.get(field.name, 0) for field in fields(Lost)]
    return Lost(*values) if all(type(value) is int for value in values) else Lost()
