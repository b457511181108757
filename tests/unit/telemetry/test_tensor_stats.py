"""Statistics against numpy from dumped tensors: every recipe, every dtype, both ways, and merged from parts."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch

from megatron_fp8 import quantize
from megatron_fp8.backends import emulated
from megatron_fp8.kernels.cpu import stats
from megatron_fp8.numerics import cast, host_sync
from megatron_fp8.numerics.cast import RandomKey
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Granularity,
    MXFP8BlockScaling,
    Rule,
)
from megatron_fp8.telemetry.stat_registry import BLOCKWISE, DEFAULT, STATISTICS, Blocks, Variant
from megatron_fp8.telemetry.tensor_stats import Layout, finish, measure
from tests.support.matrices import mixed
from tests.support.statistics import assert_statistics, blockwise_range, dump, merge, of_codes, of_values
from tests.support.threads import threads

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
OF_CODES = [s.name for s in STATISTICS if s.needs == "codes"]
EVERYTHING = Layout.of([*DEFAULT, *(f"{name}_columnwise" for name in OF_CODES)])
RECIPES = {
    "tensorwise": Float8CurrentScaling(),
    "tensorwise-margin": Float8CurrentScaling(margin=12, use_power_2_scales=True),
    "rowwise": Float8RowwiseScaling(),
    "blockwise": Float8BlockScaling(),
    "blockwise-fp32": Float8BlockScaling(use_f32_scales=True, fp8_format="hybrid"),
    "mxfp8": MXFP8BlockScaling(fp8_format="hybrid"),
    "odd-blocks": CustomRecipe(lambda role: Rule(E4M3, Granularity(5, 3))),
    "long-blocks": CustomRecipe(lambda role: Rule(E4M3, Granularity(3, 1500))),
    "stochastic": Float8CurrentScaling(stochastic_rounding=True),
}


@pytest.fixture(params=["c", "torch"])
def way(request, monkeypatch):
    """Compiled, and with torch operations, whatever the size."""
    if request.param == "torch":
        monkeypatch.setattr(stats, "usable", lambda x: False)
    else:
        assert stats.usable(torch.zeros(1, 1, device="cpu"))
    return request.param


def numbers(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.float64).numpy()


def made(x, recipe, role):
    key = RandomKey(7) if recipe.rule(role).stochastic else None
    return quantize(x, recipe, role, "both", key=key)


def expected(x, quantized) -> dict[str, float]:
    found = of_values(numbers(x))
    for columnwise in (False, True):
        told = of_codes(numbers(x), dump(quantized, columnwise))
        found |= {Variant("", columnwise).named(name): value for name, value in told.items()}
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_every_statistic_of_every_recipe(way, name):
    for role, shape, dtype, special in (
        ("weight", (1, 1), torch.bfloat16, False),
        ("weight", (200, 129), torch.bfloat16, True),
        ("weight", (129, 7), torch.float16, True),
        ("grad_output", (129, 7), torch.float32, True),
        ("grad_output", (200, 129), torch.bfloat16, False),
    ):
        x = mixed(shape, dtype, special).cpu()
        quantized = made(x, RECIPES[name], role)
        found = finish(EVERYTHING, *measure(x, EVERYTHING, {"": quantized}))
        what = f"{name} {role} {dtype} {shape} {special}"
        assert_statistics(found, expected(x, quantized), numbers(x), what)


def test_a_stuck_scale_saturates_and_flushes(way):
    """Delayed scaling's scale comes from elsewhere, so values lie beyond its largest code or below its smallest."""
    rule = DelayedScaling().rule("input")
    x = torch.randn(300, 70, generator=torch.Generator().manual_seed(0), device="cpu")
    for amax, some in ((0.5, "overflows%"), (1e6, "underflows%")):
        scale = torch.tensor(448 / amax, device="cpu")
        quantized = emulated.quantize(x, rule, "both", scale=scale).tensor
        found = finish(EVERYTHING, *measure(x, EVERYTHING, {"": quantized}))
        assert_statistics(found, expected(x, quantized), numbers(x), f"amax {amax}")
        assert 10 < found[some] < 100


def test_the_element_that_made_the_scale_does_not_overflow(way):
    """A scale and its inverse are rounded, and so 448 * scale_inv can be less than the amax that both came from."""
    layout = Layout.of(["overflows%"])
    amax = torch.linspace(1, 2, 100, dtype=torch.float32, device="cpu")
    short = 0
    for one in amax[:, None, None]:
        quantized = quantize(one, Float8CurrentScaling(), "input")
        short += bool(one > 448 * quantized.rowwise.scale_inv)
        assert finish(layout, *measure(one, layout, {"": quantized})) == {"overflows%": 0.0}
    assert short > 10


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("size", [5, 32])
def test_blockwise_ranges(way, size, dims):
    blocks = [Blocks(size, dims, both) for both in (False, True)]
    layout = Layout.of([cut.name for cut in blocks])
    for dtype in DTYPES:
        for shape in [(1, 1), (7, 33), (130, 70)]:
            x = mixed(shape, dtype, special=True).cpu()
            one = blockwise_range(numbers(x), size if dims == 2 else 1, size)
            other = blockwise_range(numbers(x).T, size if dims == 2 else 1, size)
            found = finish(layout, *measure(x, layout))
            assert list(found.values()) == pytest.approx([one, max(one, other)], rel=1e-12), (dtype, shape)


def test_the_short_name_is_that_of_32_along_a_row():
    assert Layout.of([BLOCKWISE]) is Layout.of([f"{BLOCKWISE}_block_size_32_dims_1"])


@pytest.mark.parametrize("name", ["tensorwise", "mxfp8"])
def test_parts_merge_into_the_whole_in_any_order(way, name):
    """As micro-batches do: each part has codes of its own. Extremes and counts are equal, sums to 1e-12."""
    layout = Layout.of([*DEFAULT, BLOCKWISE])
    draw = random.Random(0)
    x = mixed((700, 40), torch.bfloat16, special=True).cpu()
    for _ in range(2):
        borders = sorted(draw.sample(range(1, 700), draw.randint(1, 6)))
        parts = list(x.tensor_split(borders))
        codes = [made(part, RECIPES[name], "input") for part in parts]
        pieces = [measure(part, layout, {"": q}) for part, q in zip(parts, codes, strict=True)]
        pieces.append(measure(x[:0], layout))
        draw.shuffle(pieces)
        at = draw.randint(1, len(pieces) - 1)
        whole = merge([merge(pieces[:at]), merge(pieces[at:])])
        straight = merge(pieces)
        assert torch.equal(whole.extremes, straight.extremes)
        torch.testing.assert_close(whole.sums, straight.sums, rtol=1e-12, atol=1e-12)

        told = [of_codes(numbers(part), dump(q)) for part, q in zip(parts, codes, strict=True)]
        sizes = [part.numel() for part in parts]
        good = [int(part.isfinite().sum()) for part in parts]
        error = sum(t["mse"] * n for t, n in zip(told, good, strict=True))
        signal = float((numbers(x)[np.isfinite(numbers(x))] ** 2).sum())
        wanted = of_values(numbers(x)) | {
            "scale_inv_min": min(t["scale_inv_min"] for t in told),
            "scale_inv_max": max(t["scale_inv_max"] for t in told),
            "mse": error / sum(good),
            "sqnr_db": 10 * math.log10(signal / error),
            Blocks().name: blockwise_range(numbers(x), 1, 32),
        }
        for key in ("underflows%", "overflows%"):
            counts = (round(t[key] * n / 100) for t, n in zip(told, sizes, strict=True))
            wanted[key] = 100 * sum(counts) / sum(sizes)
        assert_statistics(finish(layout, *whole), wanted, numbers(x), f"{name} {borders}")


def test_a_mean_far_from_zero(way):
    """std holds to a mean of 10,000 times the spread, kurtosis to 100 times; later it is left out, not invented."""
    layout = Layout.of(["std", "kurtosis"])
    base = torch.randn(20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu")
    for mean, has_kurtosis in ((100.0, True), (1000.0, False), (10_000.0, False)):
        x = base + mean
        exact = of_values(numbers(x))
        found = finish(layout, *measure(x, layout))
        assert found["std"] == pytest.approx(exact["std"], rel=1e-6)
        assert ("kurtosis" in found) == has_kurtosis
        if has_kurtosis:
            assert found["kurtosis"] == pytest.approx(exact["kurtosis"], rel=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, -3e38, 1e-45])
def test_a_constant_has_no_spread(way, value):
    layout = Layout.of(["std", "kurtosis", "mean"])
    x = torch.full((50, 33), value, dtype=torch.float32, device="cpu")
    found = finish(layout, *measure(x, layout))
    assert found["std"] == 0 and "kurtosis" not in found
    assert found["mean"] == pytest.approx(float(x[0, 0]), rel=1e-12)


def test_nothing_is_left_out_of_nothing(way):
    """Empty, all zeros, and no finite element: what is undefined is not there, and what is there is finite."""
    for shape in ((0, 5), (5, 0), (0, 0)):
        x = torch.zeros(shape, dtype=torch.bfloat16, device="cpu")
        quantized = quantize(x, MXFP8BlockScaling(), "input", "both")
        assert finish(EVERYTHING, *measure(x, EVERYTHING, {"": quantized})) == {"nonfinite": 0}
    x = torch.zeros(4, 40, device="cpu")
    found = finish(
        EVERYTHING, *measure(x, EVERYTHING, {"": quantize(x, MXFP8BlockScaling(), "input", "both")})
    )
    assert found["cur_amax"] == found["mse"] == found["underflows%"] == 0
    assert not {"dynamic_range", "kurtosis", "sqnr_db"} & set(found)
    layout = Layout.of([*DEFAULT, BLOCKWISE])
    x = torch.tensor([[math.nan, math.inf, -math.inf]], device="cpu")
    found = finish(layout, *measure(x, layout, {"": quantize(x, Float8CurrentScaling(), "input")}))
    assert found["nonfinite"] == 3 and found[Blocks().name] == 0
    assert not {"min", "max", "mean", "std", "cur_amax", "l1_norm", "mse"} & set(found)
    json.dumps(found, allow_nan=False)


def test_without_codes_their_figures_are_left_out():
    x = torch.ones(3, 4, device="cpu")
    layout = Layout.of(["max", "mse", "mxfp8_mse"])
    assert finish(layout, *measure(x, layout)) == {"max": 1}
    only = quantize(x, Float8RowwiseScaling(), "input", "columnwise")
    assert finish(layout, *measure(x, layout, {"": only})) == {"max": 1, "mse": 0}


def test_codes_that_are_there_at_times_count_for_those_times():
    """A call in high precision adds to the values alone; an element that is NaN counts as one of all."""
    layout = Layout.of(["mse", "underflows%", "max"])
    x = torch.full((8, 32), 0.3, device="cpu")
    quantized = quantize(x, MXFP8BlockScaling(), "input")
    alone = finish(layout, *measure(x, layout, {"": quantized}))
    both = finish(layout, *merge([measure(x, layout, {"": quantized}), measure(x * 9, layout)]))
    assert both["mse"] == alone["mse"] > 0 and both["max"] > alone["max"]


def test_any_shape_and_strides(way):
    layout = Layout.of([*DEFAULT, BLOCKWISE])
    for x in (
        torch.randn(3, 4, 5, device="cpu"),
        torch.randn(7, device="cpu"),
        torch.tensor(3.0, device="cpu"),
    ):
        found = finish(layout, *measure(x, layout))
        assert_statistics(
            {k: v for k, v in found.items() if k != Blocks().name}, of_values(numbers(x)), numbers(x), ""
        )
    x = torch.randn(40, 50, device="cpu").t()[::2, 3:]
    quantized = quantize(x, Float8BlockScaling(), "input", "both")
    found = finish(EVERYTHING, *measure(x, EVERYTHING, {"": quantized}))
    assert_statistics(found, expected(x, quantized), numbers(x), "strided")


def test_c_and_torch_agree_on_large_tensors_and_threads(monkeypatch):
    """Extremes and counts equal; sums to 1e-12; and no difference at all between numbers of threads."""
    x = mixed((300, 517), torch.bfloat16, special=True).cpu()
    quantized = quantize(x, MXFP8BlockScaling(), "input", "both")
    layout = Layout.of([*DEFAULT, BLOCKWISE, "mse_columnwise"])
    found = []
    for count in (1, 3):
        with threads(count):
            found.append(measure(x, layout, {"": quantized}))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    monkeypatch.setattr(stats, "usable", lambda x: False)
    monkeypatch.setattr(cast, "CHUNK", 50_000)  # several
    for waits in (False, True):  # as on a GPU, where nobody looks whether all is finite
        monkeypatch.setattr(host_sync, "read_waits", lambda device, waits=waits: waits)
        slow = measure(x, layout, {"": quantized})
        assert torch.equal(slow.extremes, found[0].extremes)
        torch.testing.assert_close(slow.sums, found[0].sums, rtol=1e-12, atol=0)


def test_subnormals_count_whatever_the_threads_mode(way):
    layout = Layout.of(["dynamic_range", "l1_norm", "cur_amax"])
    x = torch.full((3, 5), 1e-40, device="cpu")
    straight = finish(layout, *measure(x, layout))
    assert torch.set_flush_denormal(True)
    try:
        assert finish(layout, *measure(x, layout)) == straight
    finally:
        torch.set_flush_denormal(False)
    assert straight["cur_amax"] == pytest.approx(1e-40, rel=1e-4)


def test_errors_say_what_is_wrong():
    x = torch.ones(4, 32, device="cpu")
    with pytest.raises(
        ValueError, match=r"codes of shape \(4, 16\) were not made of values of shape \(4, 32\)"
    ):
        measure(x, EVERYTHING, {"": quantize(x[:, :16], MXFP8BlockScaling(), "input", "both")})
    with pytest.raises(ValueError, match="int64"):
        measure(torch.ones(3, dtype=torch.int64, device="cpu"), EVERYTHING)
