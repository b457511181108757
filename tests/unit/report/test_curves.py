"""Curves: what is no number is a gap with a word, and a long curve keeps its extremes."""

import json
import math

import numpy as np

from megatron_fp8.files.records import read_lines
from megatron_fp8.report.curves import QUANTITIES, Curve, read_curves


def read(tmp_path, lines, quantities=QUANTITIES):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_curves(read_lines(path), quantities)


def test_gaps_say_what_stands_there_and_where(tmp_path):
    values = [1.0, None, None, math.nan, 2.0, math.inf, -math.inf]
    lines = [{"iteration": i, "lm_loss": value, "mtp_loss": None} for i, value in enumerate(values, 1)]
    found = read(tmp_path, lines)
    assert set(found) == {"lm_loss"}  # of the other there is not one number
    curve = found["lm_loss"]
    assert curve.gaps == ((2, 3, "null"), (4, 4, "NaN"), (6, 6, "Infinity"), (7, 7, "-Infinity"))
    assert curve.finite.tolist() == [1.0, 2.0] and np.isnan(curve.values[[1, 2, 3, 5, 6]]).all()


def test_the_last_of_two_lines_counts_and_the_order_is_that_of_iterations(tmp_path):
    lines = [{"iteration": i, "peak_memory": (10 + i) << 20} for i in (3, 1, 2)] + [
        {"iteration": 2, "peak_memory": 5 << 20}
    ]
    curve = read(tmp_path, lines)["peak_memory"]
    assert curve.iterations.tolist() == [1, 2, 3] and curve.values.tolist() == [11, 5, 13]


def test_a_long_curve_keeps_spikes():
    values = np.ones(100_000)
    values[[17, 99_998]], values[50_000:50_100] = (9.0, -9.0), np.nan
    x, y = Curve(np.arange(100_000), values, ()).thinned()
    assert len(x) <= 4000 and (np.diff(x) > 0).all()
    assert y[x == 17] == 9 and y[x == 99_998] == -9 and np.isnan(y).any()
