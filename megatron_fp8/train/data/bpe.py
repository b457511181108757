"""A byte-level BPE tokenizer trained on a corpus, by the package tokenizers.

Byte-level: every text has ids, none is unknown. Before merging, text is split as by GPT-4's tokenizer
(https://github.com/openai/tiktoken, cl100k_base): words with the space before them, groups of three digits,
punctuation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .documents import DocumentRules, content_digest, is_text, read_documents
from .tokenizers import ByteTokenizer, ChatTemplate

END = "<|endoftext|>"
_CONTENTS = "{% for message in messages %}{{ message['content'] or '' }}\n{% endfor %}"
"""A template for a chat's contents alone: marks come from the template of a finished tokenizer."""
SMALLEST = 257
"""Smallest vocabulary: an id for each byte, and the end of document."""
LARGEST = 1 << 22
SAMPLE_BYTES = 256_000_000
"""Bytes read of a larger corpus, in documents spread over all of it: more data changes the merges little."""
_SPLIT = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


def train_bpe(
    files: Sequence[Path], vocab_size: int, column: str | None = None, *, progress: bool = False
) -> Any:
    """Train a tokenizers.Tokenizer of at most ``vocab_size`` ids; the first is the end of document.

    The same files give the same tokenizer. A small corpus has too few merges, and gives fewer ids.

    Args:
        files: texts or records, as in data.paths.
        vocab_size: from ``SMALLEST`` to ``LARGEST``.
        column: column of records, as data.column.

    Raises:
        ValueError: ``vocab_size`` is out of range, or a file cannot be read, is not text or lacks the column.
        ImportError: the package tokenizers is not installed.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST:
        raise ValueError(f"a vocabulary of {vocab_size} has no id for each byte: give at least {SMALLEST}.")
    if vocab_size > LARGEST:
        raise ValueError(
            f"a vocabulary of {vocab_size} ids is larger than any in use: give at most {LARGEST:,}."
        )
    tokenizer = Tokenizer(models.BPE())
    by_words = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by_words, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(sample(files, DocumentRules(column)), trainer)
    return tokenizer


def sample(files: Sequence[Path], rules: DocumentRules, most: int = SAMPLE_BYTES) -> Iterator[str]:
    """The documents of the files; beyond ``most`` bytes, every n-th one. Raises ValueError as `train_bpe`."""
    for path in files:
        content_digest(path, is_text=is_text(path))
    reader = ByteTokenizer()
    reader.chat = ChatTemplate(_CONTENTS, {})
    every = -(-sum(path.stat().st_size for path in files) // most)
    number = 0
    for path in files:
        for document in read_documents(path, reader, rules):
            if number % every == 0:
                yield document.text.decode()
            number += 1
