"""The linear over an iteration and more: weights kept, main_grad, recompute, stochastic rounding, health."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.plan.cast_spec import READERS
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.sites import ALL_RECIPES, RECIPES, data, make_site, randn, run

pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize(
    ("name", "zero_out"), [*((name, False) for name in (*ALL_RECIPES, "wgrad off")), ("mxfp8", True)]
)
def test_wgrad_is_added_to_main_grad_in_float32(name, zero_out):
    x, w, dy = data(96, 40, 56)
    recipe, fp8_wgrad = ("mxfp8", False) if name == "wgrad off" else (name, True)
    alone = run(make_site(recipe, fp8_wgrad=fp8_wgrad)[0], x.float(), w.float(), dy.float())
    site, backend = make_site(recipe, fp8_wgrad=fp8_wgrad)
    weight: Any = torch.nn.Parameter(w)
    start = randn(56, 40, seed=7, dtype=torch.float32)
    weight.main_grad, weight.grad_added_to_main_grad = start.clone(), False
    if zero_out:
        weight.zero_out_wgrad = True
    expected = start
    for microbatch in range(2):
        fp8_linear(x, weight, None, site).backward(dy)
        if site.plan.gemms["wgrad"] == "fp8":
            product = backend.products[-1]
            assert product.out_dtype == torch.float32
            expected = expected + product.result
            assert_same_bytes(weight.main_grad, expected, f"after microbatch {microbatch}")
        else:
            expected = expected + alone.dw
            torch.testing.assert_close(
                weight.main_grad, expected, rtol=1e-2, atol=1e-1 * float(alone.dw.abs().max())
            )
        assert weight.grad_added_to_main_grad is True
        assert weight.grad.shape == weight.shape and weight.grad.dtype == torch.bfloat16
        assert not zero_out or not weight.grad.any()
        weight.grad = None


def test_without_main_grad_the_gradient_is_autograds():
    x, w, dy = data(96, 40, 56)
    weight: Any = torch.nn.Parameter(w)
    weight.main_grad = None
    site, backend = make_site("mxfp8")
    fp8_linear(x, weight, None, site).backward(dy)
    assert_same_bytes(weight.grad, backend.products[-1].result.bfloat16())
    assert not hasattr(weight, "grad_added_to_main_grad")


@pytest.mark.parametrize("name", ["delayed", "rowwise", "mxfp8"])
def test_weight_is_quantized_once_an_iteration(name):
    x, w, dy = data(64, 32, 48)
    weight = torch.nn.Parameter(w)
    site, backend = make_site(name)

    def casts_in(call: Any) -> int:
        before = sum(shape == (48, 32) for shape, _ in backend.casts)
        call()
        return sum(shape == (48, 32) for shape, _ in backend.casts) - before

    def step(**options: Any) -> None:
        fp8_linear(x, weight, None, site, **options).backward(dy)

    def change() -> None:
        with torch.no_grad():
            weight.mul_(2)

    assert casts_in(step) == 1
    assert casts_in(step) == 0
    assert casts_in(lambda: step(fresh_weight=True)) == 1
    change()
    assert casts_in(step) == 1
    weight.data = weight.data.clone()
    assert casts_in(step) == 1
    site.state.finish_iteration()
    # Optimizers write through flat buffers, which no version counter sees.
    weight.data.view(-1)[0] = 100.0
    assert casts_in(step) == 1
    assert casts_in(step) == 0
    y = fp8_linear(x, weight, None, site)
    assert_same_bytes(y, fp8_linear(x, weight, None, make_site(name)[0]) if name != "delayed" else y)


def test_a_weight_is_observed_once_an_iteration_and_not_cast():
    site, _ = make_site("delayed")
    cache, state, w = site.weights, site.state, randn(24, 40, seed=1)
    for iteration in range(2):
        cache.observe(4**iteration * w)
        cache.observe(16 * w)
        assert float(state.arenas[0].rows[0].max()) == 4**iteration * float(w.abs().max())
        assert state.finish_iteration().casts == 0


def test_another_weight_is_known_whatever_its_address_and_version():
    """Memory that is freed comes back to the next tensor of its size, and ``.data =`` leaves no new version."""
    site, _ = make_site("tensorwise")
    memory = torch.empty(16, 16).numpy()
    weight, x = torch.nn.Parameter(torch.from_numpy(memory)), torch.ones(1, 16)
    address, version = weight.data_ptr(), weight._version
    for value in (1.0, 2.0, 3.0):
        memory[:] = value
        weight.data = torch.from_numpy(memory)
        assert (weight.data_ptr(), weight._version) == (address, version)
        assert float(fp8_linear(x, weight, None, site).detach().mean()) == pytest.approx(16 * value)
    weight.data = torch.arange(256.0).view(16, 16)
    fp8_linear(x, weight, None, site)
    weight.data = weight.data.t()
    expected = fp8_linear(x, weight, None, make_site("tensorwise")[0])
    assert_same_bytes(fp8_linear(x, weight, None, site), expected)


def test_codes_are_kept_only_where_somebody_promises_that_weights_stay():
    x, w, _ = data(64, 32, 48)
    site, backend = make_site("mxfp8", state=Fp8State(keeps_weights=False))
    weight = torch.nn.Parameter(w.clone())
    for factor in (1, 2):
        weight.data.mul_(factor)
        expected = fp8_linear(x, w * factor, None, make_site("mxfp8")[0])
        assert_same_bytes(fp8_linear(x, weight, None, site), expected, f"after a factor of {factor}")
    assert sum(shape == (48, 32) for shape, _ in backend.casts) == 2


def test_weight_quantized_in_evaluation_is_recorded_in_training():
    x, w, _ = data(64, 32, 48)
    site, backend = make_site("delayed")
    arena = site.state.arenas[0]
    with torch.no_grad():
        fp8_linear(x, w, None, site, training=False)
    assert not arena.rows[:, :3].any(), "evaluation records nothing"
    fp8_linear(x, w, None, site)
    assert arena.rows[0, :2].tolist() == [x.float().abs().max(), w.float().abs().max()]
    casts = len(backend.casts)
    with torch.no_grad():
        fp8_linear(x, w, None, site, training=False)
    assert len(backend.casts) == casts + 1, "evaluation takes the codes that training made"


@pytest.mark.parametrize("name", ["delayed", "rowwise", "mxfp8"])
def test_module_called_twice(name):
    x, _, dy = data(64, 48, 48)
    w = randn(48, 48, seed=5) / 8

    def through(first: GemmSite, second: GemmSite, same: bool) -> tuple[torch.Tensor, ...]:
        leaf, one = x.clone().requires_grad_(), torch.nn.Parameter(w.clone())
        two = one if same else torch.nn.Parameter(w.clone())
        y = fp8_linear(fp8_linear(leaf, one, None, first), two, None, second)
        y.backward(dy)
        assert leaf.grad is not None and one.grad is not None and two.grad is not None
        return y.detach(), leaf.grad, one.grad if same else one.grad + two.grad

    site = make_site(name)[0]
    twice = through(site, site, True)
    apart = through(make_site(name)[0], make_site(name)[0], False)
    for once, expected, what in zip(twice, apart, ("y", "dx", "dw"), strict=True):
        assert_same_bytes(once, expected, what)
    hidden = fp8_linear(x, w, None, make_site(name)[0])
    recorded = site.state.arenas[0].rows[0, 0]
    assert recorded == max(x.float().abs().max(), hidden.float().abs().max())


# ------------------------------------------------------------------------------------ stochastic rounding


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_stochastic_rounding_repeats_itself_within_an_iteration_only(name):
    recipe = replace(RECIPES[name], stochastic_rounding=True)
    x, w, dy = data(64, 48, 40)
    site, again = make_site(recipe)[0], make_site(recipe)[0]
    base = run(site, x, w, dy)
    second_microbatch = run(site, x, w, dy)
    same = run(again, x, w, dy)
    for field in ("y", "dx", "dw"):
        assert_same_bytes(getattr(same, field), getattr(base, field), field)
    others = {
        "microbatch": second_microbatch,
        "site": run(make_site(recipe, name="another")[0], x, w, dy),
        "seed": run(make_site(recipe, seed=1)[0], x, w, dy),
        "data-parallel rank": run(make_site(recipe, stream=1)[0], x, w, dy),
        "nearest": run(make_site(name)[0], x, w, dy),
    }
    again.state.iteration = 1
    others["iteration"] = run(again, x, w, dy)
    for what, other in others.items():
        assert_same_bytes(other.y, base.y, what)
        assert not torch.equal(other.dx, base.dx) and not torch.equal(other.dw, base.dw), what


# ------------------------------------------------------------------------------------------------- health


@pytest.mark.parametrize(
    ("name", "role", "bad"),
    [
        *((name, role, torch.nan) for name in RECIPES for role in READERS),
        *((name, role, torch.inf) for name, role in zip(RECIPES, [*READERS] * 3)),  # noqa: B905 three roles in turn
        ("mxfp8", "input", -torch.inf),
    ],
)
def test_nonfinite_operands_are_counted_and_visible(name, role, bad):
    x, w, dy = data(64, 48, 40)
    site, backend = make_site(name)
    for iteration in range(2):
        matrices = {"input": x.clone(), "weight": w.clone(), "grad_output": dy.clone()}
        matrices[role][5, 7] = bad
        outcome = run(site, *matrices.values())
        for product in backend.products:
            for side in (product.a, product.b):
                scale = side.float_scale_inv()
                # 0: of a block of zeros or NaN
                least = 0 if name == "nvfp4" else torch.finfo(torch.float32).tiny
                assert bool(scale.isfinite().all()) and bool((scale >= least).all())
        y_nan, dx_nan, dw_nan = (t.isnan() for t in (outcome.y, outcome.dx, outcome.dw))
        if torch.isnan(torch.tensor(bad)) and name != "nvfp4":  # which has no code for it
            where = {
                "input": (y_nan[5], dw_nan[:, 7]),
                "weight": (y_nan[:, 5], dx_nan[:, 7]),
                "grad_output": (dx_nan[5], dw_nan[7]),
            }[role]
            assert all(bool(part.all()) for part in where)
            total = sum(int(t.sum()) for t in (y_nan, dx_nan, dw_nan))
            assert total == sum(part.numel() for part in where), (
                "NaN stays in the rows and columns it belongs to"
            )
        else:
            assert not (y_nan.any() or dx_nan.any() or dw_nan.any()), "Inf saturates"
        assert site.state.finish_iteration().nonfinite == 1, f"iteration {iteration}"
        assert bool(site.state.arenas[0].scale.isfinite().all())
    clean = run(site, x, w, dy)
    assert site.state.finish_iteration().nonfinite == 0
    assert all(bool(t.isfinite().all()) for t in (clean.y, clean.dx, clean.dw))


@pytest.mark.parametrize("name", ALL_RECIPES)
def test_every_cast_is_counted(name):
    x, w, dy = data(64, 48, 40)
    weight = torch.nn.Parameter(w)
    site, backend = make_site(name)
    for _ in range(2):
        fp8_linear(x.clone().requires_grad_(), weight, None, site).backward(dy)
    assert site.state.finish_iteration().casts == len(backend.casts)
    quantized = [role for role in ("input", "weight", "grad_output") if site.quantizers[role] is not None]
    assert len(backend.casts) == sum(1 if role == "weight" else 2 for role in quantized)
