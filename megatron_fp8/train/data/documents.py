"""Documents of the files of data.paths: texts, records and chats; counts of untokenisable text.

JSONL and CSV are read line by line here; the package datasets streams Parquet, Arrow and JSON.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ...files.atomic_io import error_text, open_regular
from ...files.terminal import warn_user
from .tokenizers import ChatTemplate, Spans, Tokenizer

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
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file of data.paths for reading. Raises ValueError with its name."""
    try:
        with open_regular(path, sys.maxsize) as stream:
            yield stream
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error_text(error)
        raise ValueError(
            f"data.paths has {str(path)!r}: {reason}. Give files of text, JSONL, CSV or Parquet, a folder of them, or the"
            " prefix of a .bin/.idx pair."
        ) from error


def content_digest(path: Path, *, is_text: bool = True) -> bytes:
    """SHA-256 of a file of any size, in little memory.

    Raises ValueError if it cannot be read, or if ``is_text`` and it has NUL bytes or is not UTF-8.
    """
    hasher, decoder, done = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")(), 0
    with open_file(path) as stream:
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
            warn_user(
                f"data: the tokenizer has no token for {self.unknown:,} of {self.tokens:,} pieces of the text, which"
                " all become its unknown token: is it the tokenizer for this text?"
            )
        if self.left_out:
            warn_user(
                f"data: the tokenizer has no token for {self.left_out:,} characters of the text, nor an unknown token:"
                " they are left out. Is it the tokenizer for this text?"
            )


def unknown_tokens_of(record: Any) -> UnknownTokens:
    """The counts in the record of a prepared text; empty if it is invalid. Earlier versions wrote more fields."""
    names = [each.name for each in fields(UnknownTokens)]
    values: list[Any] = [record.get(name, 0) for name in names] if isinstance(record, dict) else []
    return UnknownTokens(*values) if all(type(value) is int for value in values) else UnknownTokens()


_COLUMNS = ("messages", "text")
_OTHER_SPLIT = re.compile(r"(^|[-_.])(test|val|valid|validation|dev|eval)([-_.]|$)", re.IGNORECASE)
_BINARY = (".parquet", ".arrow")
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLE = "assistant"


def is_records(path: Path) -> bool:
    """Whether a file has records, by its suffix."""
    return path.suffix.lower() in _READERS


def is_text(path: Path) -> bool:
    """Whether a file's bytes are text."""
    return path.suffix.lower() not in _BINARY


def files_of(path: Path) -> list[Path]:
    """The file itself; for a folder all its files with records, or all files if it has none, sorted by path.

    Hidden files and ``__pycache__`` are skipped. A .bin/.idx pair is represented by its .idx.

    Raises ValueError if the folder is empty.
    """
    if not path.is_dir():
        return [path]
    inside = sorted(
        (file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path))),
        key=lambda file: file.relative_to(path).as_posix(),
    )
    pairs = {file.with_suffix(".bin") for file in inside if file.suffix == ".idx"}
    files = [file for file in inside if file not in pairs]
    records = [file for file in files if is_records(file) and file.suffix.lower() != ".json"]
    files = records or files
    if not files:
        raise ValueError(
            f"data.paths has {str(path)!r}, a folder without files: give files of text or records."
        )
    other = next((str(file) for file in files if _OTHER_SPLIT.search(file.name)), None)
    if other:
        warn_user(
            f"data.paths has the folder {str(path)!r}, and all its {len(files)} files are learned, {other!r} too: if it"
            " is a split of its own, give the training files by their names."
        )
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def read_documents(path: Path, tokenizer: Tokenizer, rules: DocumentRules) -> Iterator[Document]:
    """The documents of a file, in order: pieces of a text, or the text or chat of each record.

    Records without text (null or empty) are skipped.

    Raises ValueError, with the file and the record, if the file cannot be read, lacks the column, or if the value is
    neither text nor a chat that the tokenizer's template accepts.
    """
    if not is_records(path):
        if rules.loss != "all":
            raise ValueError(f"data.loss={rules.loss} and {str(path)!r}, which has no chats: {_CHATS}.")
        with open_file(path) as stream:
            yield from map(Document, pieces(stream, rules.piece_bytes))
        return
    records = _READERS[path.suffix.lower()](path)
    for number, record in enumerate(records, 1):
        try:
            yield from _record_documents(record, tokenizer, rules)
        except ValueError as error:
            reason = "it holds half of a character" if isinstance(error, UnicodeEncodeError) else error
            raise ValueError(
                f"data.paths has {str(path)!r}, and of its record {number}: {reason}."
            ) from error


_CHATS = "give records with messages, or leave data.loss out"


def _record_documents(record: Any, tokenizer: Tokenizer, rules: DocumentRules) -> list[Document]:
    if not isinstance(record, dict):
        raise ValueError(f"it is no object, but {type(record).__name__}")
    columns = (rules.column,) if rules.column else _COLUMNS
    present = [name for name in columns if name in record]
    if not present:
        raise ValueError(
            f"it has no {' and no '.join(columns)} (it has {', '.join(map(str, record)) or 'nothing'}): name the column"
            " with --data.column=NAME"
        )
    name = next((name for name in present if record[name] is not None), present[0])
    value = record[name]
    if value is None or value == "" or value == []:
        return []
    if isinstance(value, str):
        if rules.loss != "all":
            raise ValueError(f"data.loss={rules.loss} and {name} is a text: {_CHATS}")
        return [Document(value.encode())]
    if not isinstance(value, list) or not all(
        isinstance(message, dict) and "role" in message for message in value
    ):
        raise ValueError(
            f"{name} is {type(value).__name__}, and neither a text nor a list of messages with a role"
        )
    if tokenizer.chat is None:
        raise ValueError(
            f"{name} is a chat, and the tokenizer has no chat template: give --data.tokenizer=tokenizer.json, with its"
            " tokenizer_config.json or chat_template.jinja beside it"
        )
    # Parquet gives each message the keys of all messages.
    messages = [
        {key: item for key, item in message.items() if item is not None or key == "content"}
        for message in value
    ]
    tools = record.get("tools")
    return chat_documents(
        messages, tools if isinstance(tools, list) else None, tokenizer.chat, loss=rules.loss
    )


def _lines(path: Path) -> Iterator[Any]:
    with open_file(path) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"data.paths has {str(path)!r}, whose line {number} is no JSON ({error})."
                ) from error


def _rows(path: Path, delimiter: str) -> Iterator[Any]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # 128 KiB by default
    with open_file(path) as stream:
        rows = csv.DictReader(io.TextIOWrapper(stream, "utf-8-sig", newline=""), delimiter=delimiter)
        try:
            yield from rows
        except csv.Error as error:
            raise ValueError(
                f"data.paths has {str(path)!r}, whose line {rows.line_num} is no CSV ({error})."
            ) from error


def _table(path: Path, form: str) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"data.paths has {str(path)!r}, which the package datasets reads: run pip install datasets, or give JSONL."
        ) from error
    try:
        yield from datasets.load_dataset(form, data_files=[escape(str(path))], split="train", streaming=True)
    except Exception as error:  # errors of pyarrow and of datasets
        reason = " ".join(str(error).split())
        raise ValueError(
            f"data.paths has {str(path)!r}, which cannot be read as {form} ({reason})."
        ) from error


_READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _lines,
    ".ndjson": _lines,
    ".csv": partial(_rows, delimiter=","),
    ".tsv": partial(_rows, delimiter="\t"),
    ".json": partial(_table, form="json"),
    ".parquet": partial(_table, form="parquet"),
    ".arrow": partial(_table, form="arrow"),
}


# ----------------------------------------------------------------------------------------------- chats


def chat_documents(
    messages: Sequence[Mapping[str, Any]], tools: Any, template: ChatTemplate, *, loss: str
) -> list[Document]:
    """The documents of one chat, each with the characters whose tokens have a loss.

    A template with ``{% generation %}`` marks the assistant's text itself. With other templates, an answer is what the
    template appends to the prompt: the earlier messages with add_generation_prompt. Some templates change earlier
    answers once later messages follow (Qwen3 removes their reasoning). Then each answer ends a separate document, as
    in use of the model.

    Args:
        messages: each with ``role`` and ``content``.
        tools: for the template; None: none.
        loss: 'all', or 'assistant' for the assistant's part only.

    Raises ValueError if transformers is not installed, if the template rejects the chat, or if an answer's text does
    not begin with its prompt.
    """
    if loss == "all":
        text = _render(messages, tools, template)[0]
        return [_document(text, [(0, len(text))])]
    if _MARKS.search(template.template):
        text, spans = _render(messages, tools, template, return_assistant_tokens_mask=True)
        return [_document(text, spans)]
    answers = []
    for index, message in enumerate(messages):
        if message.get("role") == _ROLE:
            prompt = _render(messages[:index], tools, template, add_generation_prompt=True)[0]
            text = _render(messages[: index + 1], tools, template)[0]
            if not text.startswith(prompt):
                raise ValueError(
                    f"the chat template does not begin the text up to message {index + 1} with the text that asks for"
                    " it, so that where the assistant's part begins is not known: give a template with"
                    " {% generation %} marks, or leave data.loss out"
                )
            answers.append((text, (len(prompt), len(text))))
    whole = _render(messages, tools, template)[0]
    if all(whole.startswith(text) for text, _ in answers):
        return [_document(whole, [span for _, span in answers])]
    return [_document(text, [span]) for text, span in answers]


def _document(text: str, spans: Sequence[tuple[int, int]]) -> Document:
    return Document(text.encode(), tuple((first, last) for first, last in spans))


def _render(
    messages: Sequence[Mapping[str, Any]], tools: Any, template: ChatTemplate, **options: bool
) -> tuple[str, list[tuple[int, int]]]:
    """The text as transformers renders it, and its marked spans."""
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        raise ValueError(
            "chats need the package transformers: run pip install transformers, or give texts"
        ) from error
    try:
        (text,), spans = render_jinja_template(
            [list(messages)], tools, chat_template=template.template, **options, **template.special
        )
    except Exception as error:  # a template is code and may raise anything
        raise ValueError(f"the tokenizer's chat template refuses it ({error})") from error
    return text, spans[0] if spans else []
