"""Fp8Linear and fp8_autocast: the layer's numbers, and which of them a region of code changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.nn import Fp8Linear, convert_to_fp8, fp8_autocast, fp8_step
from megatron_fp8.plan.autocast_state import remember_fp8
from megatron_fp8.recipe import RECIPES
from tests.support.sites import make_site, randn
from tests.support.sites import run as run_site

NAMES = ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"]


def make(recipe=None, k: int = 64, n: int = 48, dtype: torch.dtype = torch.float32) -> Fp8Linear:
    torch.manual_seed(3)
    return Fp8Linear(k, n, dtype=dtype, recipe=recipe)


@pytest.mark.parametrize(
    ("name", "shape"),
    zip(NAMES, [(32, 64, 48), (1, 16, 129), (7, 1000, 17), (63, 129, 33), (32, 64, 48)], strict=True),
)
def test_output_and_gradients_are_the_sites(name, shape):
    """The module adds nothing to linear.fp8_linear, which has tests of its own."""
    m, k, n = shape
    linear = make(name, k, n, torch.bfloat16)
    x, dy = randn(m, k, seed=1).requires_grad_(), randn(m, n, seed=2)
    y = linear(x)
    y.backward(dy)
    site, _ = make_site(RECIPES[name]())
    expected = run_site(site, x, linear.weight, dy, linear.bias)
    for what, mine in {"y": y, "dx": x.grad, "dw": linear.weight.grad, "dbias": linear.bias.grad}.items():
        assert_same_bytes(mine, getattr(expected, what), what)


def test_shapes_of_nn_linear():
    linear = make()
    for shape in [(64,), (0, 64), (5, 64), (2, 3, 64), (2, 0, 64)]:
        assert linear(torch.randn(shape)).shape == (*shape[:-1], 48)
    turned = torch.randn(64, 5).t()
    assert_same_bytes(linear(turned), linear(turned.contiguous()))
    with pytest.raises(ValueError, match=r"input \(5, 63\) does not fit weight \(48, 64\)"):
        linear(torch.randn(5, 63))
    with pytest.raises(ValueError, match="float64"):
        linear(torch.randn(5, 64).double())


def test_constructor_is_nn_linears():
    torch.manual_seed(3)
    plain = nn.Linear(64, 48, False, dtype=torch.bfloat16)
    torch.manual_seed(3)
    linear = Fp8Linear(64, 48, False, dtype=torch.bfloat16, recipe="mxfp8")
    assert linear.bias is None and "recipe=MXFP8BlockScaling" in repr(linear)
    assert_same_bytes(linear.weight, plain.weight)
    assert Fp8Linear.from_linear(plain, "mxfp8") is plain
    assert_same_bytes(plain(torch.ones(2, 64).bfloat16()), linear(torch.ones(2, 64).bfloat16()))
    with pytest.raises(ValueError, match=r"from_linear\(Fp8Linear\): exactly an nn.Linear"):
        Fp8Linear.from_linear(linear)


def test_nan_is_kept_and_counted_inf_saturates():
    linear = make("rowwise")
    x = torch.randn(4, 64)
    x[1, 3], x[2, 5] = float("nan"), float("-inf")
    y = linear(x)
    assert y[1].isnan().all() and torch.isfinite(y[[0, 2, 3]]).all()
    assert fp8_step(linear).nonfinite == 2
    linear(torch.randn(4, 64))
    assert fp8_step(linear).nonfinite == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_torch_autocast_the_output_is_autocasts(dtype):
    linear, x = make("mxfp8"), torch.randn(8, 64)
    with torch.autocast("cpu", dtype):
        y = linear(x)
    y.float().sum().backward()
    assert y.dtype == dtype and linear.weight.grad.dtype == torch.float32
    assert_same_bytes(y, linear(x.to(dtype)))


@pytest.mark.parametrize("name", NAMES)
def test_what_no_backward_can_follow_records_nothing(name):
    """In evaluation it counts nothing either."""
    linear = make(name).eval()
    with torch.no_grad():
        first = linear(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)))
    state = linear.fp8_site.state
    assert all(arena.rows.eq(0).all() for arena in state.arenas) and state.counts.fp8_gemms == 0
    linear.train()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_same_bytes(linear(x), first)
    assert not state.arenas[0].rows.any() and state.counts.fp8_gemms == 1
    assert_same_bytes(linear(x), first)
    amax = state.arenas[0].rows[0]
    assert (amax > 0).tolist()[:2] == [True, True] and state.counts.fp8_gemms == 2


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_backward_inside_of_torch_autocast_is_backward_outside(name):
    grads = []
    for inside in (True, False):
        linear, x = make(name, 64, 48), randn(32, 64, dtype=torch.float32, seed=1).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(x)
            if inside:
                y.backward(randn(32, 48, seed=2))
        if not inside:
            y.backward(randn(32, 48, seed=2))
        grads.append((x.grad, linear.weight.grad))
    for mine, expected, what in zip(*grads, ("dx", "dw"), strict=True):
        assert_same_bytes(mine, expected, what)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_a_forward_in_inference_mode_leaves_training_as_it_was(name, mode):
    """Trainers try validation before the first step; tensors of inference mode can be neither written nor saved later."""
    checked, expected = make(name), make(name)
    getattr(checked, mode)()
    with torch.inference_mode():
        checked(torch.randn(8, 64))
        fp8_step(checked) if mode == "train" else checked.train()
    same_iteration = getattr(make(name), mode)()
    with torch.inference_mode():
        same_iteration(X)
    x = X.clone().requires_grad_()
    same_iteration(x).sum().backward()  # saves the weight's codes
    assert x.grad.isfinite().all()
    for linear in (checked, expected):
        for _ in range(2):
            linear(X).square().sum().backward()
            assert fp8_step(linear).fp8_gemms == 2
    if mode == "eval":
        assert_same_bytes(checked.weight.grad, expected.weight.grad)


def test_weights_made_in_inference_mode_are_read_at_every_call():
    with torch.inference_mode():
        linear = make("mxfp8")
        before = linear(X)
        linear.weight.mul_(2), linear.bias.mul_(2)
        assert_same_bytes(linear(X), 2 * before)


def test_evaluation_sees_a_weight_that_was_written_without_a_version():
    """Merged adapters and moving averages write through .data, and no optimizer tells."""
    linear = make("tensorwise").eval()
    with torch.no_grad():
        before = linear(X)
        linear.weight.data.mul_(2), linear.bias.data.mul_(2)
        assert_same_bytes(linear(X), 2 * before)
        compiled = torch.compile(linear, backend="aot_eager")
        assert_same_bytes(compiled(X), 2 * before, "compiled")
        linear.weight.data.mul_(2), linear.bias.data.mul_(2)
        assert_same_bytes(compiled(X), 4 * before, "compiled, written again")


@pytest.mark.parametrize("compiled", [False, True])
def test_training_sees_a_weight_that_was_written_without_a_version(compiled):
    """Masters that a loop copies, an adapter that is merged: no optimizer, no fp8_step, no new version."""
    linear = make("tensorwise")
    call = torch.compile(linear, backend="eager", fullgraph=True) if compiled else linear
    x = torch.randn(4, 64)
    call(x)
    for factor in (2, 0.5):
        linear.weight.data *= factor
        fresh = nn.Linear(64, 48)
        fresh.load_state_dict(linear.state_dict())
        assert_same_bytes(call(x), Fp8Linear.from_linear(fresh)(x))


# ------------------------------------------------------------------------------------------------------ fp8_autocast


class Watched(nn.Module):
    """A converted linear, and what the sites' counters say about a call."""

    def __init__(self, recipe: str = "tensorwise"):
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(64, 48)
        convert_to_fp8(self, recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.linear.weight, self.linear.bias)


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(7))


def test_regions_nest_and_the_inner_one_decides():
    model, mx = Watched(), Watched("mxfp8")
    own, other, plain = model(X), mx(X), model.plain(X)
    with fp8_autocast(enabled=False):
        assert_same_bytes(model(X), plain, "disabled")
        with fp8_autocast():
            assert_same_bytes(model(X), own, "enabled inside disabled")
            with fp8_autocast(recipe="mxfp8"):
                assert_same_bytes(model(X), other, "another recipe")
                with fp8_autocast():
                    assert_same_bytes(model(X), other, "no recipe keeps the outer one")
                with fp8_autocast(enabled=False):
                    assert_same_bytes(model(X), plain, "disabled again")
                with fp8_autocast(recipe=RECIPES["tensorwise"]()):
                    assert_same_bytes(model(X), own, "by instance")
            assert_same_bytes(model(X), own, "left")
        assert_same_bytes(model(X), plain, "left again")
    assert_same_bytes(model(X), own, "outside")


def test_as_a_decorator_and_after_an_exception():
    model = Watched()

    @fp8_autocast(enabled=False)
    def evaluate() -> torch.Tensor:
        return model(X)

    assert_same_bytes(evaluate(), model.plain(X))
    with pytest.raises(KeyError), fp8_autocast(enabled=False):
        raise KeyError
    assert not torch.equal(model(X), model.plain(X))


def test_it_switches_on_nothing_that_was_not_converted():
    plain = nn.Linear(64, 48)
    with fp8_autocast(recipe="mxfp8"):
        assert_same_bytes(plain(X), functional.linear(X, plain.weight, plain.bias))


def test_bad_regions():
    with pytest.raises(ValueError, match="'fp4' is unknown"), fp8_autocast(recipe="fp4"):
        pass
    with pytest.raises(ValueError, match="a recipe goes into recipe="), fp8_autocast("mxfp8"):
        pass


@pytest.mark.parametrize("reentrant", [True, False])
def test_forwards_that_differ_need_to_be_told(reentrant):
    model = Watched()
    x = X.clone().requires_grad_()
    with fp8_autocast(recipe="mxfp8"):
        out = checkpoint(model, x, use_reentrant=reentrant)
    model(x)
    with pytest.raises(RuntimeError, match="remember_fp8"):
        out.sum().backward()
    fp8_step(model)
    expected = Watched("mxfp8")
    with fp8_autocast(recipe="mxfp8"):
        out = checkpoint(remember_fp8(model), x, use_reentrant=reentrant)
    model(x)
    model.zero_grad()
    out.sum().backward()
    expected(X).sum().backward()
    assert_same_bytes(model.linear.weight.grad, expected.linear.weight.grad)


def test_threads_that_meet_at_the_first_forward_share_its_slots():
    """Slots that were made twice would differ from those of other ranks, and one of two would be updated by nobody."""
    for _ in range(8):
        model = convert_to_fp8(nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), "delayed", skip=[])
        together, x = Barrier(2), torch.randn(8, 32)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda _, m=model, x=x, b=together: (b.wait(), m(x)), range(2)))
        (state,) = model[0].fp8_group.states.values()
        assert [slot.name for slot in state.slots()] == [
            f"{i}.{role}" for i in range(4) for role in ("input", "weight", "grad_output")
        ]
