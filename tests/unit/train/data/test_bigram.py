"""Pairs that are counted in a table, and pairs that are sorted."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from megatron_fp8.train.data import bigram


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("tokens", [2, 8, 9, 10, 1000])
def test_both_ways_give_what_counting_by_hand_does(monkeypatch, tokens, dtype):
    text = np.random.default_rng(tokens).integers(0, 7, tokens).astype(dtype)
    pairs = Counter(zip(text[:-1].tolist(), text[1:].tolist(), strict=True))
    singles = Counter(text[:-1].tolist())
    expected = sum(n * math.log(singles[a] / n) for (a, _), n in pairs.items()) / (tokens - 1)
    monkeypatch.setattr(bigram, "_PIECE", 8)
    found = []
    for largest in (0, 7):
        monkeypatch.setattr(bigram, "_TABLE", largest)
        found.append(bigram.bigram_entropy(text))
    assert found[0] == found[1] == pytest.approx(expected)
