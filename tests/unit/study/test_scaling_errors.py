"""One tensor by every recipe: the fewer elements share a scale, the less an outlier costs; delayed scaling simulated; the
colours of pictures."""

import re

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron_fp8.recipe import RECIPES, DelayedScaling
from megatron_fp8.study import plots
from megatron_fp8.study import scaling_errors as scaling
from megatron_fp8.study.scaling_errors import MAGNITUDES, SETTINGS, simulate


def test_finer_scales_bear_larger_outliers():
    largest = {
        (q.recipe, q.rule.split()[1]): q for q in scaling.recipe_results() if q.outlier == scaling.SIZES[-1]
    }
    order = [("tensorwise", "tensor"), ("rowwise", "row"), ("blockwise", "1x128"), ("mxfp8", "1x32")]
    noise = [largest[key].ordinary_sqnr_db for key in order]
    lost = [largest[key].ordinary_flushed for key in order]
    assert noise == sorted(noise) and noise[-1] > noise[0] + 10
    assert lost == sorted(lost, reverse=True) and lost[0] > 0.1


def test_tensorwise_is_what_another_library_casts():
    x, where = scaling.outlier_tensor(65536)
    scale = np.float32(448) / np.float32(65536)
    y = (x.numpy() * scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / scale
    (mine,) = (q for q in scaling.recipe_results() if (q.recipe, q.outlier) == ("tensorwise", 65536))
    other = torch.from_numpy(y)
    assert abs(scaling.sqnr(x[~where], other[~where]) - mine.ordinary_sqnr_db) < 1e-3


@pytest.mark.parametrize("length, margin", [(1, 0), (4, 2)])
def test_scales_are_those_of_the_largest_remembered(length, margin):
    sizes = [1.0, 8.0, 1.0, 1.0, 1.0, 1.0, 0.25, 1.0]
    generator = torch.Generator().manual_seed(0)
    amaxes = [float((torch.randn(1, 4096, generator=generator) * size).abs().max()) for size in sizes]
    steps = simulate(DelayedScaling(amax_history_len=length, margin=margin), sizes)
    for i, step in enumerate(steps):
        # The first has no history and scales by its own amax; a history of n keeps the n latest.
        seen = amaxes[max(0, i - length) : i] if i else amaxes[:1]
        assert step.scale == pytest.approx(448 / 2.0**margin / max(seen), rel=1e-6), i


def test_a_jump_saturates_once_and_is_remembered_as_long_as_the_history():
    steps = simulate(SETTINGS["history 16, margin 0"], MAGNITUDES["spiky"])
    assert steps[20].saturated > 0.99 and steps[20].sqnr < 1
    assert all(step.sqnr < 15 and step.flushed > 0.1 for step in steps[21:37])
    assert steps[38].sqnr > 30


def test_a_margin_takes_in_growth():
    def saturated(name):
        return sum(step.saturated > 0 for step in simulate(SETTINGS[name], MAGNITUDES["growing"]))

    assert saturated("history 16, margin 0") > 40 and saturated("history 16, margin 1") == 0


def test_every_recipe_has_a_colour_of_its_own():
    assert set(plots.RECIPE_COLOURS) == {*RECIPES, "bf16"}
    for table in (plots.RECIPE_COLOURS, plots.FORMATS):
        assert len(set(table.values())) == len(table)


def test_a_recipe_of_a_program_has_a_colour():
    assert (
        re.fullmatch(r"C\d", plots.recipe_colour("of a program"))
        and plots.recipe_colour("mxfp8") == "#009e73"
    )
