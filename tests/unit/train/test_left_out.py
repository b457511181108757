"""Samples that are left out: where the others are, and the file that says so. Runs: tests/functional/test_rewind.py."""

from __future__ import annotations

import json
import random

import pytest

from megatron_fp8.train import left_out
from megatron_fp8.train.liveness import Liveness


@pytest.mark.parametrize("seed", range(5))
def test_places_are_those_that_remain(seed):
    dice = random.Random(seed)
    ranges = []
    for _ in range(dice.randrange(5)):
        first = dice.randrange(60)
        ranges.append((first, first + dice.randint(1, 9)))
    ranges = [r for i, r in enumerate(ranges) if not any(r[0] < o[1] and o[0] < r[1] for o in ranges[:i])]
    remaining = [i for i in range(200) if not any(first <= i < last for first, last in ranges)]
    assert [left_out.place(kept, ranges) for kept in range(100)] == remaining[:100]


def test_what_is_written_is_read(tmp_path):
    assert left_out.read(tmp_path) == []
    records = [{"first": 4, "last": 8, "iteration": 2, "went_back_to": 1, "why": "a spike"}]
    left_out.write(tmp_path, records)
    assert left_out.read(tmp_path) == records and left_out.ranges_of(records) == [(4, 8)]


@pytest.mark.parametrize(
    "content",
    [
        "", "{}", '""', "{}x", "[1]", "[[0, 9]]", '[{"first": 4}]', '[{"first": 8, "last": 8}]',
        '[{"first": -1, "last": 3}]', '[{"first": 0, "last": 1e400}]', '[{"first": 0.9, "last": 2.7}]',
        '[{"first": false, "last": true}]', '[{"first": 0, "last": "9"}]', "[" * 99_999,
        '[{"first": 0, "last": 9}, {"first": 0, "last": 9}]', '[{"first": 5, "last": 9}, {"first": 0, "last": 6}]',
    ],
)  # fmt: skip
def test_a_file_that_says_something_else_is_named(tmp_path, content):
    (tmp_path / left_out.FILE).write_text(content)
    with pytest.raises(ValueError, match=r"left_out\.json' .*remove it to read them all"):
        left_out.read(tmp_path)


def test_a_judge_with_a_restored_memory_judges_alike():
    losses = [6.0, 5.0, 4.0, 3.5, 3.2, 3.0, 12.0, 3.1]
    whole, resumed = Liveness(10), Liveness(10)
    for i, loss in enumerate(losses[:5]):
        whole.step(i, loss, skipped=False, curable=False)
    resumed.remember(json.loads(json.dumps(whole.memory())))
    for i, loss in enumerate(losses[5:], 5):
        for live in (whole, resumed):
            live.step(i, loss, skipped=False, curable=False)
        assert whole.now == resumed.now and bool(whole.now) == (loss > 10)
