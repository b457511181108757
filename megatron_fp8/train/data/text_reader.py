"""Reads text files, checks them and splits them into documents; counts untokenisable text."""

from __future__ import annotations

import codecs
import hashlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ...files.atomic_io import in_words, open_ordinary
from .tokenizers import Spans, Tokenizer

PIECE_BYTES = 1 << 16
"""Longer files are split at line ends into documents of at most this size, so that every data split gets some."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class DocumentRules:
    """How files become documents: DataSection's ``column`` and ``loss``, and the size of a text's pieces."""

    column: str | None = None
    loss: str = "all"
    piece_bytes: int = PIECE_BYTES


class Document(NamedTuple):
    """A document. ``answers``: spans of characters in a chat that the assistant wrote; None: not a chat."""

    text: bytes
    answers: Spans | None = None


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file of data.paths for reading. Raises ValueError with its name."""
    try:
        with open_ordinary(path, sys.maxsize) as stream:
            yield stream
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else in_words(error)
        raise ValueError(
            f"data.paths has {str(path)!r}: {reason}. Give files of text, JSONL, CSV or Parquet, a folder of them, or the"
            " prefix of a .bin/.idx pair."
        ) from error


def content_digest(path: Path, *, is_text: bool = True) -> bytes:
    """SHA-256 of a file of any size, in little memory.

    Raises ValueError if it cannot be read, or if ``is_text`` and it has NUL bytes or is not UTF-8.
    """
    hasher, decoder, done = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")(), 0
    with opened(path) as stream:
        while part := stream.read(_READ_BYTES):
            if is_text:
                if (nul := part.find(0)) >= 0:
                    raise _not_text_error(path, f"byte {done + nul} is NUL")
                _decode(path, decoder, part, done)
            hasher.update(part)
            done += len(part)
    if is_text:
        _decode(path, decoder, b"", done)
    return hasher.digest()


def _decode(path: Path, decoder: codecs.IncrementalDecoder, part: bytes, done: int) -> None:
    """Decode the part after ``done`` bytes; an empty part ends the file."""
    waiting = len(decoder.getstate()[0])
    try:
        decoder.decode(part, final=not part)
    except UnicodeDecodeError as error:
        raise _not_text_error(path, f"byte {done - waiting + error.start} is not UTF-8") from error


def _not_text_error(path: Path, why: str) -> ValueError:
    return ValueError(
        f"data.paths has {str(path)!r}, which is no text ({why}): leave it out; if it is text that is packed or in"
        f" another encoding, unpack it, or write it anew in UTF-8 (iconv -f ENCODING -t UTF-8 {path.name} > NEW)."
    )


def pieces(stream: BinaryIO, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """Documents of a text, split at line ends, and in a longer line between two UTF-8 characters."""
    buffer = b""
    while buffer := buffer + stream.read(piece_bytes + 1 - len(buffer)):
        end = len(buffer)
        if end > piece_bytes:
            newline = buffer.rfind(b"\n", 0, piece_bytes)
            end = newline + 1 if newline > 0 else piece_bytes
            end -= next((back for back in range(4) if buffer[end - back] & 0xC0 != 0x80), 0)
        yield buffer[:end]
        buffer = buffer[end:]


@dataclass
class UnknownTokens:
    """Text that a tokenizer could not encode: of ``tokens`` ids, ``unknown`` are its unknown token, and ``left_out``
    characters have no id at all."""

    tokens: int = 0
    unknown: int = 0
    left_out: int = 0

    def add(self, text: bytes, ids: np.ndarray, tokenizer: Tokenizer) -> None:
        """Add a document's counts."""
        self.tokens += len(ids)
        self.left_out += tokenizer.left_out(text)
        if tokenizer.unknown is not None:
            self.unknown += int((ids == tokenizer.unknown).sum())

    def warn(self) -> None:
        """Warn if there is such text."""
        if self.unknown:
            warnings.warn(
                f"data: the tokenizer has no token for {self.unknown:,} of {self.tokens:,} pieces of the text, which"
                " all become its unknown token: is it the tokenizer for this text?",
                stacklevel=2,
            )
        if self.left_out:
            warnings.warn(
                f"data: the tokenizer has no token for {self.left_out:,} characters of the text, nor an unknown token:"
                " they are left out. Is it the tokenizer for this text?",
                stacklevel=2,
            )


def unknown_tokens_of(record: Any) -> UnknownTokens:
    """The counts in the record of a prepared text; empty if it is invalid. Earlier versions wrote more fields."""
    names = [each.name for each in fields(UnknownTokens)]
    values: list[Any] = [record.get(name, 0) for name in names] if isinstance(record, dict) else []
    return UnknownTokens(*values) if all(type(value) is int for value in values) else UnknownTokens()
