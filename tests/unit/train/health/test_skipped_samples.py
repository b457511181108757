"""Samples that are left out: where the others are, and the file that says so. Runs: tests/functional/test_rewind.py."""

import json
import random

import pytest

from megatron_fp8.train.health import skipped_samples
from megatron_fp8.train.health.loss_spikes import LossMonitor


def test_places_are_those_that_remain():
    dice = random.Random(1)
    ranges = []
    for _ in range(dice.randrange(3, 5)):
        first = dice.randrange(60)
        ranges.append((first, first + dice.randint(1, 9)))
    ranges = [r for i, r in enumerate(ranges) if not any(r[0] < o[1] and o[0] < r[1] for o in ranges[:i])]
    remaining = [i for i in range(200) if not any(first <= i < last for first, last in ranges)]
    assert [skipped_samples.sample_position(kept, ranges) for kept in range(100)] == remaining[:100]


RECORDS = [{"first": 4, "last": 8, "iteration": 2, "went_back_to": 1, "why": "a spike"}]


def test_what_is_written_is_read(tmp_path):
    assert skipped_samples.read(tmp_path) == []
    skipped_samples.write(tmp_path, RECORDS)
    assert skipped_samples.read(tmp_path) == RECORDS and skipped_samples.ranges_of(RECORDS) == [(4, 8)]


def test_every_digit_that_is_another_one_is_found(tmp_path):
    skipped_samples.write(tmp_path, RECORDS)
    path = tmp_path / skipped_samples.FILE
    text = path.read_text()
    digits = [i for i, letter in enumerate(text) if letter.isdigit()]
    assert len(digits) > 30
    for i in digits:
        path.write_text(f"{text[:i]}{(int(text[i]) + 1) % 10}{text[i + 1 :]}")
        with pytest.raises(
            ValueError, match=r"left_out\.json' .*its checksum differs.*remove it to read them all"
        ):
            skipped_samples.read(tmp_path)


def test_a_link_to_somewhere_else_is_refused(tmp_path):
    skipped_samples.write(tmp_path / "..", RECORDS)
    (tmp_path / skipped_samples.FILE).symlink_to(tmp_path / ".." / skipped_samples.FILE)
    with pytest.raises(ValueError, match="is a link out of its folder"):
        skipped_samples.read(tmp_path)


def test_a_list_of_an_earlier_version_is_read_and_said(tmp_path):
    (tmp_path / skipped_samples.FILE).write_text(json.dumps(RECORDS))
    with pytest.warns(UserWarning, match=r"left_out\.json' is of an earlier version, which had no checksum"):
        assert skipped_samples.read(tmp_path) == RECORDS


def test_what_the_manifest_says_and_what_came_after_are_put_together(tmp_path):
    later = {"first": 20, "last": 24, "iteration": 9, "went_back_to": 8, "why": "a spike"}
    assert skipped_samples.merge_records(tmp_path, RECORDS) == RECORDS
    skipped_samples.write(tmp_path, [*RECORDS, later])
    assert (
        skipped_samples.merge_records(tmp_path, RECORDS)
        == skipped_samples.merge_records(tmp_path, [])
        == [*RECORDS, later]
    )


@pytest.mark.parametrize("other", [{"first": 4, "last": 9}, {"first": 5, "last": 8}])
def test_a_file_that_contradicts_the_manifest_is_refused(tmp_path, other):
    skipped_samples.write(tmp_path, [{**RECORDS[0], **other}])
    with pytest.raises(
        ValueError, match=r"left_out\.json' and the checkpoint's manifest contradict each other"
    ):
        skipped_samples.merge_records(tmp_path, RECORDS)


@pytest.mark.filterwarnings("ignore:.*of an earlier version")
@pytest.mark.parametrize(
    "content",
    [
        "", '{"left_out": []}', "[[0, 9]]", '[{"first": 4}]', '[{"first": 8, "last": 8}]', '[{"first": -1, "last": 3}]',
        '[{"first": 5, "last": 9}, {"first": 0, "last": 6}]',
    ],
)  # fmt: skip
def test_a_file_that_says_something_else_is_named(tmp_path, content):
    (tmp_path / skipped_samples.FILE).write_text(content)
    with pytest.raises(ValueError, match=r"left_out\.json' .*remove it to read them all"):
        skipped_samples.read(tmp_path)


def test_a_judge_with_a_restored_memory_judges_alike():
    losses = [6.0, 5.0, 4.0, 3.5, 3.2, 3.0, 12.0, 3.1]
    whole, resumed = LossMonitor(10), LossMonitor(10)
    for i, loss in enumerate(losses[:5]):
        whole.step(i, loss, skipped=False, scale_can_fall=False)
    resumed.remember(json.loads(json.dumps(whole.memory())))
    for i, loss in enumerate(losses[5:], 5):
        for live in (whole, resumed):
            live.step(i, loss, skipped=False, scale_can_fall=False)
        assert whole.spike_now == resumed.spike_now and bool(whole.spike_now) == (loss > 10)
