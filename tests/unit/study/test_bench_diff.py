"""Two measurements: what is called a change, and what noise."""

import json

import pytest

from megatron_fp8.study.bench import Change, changes, changes_table, check_comparable, read_earlier

ROW = {"section": "gemm", "k": 4, "n": 8, "tokens": 2, "contender": "mxfp8", "ratio": 0.8, "spread": 0.1}


@pytest.mark.parametrize(
    "before, now, noise, verdict",
    [
        (1.0, 1.2, 0.1, "slower"),
        (1.0, 0.8, 0.1, "faster"),
        (1.0, 1.1, 0.2, "within noise"),
        (1.0, 4.0, 145.68, "too noisy to tell"),
    ],
)
def test_a_change_is_one_beyond_both_spreads(before, now, noise, verdict):
    assert Change("cell", before, now, noise).verdict == verdict


def test_cells_are_matched_by_what_was_measured():
    other = {**ROW, "tokens": 3}
    (found,) = changes([ROW, other], [{**ROW, "ratio": 0.4, "spread": 0.2}, {**ROW, "k": 5}])
    assert (found.before, found.now) == (0.8, 0.4) and found.noise == pytest.approx(0.3)
    assert "Of 1 cells: 1 faster, 0 slower, 0 within noise." in changes_table([found])
    assert changes_table([]) == "No cell was measured in both."


@pytest.mark.parametrize(
    "content",
    [
        "{", json.dumps({"device": "x", "rows": [{**ROW, "ratio": 0}]}),
        json.dumps({"device": "x", "rows": [{**ROW, "spread": "wide"}]}),
    ],
)  # fmt: skip
def test_what_is_no_result_is_refused(tmp_path, content):
    path = tmp_path / "old.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="is no result of bench"):
        read_earlier(path)


def test_a_result_without_a_spread_is_refused(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"device": "x", "rows": [{**ROW, "spread": None}]}))
    with pytest.raises(ValueError, match="it has no spread, since it has fewer than 4 repetitions"):
        read_earlier(path)


def test_another_machine_is_refused(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"device": "A", "threads": 2, "rows": [ROW]}))
    old = read_earlier(path)
    check_comparable(old, {"device": "A", "threads": 2}, path)
    for key, value in (("device", "B"), ("threads", 1)):
        with pytest.raises(ValueError, match=f"is of {key}"):
            check_comparable(old, {"device": "A", "threads": 2} | {key: value}, path)
