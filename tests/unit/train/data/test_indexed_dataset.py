"""Pairs that are counted in a table, and pairs that are sorted."""

import math
from collections import Counter
from unittest import mock

import numpy as np
import pytest

from megatron_fp8.train.data import indexed_dataset as bigram
from megatron_fp8.train.data.corpus import prepare
from megatron_fp8.train.data.tokenizers import ByteTokenizer


@pytest.mark.parametrize(("tokens", "dtype"), [(2, np.uint16), (9, np.int32), (1000, np.uint16)])
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


def test_the_bigram_entropy_reads_no_more_than_it_is_told(tmp_path):
    """A corpus of billions of tokens does not fit into memory."""
    (tmp_path / "a.txt").write_bytes(b"ab" * 50)
    (tmp_path / "b.txt").write_bytes(bytes(range(97, 117)) * 5)
    prefixes = [
        prepare([tmp_path / name], ByteTokenizer(), tmp_path / "cache") for name in ("a.txt", "b.txt")
    ]
    assert bigram.corpus_bigram_entropy(prefixes, most=100) == pytest.approx(0.0)
    assert bigram.corpus_bigram_entropy(prefixes) == bigram.corpus_bigram_entropy(prefixes, most=202) > 0
    with mock.patch.object(np, "fromfile", wraps=np.fromfile) as read:
        bigram.corpus_bigram_entropy(prefixes)
    # for all of which NumPy takes memory
    assert all(call.kwargs["count"] <= 202 for call in read.call_args_list)
