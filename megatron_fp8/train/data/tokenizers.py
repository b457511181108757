"""Tokenizers: text to token ids, with the attributes that Megatron-Core's datasets use."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...files.atomic_io import as_value_error, error_text, read_regular
from ...files.strict_json import load_json

_LARGEST = 1 << 28
"""Limit in bytes of a tokenizer's files."""


Spans = Sequence[tuple[int, int]]
"""Ranges [first, last) of characters."""


class ChatTemplate(NamedTuple):
    """A Jinja template that turns a chat's messages into text, and the special tokens that it may use."""

    template: str
    special: dict[str, str]


class Tokenizer(Protocol):
    """Interface for data preparation and `GPTDataset`. Ids are in [0, vocab_size).

    A document is ``start``, its text, ``eod``; a model that generates one of ``ends`` has finished. ``unknown`` is the
    id for text without other ids; None: it has none. ``chat``: None if there is no chat template.
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
        """Ids of `text` [bytes] as an integer array [n], without the end of document."""

    def encode_with_mask(self, text: bytes, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        """``encode``, and a mask uint8 [n]: 1 for ids with a character in ``spans``, else 0."""

    def left_out(self, text: bytes) -> int:
        """Number of characters of `text`, except white space, that `encode` drops because no id represents them."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without the end of document; invalid or incomplete UTF-8 becomes U+FFFD."""


BYTES = "bytes"
"""The value of data.tokenizer for bytes as tokens."""


class ByteTokenizer:
    """Every byte is a token (ids 0-255); 256 ends a document."""

    vocab_size = 257
    eod = 256
    ends: frozenset[int] = frozenset({256})
    start: tuple[int, ...] = ()
    pad = -1  # nothing is padded; -1 is not an id, so no token is masked by mistake
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
    """A Hugging Face `tokenizers` file (tokenizer.json). Text is decoded as UTF-8, invalid bytes as U+FFFD.

    Files beside it count too, as for Hugging Face's readers. The end of document is the eos_token of
    tokenizer_config.json (or special_tokens_map.json), else the first of the usual names that the file has
    ('<|endoftext|>', '<|end_of_text|>', '</s>', '<eos>', '[SEP]'), else the first eos_token_id of
    generation_config.json, else one id above the file's largest. A document starts with the ids that the file's
    post-processor puts before a text, or with tokenizer_config.json's bos_token if add_bos_token is set. A chat model
    ends its turn with other tokens: eos_token_id of generation_config.json. The file's truncation and padding are
    ignored. The chat template is chat_template.jinja, or tokenizer_config.json's.

    Raises ValueError if a file cannot be read, or names a token outside the vocabulary.
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
        with as_value_error(f"data.tokenizer={str(path)!r} cannot be read", ": give another file."):
            content = read_regular(Path(path), _LARGEST)
        # The package raises plain Exception.
        what = f"data.tokenizer={str(path)!r} is not a Hugging Face tokenizers file"
        with as_value_error(what, ": give a tokenizer.json.", Exception):
            self._tokenizer = HuggingFaceTokenizer.from_buffer(content)
        # A file may have settings for truncation and padding; documents are complete.
        truncates = self._tokenizer.truncation is not None or self._tokenizer.padding is not None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        size = max(ids, default=-1) + 1  # ids may have gaps
        ends = [self._tokenizer.token_to_id(name) for name in self._END_NAMES]
        usual = next((end for end in ends if end is not None), None)
        self._path, self.unknown = path, _unknown(self._tokenizer)
        self._drops = self.unknown is None and _drops(self._tokenizer)
        beside = _SpecialTokens(Path(path), self._tokenizer)
        named = [each for each in (beside.eos, usual, *beside.ends[:1]) if each is not None]
        last = named[0] if named else None
        self.eod = size if last is None else last
        self.vocab_size = size + (last is None)
        self.ends = frozenset({self.eod, *beside.ends})
        self.start, self.chat = beside.start, beside.chat
        # It adds nothing here, and may remove white space from the tokens' offsets.
        self._tokenizer.post_processor = None
        self.name = f"json-{hashlib.sha256(content).hexdigest()[:16]}"
        if self.start or last != usual:  # the same file with other documents
            self.name += "-" + "-".join(map(str, (*self.start, self.eod)))
        # Under the name without this suffix, earlier versions truncated documents or miscounted ids.
        if truncates or size != len(ids):
            self.name += "-whole"
        self.unique_identifiers = {"tokenizer": self.name}

    def encode(self, text: bytes) -> np.ndarray:
        return np.asarray(self._encode(text.decode("utf-8", errors="replace")).ids, dtype=np.int64)

    def encode_with_mask(self, text: bytes, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        encoding = self._encode(text.decode("utf-8", errors="replace"))
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        mask = np.zeros(len(offsets), dtype=np.uint8)
        for first, last in spans:
            mask |= (offsets[:, 0] < last) & (offsets[:, 1] > first)
        return np.asarray(encoding.ids, dtype=np.int64), mask

    def left_out(self, text: bytes) -> int:
        if not self._drops:
            return 0
        characters = text.decode("utf-8", errors="replace")
        covered = np.zeros(len(characters), bool)
        for first, last in self._encode(characters).offsets:
            covered[first:last] = True
        return sum(not characters[place].isspace() for place in np.flatnonzero(~covered))

    def _encode(self, characters: str) -> Any:
        try:
            return self._tokenizer.encode(characters, add_special_tokens=False)
        except Exception as error:  # the package raises plain Exception
            raise ValueError(
                f"data.tokenizer={str(self._path)!r} cannot say all of the text ({error}): give a tokenizer with a token"
                " for the unknown, or the one for this text."
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        special = {*self.ends, *self.start}
        return self._tokenizer.decode([i for i in ids if i not in special], skip_special_tokens=False)


def _unknown(tokenizer: Any) -> int | None:
    """The id for unknown text; None if the tokenizer has none."""
    token = getattr(tokenizer.model, "unk_token", None)
    if isinstance(token, str):
        return tokenizer.token_to_id(token)
    if type(tokenizer.model).__name__ != "Unigram":
        return None
    unknown = json.loads(tokenizer.to_str())["model"].get("unk_id")  # which its Python object does not expose
    return unknown if type(unknown) is int else None


def _drops(tokenizer: Any) -> bool:
    """Whether a tokenizer without an unknown token may drop text: BPE without ids for every byte is the only model that
    raises no error."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = tokenizer.get_vocab().keys()
    falls_back = {f"<0x{byte:02X}>" for byte in range(256)} <= vocabulary and tokenizer.model.byte_fallback
    is_bpe = type(tokenizer.model).__name__ == "BPE"
    return is_bpe and not falls_back and not set(ByteLevel.alphabet()) <= vocabulary


class _SpecialTokens:
    """Start and end tokens, and the chat template, from the files beside a tokenizer.json."""

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
            known = type(end) is int and 0 <= end < 2**32  # the package's range of ids
            if not known or tokenizer.id_to_token(end) is None:
                raise ValueError(
                    f"{str(path.with_name('generation_config.json'))!r} has eos_token_id={ends!r}: ids of"
                    f" {path.name}'s vocabulary are needed."
                )

    def _start(self, config: dict[str, Any]) -> tuple[int, ...]:
        setting = config.get("add_bos_token")
        if setting is False:
            return ()
        before = self._prefix_ids()
        first = self._id(config, "bos_token") if setting and not before else None
        return before if first is None else (first,)

    def _chat(self, config: dict[str, Any]) -> ChatTemplate | None:
        """chat_template.jinja, else tokenizer_config.json's chat_template; of several, the one named default."""
        template = config.get("chat_template")
        if isinstance(template, list):
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        path = self._path.with_name("chat_template.jinja")
        if path.is_file():
            with as_value_error(
                f"{str(path)!r} cannot be read", ": put another in its place.", (OSError, ValueError)
            ):
                template = read_regular(path, _LARGEST).decode()
        if not isinstance(template, str):
            return None
        tokens = {name: value for name, value in config.items() if name.endswith("_token")}
        token_texts = {
            name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()
        }
        return ChatTemplate(
            template, {name: token for name, token in token_texts.items() if isinstance(token, str)}
        )

    def _prefix_ids(self) -> tuple[int, ...]:
        """Ids that the post-processor puts before a text; they belong to no sequence."""
        for text in itertools.chain("a", itertools.islice(self._tokenizer.get_vocab(), 100)):
            try:
                encoding = self._tokenizer.encode(text, add_special_tokens=True)
            except Exception:  # the package raises plain Exception for a text without tokens
                continue
            of_text = [n for n, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
            if of_text:
                return tuple(encoding.ids[: of_text[0]])
        return ()

    def _id(self, config: dict[str, Any], name: str) -> int | None:
        """The id of a token in tokenizer_config.json, given as a text or as an object with its content."""
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            return None
        token_id = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if token_id is None:
            raise ValueError(
                f"{str(self._path.with_name('tokenizer_config.json'))!r} has {name}={token!r}, which {self._path.name}"
                " does not know."
            )
        return int(token_id)

    def _read(self, name: str) -> dict[str, Any]:
        path = self._path.with_name(name)
        try:
            content = load_json(read_regular(path, _LARGEST))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{str(path)!r}, beside data.tokenizer={str(self._path)!r}, cannot be read ({error_text(error)}):"
                " put another in its place, or remove it."
            ) from error
        if not isinstance(content, dict):
            raise ValueError(
                f"{str(path)!r}, beside data.tokenizer={str(self._path)!r}, is not an object, but"
                f" {type(content).__name__}: put another in its place, or remove it."
            )
        return content


def tokenizer_file(path: str | None, checkpoint: Path) -> str | None:
    """Path of a checkpoint's tokenizer: the config's path if it is a file, else the file in the run's folder.

    An imported run has it there, and its config has a relative path, which is wrong after the run has moved. None:
    bytes.
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
