"""A training step as a CUDA graph: nothing read back, nothing moved, and replays that are eager iterations to the bit."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8 import recipe as recipes
from megatron_fp8.backends import emulated
from megatron_fp8.backends.native import backend as native
from megatron_fp8.kernels import gemms
from megatron_fp8.kernels.cpu import emulation as cpu
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.linear.saved_operands import SideLayout
from megatron_fp8.plan.site_plan import fp8_site
from megatron_fp8.state.arena import Arena
from megatron_fp8.state.cuda_graph import CapturedStep
from megatron_fp8.state.fp8_state import Fp8State
from megatron_fp8.state.precision_schedule import PrecisionSchedule
from tests.support.cuda_graph_stub import Recorded
from tests.support.sites import NATIVE_RECIPES as RECIPES
from tests.support.sites import make_site, randn
from tests.support.valueless_tensors import gpu_without_values, warm

MICROBATCHES = 2


class Model:
    """Two linears of one state, and what a step reads and writes, at addresses that stay."""

    def __init__(self, recipe: str):
        self.state = Fp8State()
        self.sites = [make_site(recipe, state=self.state, name=f"layers.{i}.linear")[0] for i in range(2)]
        self.weights = [torch.nn.Parameter(randn(48, 64, seed=1)), torch.nn.Parameter(randn(32, 48, seed=2))]
        for weight in self.weights:
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
        self.x, self.dx = torch.zeros(40, 64, dtype=torch.bfloat16), torch.zeros(40, 64, dtype=torch.bfloat16)
        self.y = torch.zeros(40, 32, dtype=torch.bfloat16)

    def load(self, iteration: int) -> None:
        """New numbers, larger each time; weights as an optimizer through flat buffers writes them, without a trace."""
        self.x.copy_(randn(40, 64, seed=10 + iteration) * (iteration + 1))
        for weight in self.weights:
            weight.data.mul_(1.0625)
            weight.main_grad.zero_()

    def step(self) -> None:
        """Forward and backward of two microbatches, which share the quantized weights."""
        for part in self.x.chunk(MICROBATCHES), self.x.flip(0).chunk(MICROBATCHES):
            x = torch.cat(part).requires_grad_()
            y = x
            for weight, site in zip(self.weights, self.sites, strict=True):
                y = fp8_linear(y, weight, None, site)
            (dx,) = torch.autograd.grad(y, x, y.detach(), retain_graph=True)
            torch.autograd.backward(y, y.detach(), inputs=self.weights)
            self.y.copy_(y.detach())
            self.dx.copy_(dx)

    def seen(self) -> dict[str, torch.Tensor]:
        """Everything that an iteration left."""
        (arena,) = self.state.arenas
        found = {"y": self.y, "dx": self.dx, "scale": arena.scale, "amax": arena.last_amax}
        found |= {f"main_grad {i}": w.main_grad for i, w in enumerate(self.weights)}
        found["nonfinite"] = arena.last_nonfinite
        for slot in arena.slots:
            if slot.delayed is not None:
                found[f"history {slot.name}"] = arena.saved_slot(slot)["amax_history"]
        return found


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_replays_are_eager_iterations(name):
    """Six iterations on new numbers and weights, three of them replays of the third; then one more without the graph."""
    eager, graphed = Model(name), Model(name)
    recorded = Recorded()
    with (
        mock.patch.object(cpu, "usable", lambda *_: False),
        mock.patch.object(gemms, "multiplies", lambda *_: False),
    ):
        for iteration in range(7):
            for model in (eager, graphed):
                model.load(iteration)
            eager.step()
            counts = eager.state.finish_iteration()
            if iteration in (0, 1, 6):
                graphed.step()
                found = graphed.state.finish_iteration()
            else:
                if iteration == 2:
                    captured = CapturedStep(graphed.state)
                    with recorded, captured:
                        graphed.step()
                    addresses = {key: t.data_ptr() for key, t in graphed.seen().items() if "hist" not in key}
                else:
                    recorded.replay()
                found = captured.replayed()
            assert found == counts == graphed.state.last
            assert graphed.state.iteration == eager.state.iteration == iteration + 1
            assert graphed.state.counts == eager.state.counts
            for what, expected in eager.seen().items():
                assert_same_bytes(graphed.seen()[what], expected, f"iteration {iteration} {what}")
    assert addresses["scale"] == graphed.seen()["scale"].data_ptr()


def test_health_is_told_by_a_tensor_and_by_the_host():
    model = Model("delayed")
    model.load(0)
    model.step()
    model.state.finish_iteration()
    captured, recorded = CapturedStep(model.state), Recorded()
    with (
        mock.patch.object(cpu, "usable", lambda *_: False),
        mock.patch.object(gemms, "multiplies", lambda *_: False),
    ):
        model.x[0, 0] = torch.inf  # also what the host met while it captured: no branch is left out
        with recorded, captured:
            model.step()
        first = captured.replayed().nonfinite
        assert first > 0 and float(captured.nonfinite) == first
        model.load(1)
        recorded.replay()
        assert captured.replayed().nonfinite == 0 and not captured.nonfinite


def test_a_capture_shares_no_quantized_weight_with_what_runs():
    """Kept codes from before would be replayed for ever; codes of a capture are not computed yet."""
    model = Model("tensorwise")
    model.step()
    model.state.finish_iteration()
    model.step()  # an iteration that nobody finished: codes are kept in this weight_generation
    casts = model.state.counts.casts
    captured = CapturedStep(model.state)
    with captured:
        model.step()
    assert captured._counts[0].casts == casts and model.state.counts.casts == casts
    model.step()
    assert model.state.counts.casts == 2 * casts


def captured_delayed() -> tuple[Model, Recorded, CapturedStep]:
    """A model after one eager iteration and the capture of its second."""
    model, recorded = Model("delayed"), Recorded()
    model.load(0)
    model.step()
    model.state.finish_iteration()
    model.load(1)
    captured = CapturedStep(model.state)
    with recorded, captured:
        model.step()
    captured.replayed()
    return model, recorded, captured


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda state: make_site("delayed", state=state, name="late"),
            "FP8 tensors were added since the capture, such as late.grad_output: capture it again",
        ),
        (  # as fp8_step of several ranks leaves a converted model: what is added then is in an arena of its own
            lambda state: (state.reduce_over(object()), make_site("delayed", state=state, name="late")),
            "FP8 tensors were added since the capture, such as late.grad_output: capture it again",
        ),
        (
            lambda state: state.watch(SimpleNamespace(wants=lambda iteration: False)),
            "an observer (telemetry) watches its casts",
        ),
    ],
    ids=["tensors", "tensors of an arena", "observer"],
)
def test_a_replay_that_misses_a_later_change_raises(change, words):
    """Added tensors move the arena's memory, and the graph would update the old one."""
    model, _, captured = captured_delayed()
    iteration = model.state.iteration
    kept = change(model.state)
    with pytest.raises(RuntimeError, match="is void, skip its step: " + re.escape(words)):
        captured.replayed()
    assert model.state.iteration == iteration
    del kept


def test_a_replay_gives_scales_to_tensors_whose_histories_were_reset():
    """As loaded weights reset them: the next eager cast would otherwise be a first one again."""
    with (
        mock.patch.object(cpu, "usable", lambda *_: False),
        mock.patch.object(gemms, "multiplies", lambda *_: False),
    ):
        model, recorded, captured = captured_delayed()
        (arena,) = model.state.arenas
        for slot in arena.slots:
            arena.reset_history(slot)
        recorded.replay()
        captured.replayed()
    assert all(slot.warm and arena.saved_slot(slot)["warm"] for slot in arena.slots)


def test_a_capture_records_weights_that_eager_code_has_recorded():
    """A weight that is not cast is recorded once an iteration; each replay needs it."""
    model = Model("delayed")
    model.load(0)
    model.step()
    model.state.finish_iteration()
    (arena,), weights = model.state.arenas, model.sites[0].weights
    weights.observe(model.weights[0])
    arena.rows.zero_()
    with CapturedStep(model.state) as captured:
        weights.observe(model.weights[0])
    captured.replayed()
    slot = weights.casts.quantizers[0].slot
    assert arena.last_amax[slot.index] == model.weights[0].abs().amax()


@pytest.mark.parametrize("where", ["step", "update"])
def test_a_capture_that_fails_leaves_training_as_it_was(where, monkeypatch):
    model = Model("tensorwise")
    model.step()
    model.state.finish_iteration()

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(*((model, "step", fail) if where == "step" else (Arena, "settle_unread", fail)))
    with pytest.raises(RuntimeError, match="out of memory"), CapturedStep(model.state):
        model.step()
    monkeypatch.undo()
    model.step()
    assert model.state.finish_iteration().fp8_gemms > 0 and not model.state.capturing


def refused(state: Fp8State) -> str:
    with pytest.raises(ValueError, match="cannot be captured as a CUDA graph") as caught:
        CapturedStep(state)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_steps_that_decide_on_the_host_are_refused():
    model = Model("delayed")
    model.load(0)
    assert "6 tensors have no delayed scale yet (layers.0.linear.input," in refused(model.state)
    assert "override the recipe of those that training never quantizes" in refused(model.state)
    model.step()
    assert "no delayed scale" in refused(model.state)
    model.state.finish_iteration()
    CapturedStep(model.state)
    late = make_site("tensorwise", state=model.state, name="late")
    assert "no iteration has been finished with all of its layers" in refused(model.state)
    del late
    phased = Fp8State(phases=PrecisionSchedule(0.5, length=4))
    assert "precision changes with the phases" in refused(phased)
    seldom = Fp8State()
    site, _ = make_site(recipes.DelayedScaling(interval=3), state=seldom)
    fp8_linear(*leaves(), None, site).sum().backward()
    seldom.finish_iteration()
    assert "updated every 3 iterations" in refused(seldom)
    rounded = Fp8State()
    site, _ = make_site(recipes.MXFP8BlockScaling(stochastic_rounding=True), state=rounded)
    rounded.finish_iteration()
    with pytest.raises(RuntimeError, match="rounds gradients stochastically"), CapturedStep(rounded):
        fp8_linear(*leaves(), None, site).sum().backward()
    assert not rounded.capturing


def leaves() -> list[torch.Tensor]:
    return [randn(40, 64, seed=1).requires_grad_(), randn(48, 64, seed=2).requires_grad_()]


# ---------------------------------------------------------------------------------- the host waits for nothing


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "tensorwise-pow2"])
def test_nothing_is_read_back(name):
    """Forward, backward and update of a native step with delayed scales in place."""
    with gpu_without_values() as launches:
        state = Fp8State()
        site = GemmSite(fp8_site("a", 0, RECIPES[name], "native", "test"), state, None)
        warm(state)
        with CapturedStep(state) as captured:
            x, w = (torch.empty(n, 256, dtype=torch.bfloat16, requires_grad=True) for n in (128, 384))
            fp8_linear(x, w, None, site).sum().backward()
        assert captured.nonfinite.shape == () and x.grad is not None and w.grad is not None
        assert launches.count >= 3
        with pytest.raises(DataDependentOutputException):
            captured.replayed()


def test_the_first_scales_are_read_back():
    """What makes the test above see something: a cold update asks for values."""
    with gpu_without_values():
        state = Fp8State()
        GemmSite(fp8_site("a", 0, RECIPES["delayed"], "native", "test"), state, None)
        with pytest.raises(DataDependentOutputException):
            state.finish_iteration()


@pytest.mark.parametrize("square", [False, True], ids=["recipes", "square"])
@pytest.mark.parametrize("backend", [native, emulated], ids=lambda backend: backend.name)
def test_what_compiled_code_saves_lies_as_it_was_promised(backend, square):
    """Both backends have the layouts that saved_operands.py expects: else each side would be copied once more."""
    rules = [RECIPES["blockwise"].rule("weight")] if square else [r.rule("input") for r in RECIPES.values()]
    with gpu_without_values() if backend is native else nullcontext():
        for rule in rules:
            layout = SideLayout.parse(str(SideLayout.of(rule, backend.turns_codes(rule))))
            for rows, cols in ((70, 200), (256, 384), (640, 1300)):
                x = (
                    torch.empty(rows, cols, dtype=torch.bfloat16)
                    if backend is native
                    else randn(rows, cols, seed=1)
                )
                side = backend.quantize(x, rule, "both").tensor.columnwise
                for found, promised in (
                    (side.codes, layout.codes(cols, rows)),
                    (side.scale_inv, layout.scales(cols, rows)),
                ):
                    assert found.shape == promised.shape and found.itemsize == promised.dtype.itemsize
                    places = zip(found.shape, found.stride(), promised.strides, strict=True)
                    assert all(size == 1 or a == b for size, a, b in places), (rule, found.stride(), promised)
