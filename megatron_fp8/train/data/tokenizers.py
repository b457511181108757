"""Text to token ids, with the few attributes Megatron-Core's datasets ask of a tokenizer."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...files.disk import in_words, read_ordinary
from ...files.strict_json import load_json

_LARGEST = 1 << 28
"""Bytes of a file that describes a tokenizer."""


Spans = Sequence[tuple[int, int]]
"""[first, last) characters."""


class ChatTemplate(NamedTuple):
    """A Jinja template that makes one text of a chat's messages, and the special tokens that it may name."""

    template: str
    special: dict[str, str]


class Tokenizer(Protocol):
    """What data preparation and `GPTDataset` need. Ids are in [0, vocab_size).

    A document is ``start``, its text, ``eod``; a model that wrote one of ``ends`` has finished. ``unknown`` stands for
    what no other id can say; None: there is no such text. ``chat``: None, it has no template for chats.
    """

    vocab_size: int
    eod: int
    ends: frozenset[int]
    start: tuple[int, ...]
    pad: int
    unknown: int | None
    chat: ChatTemplate | None
    name: str
    unique_identifiers: dict[str, str]

    def encode(self, text: bytes) -> np.ndarray:
        """Ids of `text` [bytes] as a 1-D integer array, without the end of document."""

    def encode_with_mask(self, text: bytes, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        """``encode``, and for each id 1 where it has a character of ``spans``, else 0: uint8 of the same length."""

    def left_out(self, text: bytes) -> int:
        """Characters of `text` that `encode` passes over, white space aside: no id says them, none is for the unknown."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; what is not UTF-8 (yet) as U+FFFD, the end of document left out."""


BYTES = "bytes"
"""What data.tokenizer says where every byte is a token."""


class ByteTokenizer:
    """Every byte is a token (ids 0-255); 256 ends a document."""

    vocab_size = 257
    eod = 256
    ends: frozenset[int] = frozenset({256})
    start: tuple[int, ...] = ()
    pad = -1  # nothing is padded; -1 is no id, so no token is masked by mistake
    unknown: int | None = None
    chat: ChatTemplate | None = None
    name = BYTES

    def __init__(self) -> None:
        self.unique_identifiers = {"tokenizer": self.name}

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)

    def encode_with_mask(self, text: bytes, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        raise AssertionError("bytes have no template for chats, whose spans these are")

    def left_out(self, text: bytes) -> int:
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A Hugging Face `tokenizers` file (tokenizer.json). Text is decoded as UTF-8, wrong bytes as U+FFFD.

    What stands beside the file counts, as it does for Hugging Face's readers. The end of document is the eos_token of
    tokenizer_config.json (or special_tokens_map.json), else the first of the usual names that the file has
    ('<|endoftext|>', '<|end_of_text|>', '</s>', '<eos>', '[SEP]'), else the first eos_token_id of generation_config.json,
    else one id more than the file's largest. A document starts with what the file's post-processor puts before a text, or
    with tokenizer_config.json's bos_token where add_bos_token says so. A chat model ends its turn with other tokens:
    eos_token_id of generation_config.json. The file's truncation and padding are left out. The template for chats is
    chat_template.jinja, or tokenizer_config.json's.

    Raises ValueError: a file cannot be read, or names a token that the vocabulary lacks.
    """

    pad = -1
    _END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

    def __init__(self, path: str | Path) -> None:
        try:
            from tokenizers import Tokenizer as HuggingFaceTokenizer
        except ImportError as error:
            raise ValueError(
                f"data.tokenizer={str(path)!r} needs the package 'tokenizers': run pip install tokenizers, "
                "or leave data.tokenizer out to train on bytes."
            ) from error
        if not os.path.isfile(path):
            raise ValueError(
                f"data.tokenizer={str(path)!r} is not a file: give the path of a tokenizer.json."
            )
        try:
            content = read_ordinary(Path(path), _LARGEST)
        except OSError as error:
            raise ValueError(
                f"data.tokenizer={str(path)!r} cannot be read ({in_words(error)}): give another file."
            ) from error
        try:
            self._tokenizer = HuggingFaceTokenizer.from_buffer(content)
        except Exception as error:  # the package raises plain Exception
            raise ValueError(
                f"data.tokenizer={str(path)!r} is not a Hugging Face tokenizers file ({error}): give a "
                f"tokenizer.json."
            ) from error
        # A file may say how one text was cut and filled up for another use; a document is whole.
        cut = self._tokenizer.truncation is not None or self._tokenizer.padding is not None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        size = max(ids, default=-1) + 1  # ids may leave gaps
        ends = [self._tokenizer.token_to_id(name) for name in self._END_NAMES]
        usual = next((end for end in ends if end is not None), None)
        self._path, self.unknown = path, _unknown(self._tokenizer)
        self._passes_over = self.unknown is None and not _says_all(self._tokenizer)
        beside = _Beside(Path(path), self._tokenizer)
        named = [each for each in (beside.eos, usual, *beside.ends[:1]) if each is not None]
        last = named[0] if named else None
        self.eod = size if last is None else last
        self.vocab_size = size + (last is None)
        self.ends = frozenset({self.eod, *beside.ends})
        self.start, self.chat = beside.start, beside.chat
        # It adds nothing here, and may take white space out of the places of tokens.
        self._tokenizer.post_processor = None
        self.name = f"json-{hashlib.sha256(content).hexdigest()[:16]}"
        if self.start or last != usual:  # the same file, and other documents
            self.name += "-" + "-".join(map(str, (*self.start, self.eod)))
        # Earlier versions cut documents, or counted ids, under the name without it; their prepared data is another.
        if cut or size != len(ids):
            self.name += "-whole"
        self.unique_identifiers = {"tokenizer": self.name}

    def encode(self, text: bytes) -> np.ndarray:
        return np.asarray(self._encoded(text.decode("utf-8", errors="replace")).ids, dtype=np.int64)

    def encode_with_mask(self, text: bytes, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        found = self._encoded(text.decode("utf-8", errors="replace"))
        places = np.asarray(found.offsets, dtype=np.int64).reshape(-1, 2)
        mask = np.zeros(len(places), dtype=np.uint8)
        for first, last in spans:
            mask |= (places[:, 0] < last) & (places[:, 1] > first)
        return np.asarray(found.ids, dtype=np.int64), mask

    def left_out(self, text: bytes) -> int:
        if not self._passes_over:
            return 0
        words = text.decode("utf-8", errors="replace")
        edges = np.zeros(len(words) + 1, np.int64)
        for start, end in self._encoded(words).offsets:
            edges[start] += 1
            edges[end] -= 1
        said = np.cumsum(edges)[:-1] > 0
        return sum(not words[place].isspace() for place in np.flatnonzero(~said))

    def _encoded(self, words: str) -> Any:
        try:
            return self._tokenizer.encode(words, add_special_tokens=False)
        except Exception as error:  # the package raises plain Exception
            raise ValueError(
                f"data.tokenizer={str(self._path)!r} cannot say all of the text ({error}): give a tokenizer with a token"
                " for the unknown, or the one for this text."
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        silent = {*self.ends, *self.start}
        return self._tokenizer.decode([i for i in ids if i not in silent], skip_special_tokens=False)


def _unknown(tokenizer: Any) -> int | None:
    """The id that a tokenizer gives where it has no other; None if it always has."""
    token = getattr(tokenizer.model, "unk_token", None)
    if isinstance(token, str):
        return tokenizer.token_to_id(token)
    if type(tokenizer.model).__name__ != "Unigram":
        return None
    unknown = json.loads(tokenizer.to_str())["model"].get("unk_id")  # which its object does not show
    return unknown if type(unknown) is int else None


def _says_all(tokenizer: Any) -> bool:
    """Whether it has ids for every byte, or raises without: of the models BPE alone passes over what it lacks."""
    if type(tokenizer.model).__name__ != "BPE":
        return True
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = tokenizer.get_vocab().keys()
    fallback = {f"<0x{byte:02X}>" for byte in range(256)}
    return vocabulary >= set(ByteLevel.alphabet()) or (
        tokenizer.model.byte_fallback and vocabulary >= fallback
    )


class _Beside:
    """What the files beside a tokenizer.json say of the tokens that begin and end a text."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self._path, self._tokenizer = path, tokenizer
        files = [self._read(name) for name in ("special_tokens_map.json", "tokenizer_config.json")]
        config = {key: value for file in files for key, value in file.items() if value is not None}
        self.eos = self._id(config, "eos_token")
        self.start = self._start(config)
        self.chat = self._chat(config)
        ends = self._read("generation_config.json").get("eos_token_id")
        self.ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        for end in self.ends:
            known = type(end) is int and 0 <= end < 2**32  # what the package can be asked for
            if not known or tokenizer.id_to_token(end) is None:
                raise ValueError(
                    f"{str(path.with_name('generation_config.json'))!r} has eos_token_id={ends!r}: ids of"
                    f" {path.name}'s vocabulary are needed."
                )

    def _start(self, config: dict[str, Any]) -> tuple[int, ...]:
        wanted = config.get("add_bos_token")
        if wanted is False:
            return ()
        before = self._added_before()
        first = self._id(config, "bos_token") if wanted and not before else None
        return before if first is None else (first,)

    def _chat(self, config: dict[str, Any]) -> ChatTemplate | None:
        """chat_template.jinja, else tokenizer_config.json's chat_template, of several the one called default."""
        template = config.get("chat_template")
        if isinstance(template, list):
            template = next((one["template"] for one in template if one.get("name") == "default"), None)
        path = self._path.with_name("chat_template.jinja")
        if path.is_file():
            try:
                template = read_ordinary(path, _LARGEST).decode()
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{str(path)!r} cannot be read ({in_words(error)}): put another in its place."
                ) from error
        if not isinstance(template, str):
            return None
        tokens = {name: value for name, value in config.items() if name.endswith("_token")}
        named = {
            name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()
        }
        return ChatTemplate(
            template, {name: token for name, token in named.items() if isinstance(token, str)}
        )

    def _added_before(self) -> tuple[int, ...]:
        """Ids that the post-processor puts before a text: they belong to none of its sequences."""
        for text in itertools.chain("a", itertools.islice(self._tokenizer.get_vocab(), 100)):
            try:
                found = self._tokenizer.encode(text, add_special_tokens=True)
            except Exception:  # the package raises plain Exception where a text has no token
                continue
            of_text = [n for n, sequence in enumerate(found.sequence_ids) if sequence is not None]
            if of_text:
                return tuple(found.ids[: of_text[0]])
        return ()

    def _id(self, config: dict[str, Any], name: str) -> int | None:
        """The id of a token that tokenizer_config.json names, as a text or as an object with its content."""
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            return None
        found = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if found is None:
            raise ValueError(
                f"{str(self._path.with_name('tokenizer_config.json'))!r} has {name}={token!r}, which {self._path.name}"
                " does not know."
            )
        return int(found)

    def _read(self, name: str) -> dict[str, Any]:
        path = self._path.with_name(name)
        try:
            found = load_json(read_ordinary(path, _LARGEST))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{str(path)!r}, beside data.tokenizer={str(self._path)!r}, cannot be read ({in_words(error)}):"
                " put another in its place, or remove it."
            ) from error
        if not isinstance(found, dict):
            raise ValueError(
                f"{str(path)!r}, beside data.tokenizer={str(self._path)!r}, is not an object, but"
                f" {type(found).__name__}: put another in its place, or remove it."
            )
        return found


def tokenizer_file(path: str | None, checkpoint: Path) -> str | None:
    """Where the tokenizer of a checkpoint's run is: as its config says, or, where that is no file, in the run's folder.

    An imported run has it there, and its config's path is relative: to another working directory, once it is moved.
    None: it is bytes.
    """
    if path in (None, BYTES):
        return None
    if os.path.isfile(path):
        return path
    beside = [folder / Path(path).name for folder in checkpoint.absolute().parents[:2]]
    return next((str(file) for file in beside if os.path.isfile(file)), path)


def load_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of `data.tokenizer`: a tokenizers file, or bytes when None or 'bytes'."""
    return ByteTokenizer() if path in (None, BYTES) else JsonTokenizer(path)
