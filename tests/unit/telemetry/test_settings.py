"""What to measure, where and when: which iterations, sites and names, and what is refused."""

from __future__ import annotations

import re

import pytest

from megatron_fp8.telemetry.settings import Selection, TelemetrySettings


def measured(selection: Selection, upto: int = 30) -> list[int]:
    return [iteration for iteration in range(upto) if selection.measures(iteration)]


def test_iterations():
    assert measured(Selection(every=10)) == [0, 10, 20]
    assert measured(Selection(every=0)) == []
    assert measured(Selection(every=5, windows=((3, 10), (20, None)))) == [5, 10, 20, 25]
    assert measured(Selection(windows=((28, 28),))) == [28]


def test_sites():
    name = "decoder.layers.3.mlp.linear_fc1"
    for pattern in (
        "*",
        "*.linear_fc1",
        "linear_fc1",
        "decoder.layers.3.*",
        "re:layers\\.[0-3]\\.",
        "re:^decoder",
    ):
        assert Selection(sites=(pattern,)).matches(name), pattern
    for pattern in ("linear_fc2", "fc1", "decoder", "re:^layers", "re:LINEAR"):
        assert not Selection(sites=(pattern,)).matches(name), pattern
    assert Selection(sites=["nothing", "linear_*"]).matches(name)


def test_each_tensor_gets_the_statistics_that_it_can_have():
    selection = Selection(
        tensors=("input", "output"), statistics=("mean", "mse", "mse_columnwise"), what_if="mxfp8"
    )
    assert selection.names("output") == ("mean",)
    assert selection.names("input") == ("mean", "mse", "mse_columnwise", "mxfp8_mse", "mxfp8_mse_columnwise")
    assert selection.names("weight") == ()


def test_what_ifs_of_per_tensor_recipes_have_one_direction():
    selection = Selection(
        statistics=("mse_columnwise", "mse"), what_if=("delayed", "fp8_block_scaling", "delayed")
    )
    assert selection.what_if == ("fp8_delayed_scaling", "fp8_block_scaling")
    assert selection.names("weight")[2:] == (
        "fp8_delayed_scaling_mse",
        "fp8_block_scaling_mse_columnwise",
        "fp8_block_scaling_mse",
    )


def test_several_selections_add_up():
    settings = TelemetrySettings(
        (
            Selection(every=10, tensors=("input",), statistics=("mean", "mse")),
            Selection(
                every=4, sites=("a",), tensors=("input",), statistics=("mean", "fp8_block_scaling_mse")
            ),
            Selection(every=0, statistics=("kurtosis",), what_if=("mxfp8",)),
        )
    )
    assert settings.names("a", "input", 20) == ("mean", "mse", "fp8_block_scaling_mse")
    assert settings.names("a", "input", 4) == ("mean", "fp8_block_scaling_mse")
    assert settings.names("b", "input", 4) == () == settings.names("a", "output", 20)
    assert settings.names("b", "input") == ("mean", "mse")
    assert [i for i in range(13) if settings.measures(i)] == [0, 4, 8, 10, 12]
    assert settings.what_if == ("fp8_block_scaling",)
    assert settings.on and not TelemetrySettings().on
    assert not TelemetrySettings((Selection(every=0),)).on


def test_a_pattern_that_matches_no_site_is_an_error():
    settings = TelemetrySettings((Selection(sites=("*", "linear_fc9")),))
    with pytest.raises(ValueError, match=r"'linear_fc9' matches no GEMM site; the sites are a.linear_fc1"):
        settings.check_sites(["a.linear_fc1"])
    TelemetrySettings((Selection(),)).check_sites([])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"every": -1}, "every=-1: a whole number"),
        ({"windows": ((5, 4),)}, "windows: (5, 4) must be (first, last)"),
        ({"sites": ()}, "sites is empty"),
        ({"sites": ("re:(",)}, "'re:(' is no regular expression"),
        ({"tensors": ("activation",)}, "'activation' is none of input, weight"),
        (
            {"statistics": ("kurtosi",)},
            "telemetry statistics: statistic 'kurtosi' is unknown. Did you mean 'kurtosis'?",
        ),
        ({"statistics": ("mse",), "tensors": ("output",)}, "mse is measured of input, weight, grad_output"),
        ({"what_if": ("nvfp5",)}, "'nvfp5' is none of tensorwise, delayed, blockwise, mxfp8, rowwise"),
    ],
)
def test_what_cannot_be_is_refused(given, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        Selection(**given)


def test_it_tells_when_a_run_ends_before_anything_is_measured():
    late = TelemetrySettings((Selection(every=100), Selection(windows=((50, None),))))
    assert late.misses(1, 49) and not late.misses(1, 50)
    assert not TelemetrySettings((Selection(every=0),)).misses(1, 49)
    assert not late.misses(21, 20)  # a run that has nothing left to do
