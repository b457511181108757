"""The bigram entropy of a corpus: what a model that looks at one token only can reach at best.

A loss below it shows that the model uses more context than the last token.
"""

from __future__ import annotations

import numpy as np


def bigram_entropy(tokens: np.ndarray) -> float:
    """H(next token | token) in nats, from the counts of neighbouring pairs in `tokens` [n], any integer dtype.

    0.0 when there are fewer than two tokens.
    """
    if len(tokens) < 2:
        return 0.0
    first = tokens[:-1].astype(np.int64)
    width = int(tokens.max()) + 1
    _, pairs = np.unique(first * width + tokens[1:], return_counts=True)
    _, singles = np.unique(first, return_counts=True)
    # H(b | a) = H(a, b) - H(a), with p log p summed over counts and the common total factored out.
    return float((_sum_n_log_n(singles) - _sum_n_log_n(pairs)) / (len(tokens) - 1))


def _sum_n_log_n(counts: np.ndarray) -> float:
    counts = counts.astype(np.float64)
    return float((counts * np.log(counts)).sum())
