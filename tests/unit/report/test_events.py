"""Events: stretches of skipped steps, and what a run wrote."""

import json

import pytest

from megatron_fp8.files.records import read_lines
from megatron_fp8.report.curves import Event, guard_moves, recorded_events, skipped_steps


def lines(tmp_path, objects):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return read_lines(path)


def test_skipped_steps_in_a_row_are_one_event(tmp_path):
    skipped = {3: 12, 4: 0, 7: 0, 9: 1}
    metrics = [
        {"iteration": i, "skipped": int(i in skipped), "nonfinite": skipped.get(i, 0)} for i in range(1, 10)
    ]
    metrics.append({"iteration": 9, "skipped": 0})  # done again, by a resumed run
    assert skipped_steps(lines(tmp_path, metrics)) == [
        Event(3, 4, "skip", "2 steps skipped; FP8 casts met 12 values that were NaN or infinite"),
        Event(7, 7, "skip", "step skipped"),
    ]


def test_what_a_run_wrote(tmp_path):
    written = [{"iteration": 5, "event": "guard", "text": "fc1 goes to BF16"}]
    assert recorded_events(lines(tmp_path, written)) == [Event(5, 5, "guard", "fc1 goes to BF16")]
    with pytest.raises(ValueError, match=r"line 2 of .* has text None"):
        recorded_events(lines(tmp_path, [*written, {"iteration": 6, "event": "guard"}]))


def test_what_the_guard_moved():
    move = {"site": "fc1", "to": "bf16", "iteration": 9, "why": "input saturates"}
    assert guard_moves({"guard": [move]}, "r") == [Event(10, 10, "guard", "fc1 to bf16: input saturates")]
    assert guard_moves({}, "r") == []
    with pytest.raises(ValueError, match="the guard's moves"):
        guard_moves({"guard": [{"site": "fc1"}]}, "r")
