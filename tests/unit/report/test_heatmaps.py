"""Telemetry as maps: every number in its place, what was not measured apart from what was null."""

import json

import pytest

from megatron_fp8.files.records import read_lines
from megatron_fp8.report.heatmaps import ABSENT, NULL, Statistics, definition, read_statistics, values_of


def read(tmp_path, lines, order=()):
    path = tmp_path / "telemetry.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_statistics(read_lines(path), order)


def line(iteration, site, tensor="input", **statistics):
    return {"iteration": iteration, "site": site, "tensor": tensor, **statistics}


def test_every_number_is_in_its_place(tmp_path):
    found = read(
        tmp_path,
        [
            line(20, "layers.10.fc1", cur_amax=4.0),
            line(10, "layers.2.fc1", cur_amax=1.0, sqnr_db=30),
            line(10, "layers.2.fc1", "wgrad", cur_amax=8.0),
            line(20, "layers.2.fc1", cur_amax=None),
            line(20, "layers.10.fc1", cur_amax=5.0),
        ],
    )
    assert found.sites == ("layers.2.fc1", "layers.10.fc1") and found.iterations.tolist() == [10, 20]
    assert list(found.maps) == [("input", "cur_amax"), ("input", "sqnr_db"), ("wgrad", "cur_amax")]
    amax = found.maps["input", "cur_amax"]
    assert (
        amax[0, 1] == NULL
        and amax[1, 0] == ABSENT
        and (values_of(amax)[0, 0], values_of(amax)[1, 1]) == (1, 5)
    )
    assert (found.maps["wgrad", "cur_amax"] == ABSENT).sum() == 3


def test_sites_come_in_the_models_order_and_none_is_none(tmp_path):
    lines = [line(1, site, x=1.0) for site in ("b.1", "a.10", "a.9", "z")]
    assert read(tmp_path, lines, order=["z", "b.1", "unused"]).sites == ("z", "b.1", "a.9", "a.10")
    assert read(tmp_path, lines[:0]) is None and read(tmp_path, [line(1, "a")]) is None


def test_coarser_columns_keep_what_stands_out(tmp_path):
    series = [1.0, 1.0, 1.0, 9.0, 1.0, None, 1.0]
    found = read(tmp_path, [line(10 * i, "a", x=value) for i, value in enumerate(series)]).coarser()
    assert (
        isinstance(found, Statistics) and found.iterations.tolist() == [0, 20, 40, 60] and found.merged == 2
    )
    codes = found.maps["input", "x"][0]
    assert values_of(codes)[[0, 1, 3]].tolist() == [1, 9, 1] and codes[2] == NULL


def test_what_a_statistic_says():
    assert "percent" in definition("underflows%") and definition("unheard_of") == ""
    assert definition("mxfp8_underflows%_columnwise").startswith(definition("underflows%"))
    assert "with mxfp8. Of the codes of the transposed" in definition("mxfp8_underflows%_columnwise")


def test_partial_sums_are_a_tensor_of_their_own_and_what_went_bad_is_an_event(tmp_path):
    lines = [line(5, "fc1", "output", partial=True, std=2.0), line(5, "fc1", "output", std=1.0)]
    lines.append(line(10, "fc1", "output", std=1.0, went_bad=["underflows", "nonfinite"]))
    found = read(tmp_path, lines)
    assert list(found.maps) == [("output", "std"), ("output (partial sums)", "std")]
    assert [(e.first, e.kind, e.text) for e in found.went_bad] == [
        (10, "went bad", "fc1 output: underflows"), (10, "went bad", "fc1 output: nonfinite"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"line 1 of .* a list of texts"):
        read(tmp_path, [line(5, "fc1", went_bad="x")])
