"""Bigram entropy of a corpus: a bound for models with one token of context.

A loss below it shows that the model uses more context than the last token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .corpus import check_indexed

_TABLE = 1 << 10  # largest vocabulary whose pairs are counted in a table: 8 MiB
_PIECE = 1 << 20  # tokens counted at once


def bigram_entropy(tokens: np.ndarray) -> float:
    """H(next token | token) in nats, from the counts of neighbouring pairs in `tokens` [n], any integer dtype.

    0.0 when there are fewer than two tokens.
    """
    if len(tokens) < 2:
        return 0.0
    width = int(tokens.max()) + 1
    pairs, singles = (_by_table if width <= _TABLE else _by_sort)(tokens, width)
    # H(b | a) = H(a, b) - H(a), with p log p summed over counts and the common total factored out.
    return float((_sum_n_log_n(singles) - _sum_n_log_n(pairs)) / (len(tokens) - 1))


def _by_table(tokens: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts of each pair and of each first token, from a table of all pairs, without a sort."""
    table = np.zeros(width * width, np.int64)
    for start in range(0, len(tokens) - 1, _PIECE):
        piece = tokens[start : start + _PIECE + 1].astype(np.int64)
        table += np.bincount(piece[:-1] * width + piece[1:], minlength=len(table))
    singles = table.reshape(width, width).sum(1)
    return table[table > 0], singles[singles > 0]


def _by_sort(tokens: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The same counts, for vocabularies whose table would be larger than the data."""
    first = tokens[:-1].astype(np.int64)
    _, pairs = np.unique(first * width + tokens[1:], return_counts=True)
    return pairs, np.unique(first, return_counts=True)[1]


def _sum_n_log_n(counts: np.ndarray) -> float:
    counts = counts.astype(np.float64)
    return float((counts * np.log(counts)).sum())


def corpus_bigram_entropy(prefixes: list[str], most: int = 2**25) -> float:
    """Bigram entropy, in nats, of the first `most` tokens of the data of `prefixes`, joined in order.

    More tokens would not change the printed figure, and a large corpus does not fit into memory.
    """
    parts: list[np.ndarray] = []
    for prefix in prefixes:
        room = most - sum(map(len, parts))
        file, dtype = Path(prefix + ".bin"), check_indexed(prefix).dtype
        # NumPy allocates `count` values, even if the file has fewer.
        parts.append(np.fromfile(file, dtype=dtype, count=min(room, file.stat().st_size // dtype.itemsize)))
    return bigram_entropy(parts[0] if len(parts) == 1 else np.concatenate(parts))
