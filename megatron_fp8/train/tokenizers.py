"""Text to token ids, with the few attributes Megatron-Core's datasets ask of a tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """What data preparation and `GPTDataset` need. Ids are in [0, vocab_size); `eod` ends a document."""

    vocab_size: int
    eod: int
    pad: int
    name: str
    unique_identifiers: dict[str, str]

    def encode(self, text: bytes) -> np.ndarray:
        """Ids of `text` [bytes] as a 1-D integer array, without the end of document."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; what is not UTF-8 (yet) as U+FFFD, the end of document left out."""


class ByteTokenizer:
    """Every byte is a token (ids 0-255); 256 ends a document."""

    vocab_size = 257
    eod = 256
    pad = -1  # nothing is padded; -1 is no id, so no token is masked by mistake
    name = "bytes"

    def __init__(self) -> None:
        self.unique_identifiers = {"tokenizer": self.name}

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A Hugging Face `tokenizers` file (tokenizer.json). Text is decoded as UTF-8, wrong bytes as U+FFFD.

    The end of document is the first of the usual names that the file has ('<|endoftext|>', '</s>',
    '<|end_of_text|>',
    '<eos>', '[SEP]'), else one id more than the file's vocabulary.
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
        if not Path(path).is_file():
            raise ValueError(
                f"data.tokenizer={str(path)!r} is not a file: give the path of a tokenizer.json."
            )
        content = Path(path).read_bytes()
        try:
            self._tokenizer = HuggingFaceTokenizer.from_buffer(content)
        except Exception as error:  # the package raises plain Exception
            raise ValueError(
                f"data.tokenizer={str(path)!r} is not a Hugging Face tokenizers file ({error}): give a "
                f"tokenizer.json."
            ) from error
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        ends = [self._tokenizer.token_to_id(name) for name in self._END_NAMES]
        known = [end for end in ends if end is not None]
        self.eod = known[0] if known else size
        self.vocab_size = size if known else size + 1
        self.name = f"json-{hashlib.sha256(content).hexdigest()[:16]}"
        self.unique_identifiers = {"tokenizer": self.name}

    def encode(self, text: bytes) -> np.ndarray:
        ids = self._tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False).ids
        return np.asarray(ids, dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([i for i in ids if i != self.eod], skip_special_tokens=False)


def tokenizer_file(path: str | None, checkpoint: Path) -> str | None:
    """Where the tokenizer of a checkpoint's run is: as its config says, or, where that is no file, in the run's folder.

    An imported run has it there, and its config's path is relative: to another working directory, once it is moved.
    """
    if path is None or Path(path).is_file():
        return path
    beside = [folder / Path(path).name for folder in checkpoint.absolute().parents[:2]]
    return next((str(file) for file in beside if file.is_file()), path)


def load_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of `data.tokenizer`: a tokenizers file, or bytes when None."""
    return ByteTokenizer() if path is None else JsonTokenizer(path)
