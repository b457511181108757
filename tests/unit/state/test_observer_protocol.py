"""The seam for an observer: each cast and product once, of what ran, and nothing for those who do not watch."""

import pytest
import torch

from megatron_fp8 import convert_to_fp8
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.nn import fp8_autocast, fp8_step
from megatron_fp8.state.cuda_graph import CapturedStep
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.sites import RECIPES, make_site, randn


class Recording:
    """An observer that keeps what it is told, of every so many iterations."""

    def __init__(self, every=1):
        self.every = every
        self.casts, self.products, self.others = [], [], []

    def wants(self, iteration):
        return iteration % self.every == 0

    def cast(self, seen):
        self.casts.append((seen.slot, seen.x.detach().clone(), seen.done, seen.direction, seen.recorded))

    def stored(self, slot, weight):
        self.others.append(("stored", slot, weight))

    def product(self, seen):
        self.products.append((seen.site, seen.gemm, seen.y.detach().clone()))
        self.others += [] if seen.recorded else [("not recorded", seen.gemm)]

    def high_precision(self, seen):
        self.others.append(("high precision", seen.site, seen.y.detach().clone(), seen.recorded))

    def ended(self, iteration):
        self.others.append(("ended", iteration))


def step(site, *, training=True):
    x, w = randn(64, 32, seed=1).requires_grad_(), randn(96, 32, seed=2).requires_grad_()
    y = fp8_linear(x, w, None, site, training=training)
    y.backward(randn(64, 96, seed=3))
    return x, w, y


@pytest.mark.parametrize("recipe", RECIPES)
def test_sees_every_cast_and_product(recipe):
    state, watch = Fp8State(), Recording()
    site, _ = make_site(recipe, state=state, name="fc1")
    state.watch(watch)
    x, w, y = step(site)
    state.watch(None)
    step(site)
    assert [(slot, recorded) for slot, *_, recorded in watch.casts] == [
        ("fc1.input", True),
        ("fc1.weight", True),
        ("fc1.grad_output", True),
    ]
    assert [(site, gemm) for site, gemm, _ in watch.products] == [
        ("fc1", g) for g in ("fprop", "dgrad", "wgrad")
    ]
    (_, seen_x, done, *_), (_, seen_w, *_), (_, dy, *_) = watch.casts
    assert torch.equal(seen_x, x) and torch.equal(seen_w, w) and torch.equal(dy, randn(64, 96, seed=3))
    assert done.tensor.rowwise.shape == (64, 32)
    fprop, dgrad, wgrad = (y for *_, y in watch.products)
    assert torch.equal(fprop, y) and torch.equal(dgrad, x.grad) and torch.equal(wgrad.to(w.dtype), w.grad)


def test_says_that_a_forward_in_evaluation_mode_is_not_recorded_and_its_backward_is():
    state, watch = Fp8State(), Recording()
    site, _ = make_site("tensorwise", state=state, name="fc1")
    state.watch(watch)
    step(site, training=False)
    assert [(slot, recorded) for slot, *_, recorded in watch.casts] == [
        (f"fc1.{role}", role == "grad_output") for role in ("input", "weight", "grad_output")
    ]
    assert watch.others == [("not recorded", "fprop")]


def test_hears_of_layers_in_high_precision_and_of_the_end():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32, bias=False) for _ in range(2)]
    model = convert_to_fp8(torch.nn.Sequential(*layers).bfloat16(), skip=[])
    watch = Recording()
    model[0].fp8_site.state.watch(watch)
    x = model[0](randn(64, 32, seed=1))
    with fp8_autocast(enabled=False):
        y = model[1](x)
    y.sum().backward()
    fp8_step(model)
    (kind, site, seen, recorded), end = watch.others
    assert (kind, site, recorded) == ("high precision", "1", True) and torch.equal(seen, y)
    assert end == ("ended", 0)
    assert {slot.partition(".")[0] for slot, *_ in watch.casts} == {"0"}
    with torch.no_grad():
        model.eval()(randn(64, 32, seed=1))
    assert [what for what, *_ in watch.others[2:]] == ["not recorded"] * 2


def test_in_iterations_that_it_does_not_want_nobody_is_told():
    """Not even asked: state and arenas have no observer then, also where a resumed run sets the iteration."""
    state, watch = Fp8State(), Recording(every=2)
    site, _ = make_site("tensorwise", state=state, name="fc1")
    state.watch(watch)
    told = []
    for _ in range(4):
        step(site)
        told.append((len(watch.casts), state.observer is watch, state.arenas[0].observer is state.observer))
        state.finish_iteration()
    assert told == [(3, True, True), (3, False, True), (6, True, True), (6, False, True)]
    assert [event for event in watch.others if event[0] == "ended"] == [("ended", i) for i in range(4)]
    state.iteration = 7
    assert state.observer is None is state.arenas[0].observer
    state.iteration = 8
    assert state.observer is watch is state.arenas[0].observer


def test_a_watched_step_is_not_captured():
    state = Fp8State()
    state.watch(Recording(every=2))
    state.iteration = 1
    with pytest.raises(ValueError, match="detach it first"):
        CapturedStep(state)


def test_sites_made_later_are_watched_too():
    state, watch = Fp8State(), Recording()
    state.watch(watch)
    step(make_site("mxfp8", state=state)[0])
    assert len(watch.casts) == 3 and len(watch.products) == 3


def test_one_at_a_time():
    state = Fp8State()
    state.watch(Recording())
    with pytest.raises(AssertionError, match="remove it first"):
        state.watch(Recording())


@pytest.mark.parametrize("recipe", RECIPES)
def test_not_one_operation_more(recipe):
    """A watched layer runs the operations of one that is not, and its bits."""

    def run(watch):
        state = Fp8State()
        state.watch(watch)
        site, _ = make_site(recipe, state=state)
        step(site)  # what is imported or made once
        with torch.autograd.profiler.profile() as seen:
            x, w, y = step(site)
        names = [event.name for event in seen.function_events if event.name.startswith("aten::")]
        assert len(names) > 30  # those inside the linear are among them
        return names, [y, x.grad, w.grad]

    class Silent:
        def wants(self, iteration):
            return True

        def cast(self, seen): ...
        def product(self, seen): ...
        def stored(self, slot, weight): ...
        def high_precision(self, seen): ...
        def ended(self, iteration): ...

    (without, bits), (watched, same) = run(None), run(Silent())
    assert without == watched
    assert all(torch.equal(a, b) for a, b in zip(bits, same, strict=True))


def test_compiled_layers_are_watched():
    torch.manual_seed(0)
    model = convert_to_fp8(torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False)).bfloat16(), skip=[])
    x = randn(64, 32, seed=1)
    model(x).sum().backward()
    (site,) = (module.fp8_site for module in model.modules() if hasattr(module, "fp8_site"))
    watch = Recording()
    site.state.watch(watch)
    torch.compile(model, backend="eager")(x).sum().backward()
    assert [gemm for _, gemm, _ in watch.products] == ["fprop", "wgrad"]
