"""What is said of FP8 around a call, and whom it switches off: eager, traced, recomputed, and in threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron_fp8.plan import autocast_state as switch_file
from megatron_fp8.plan.autocast_state import (
    AutocastState,
    Forwards,
    LayerBeingBuilt,
    WatchedForwards,
    autocast_context,
    building_layer,
    current_autocast_state,
    fp8_disabled,
    is_watched,
    layer_being_built,
    remember_fp8,
    runs_fp8,
)
from megatron_fp8.plan.site_plan import SitePlan, bf16_site, fp8_site
from megatron_fp8.recipe import MXFP8BlockScaling
from megatron_fp8.state.fp8_state import Fp8State
from megatron_fp8.state.iteration import in_backward
from megatron_fp8.state.precision_schedule import PrecisionSchedule


@dataclass
class Site:
    plan: SitePlan
    state: Fp8State = field(default_factory=Fp8State)


def fp8_plan(layer: int | None = None) -> SitePlan:
    return fp8_site("a", layer, MXFP8BlockScaling(), "emulated", "a test")


def off() -> str | None:
    """Why all are switched off here, None if they are not."""
    autocast = current_autocast_state()
    return autocast.reason if autocast.off == "all" else None


def test_building_layer_nests_and_is_left_on_errors():
    assert layer_being_built() is None
    with building_layer(3, None):
        assert layer_being_built() == LayerBeingBuilt(3, None)
        with building_layer(4, "first layers stay in BF16"):
            assert layer_being_built() == LayerBeingBuilt(4, "first layers stay in BF16")
        assert layer_being_built() == LayerBeingBuilt(3, None)
        with pytest.raises(KeyError), building_layer(5, None):
            raise KeyError
        assert layer_being_built() == LayerBeingBuilt(3, None)
    assert layer_being_built() is None


@pytest.mark.parametrize(
    ("autocast", "planned", "unplanned"),
    [
        (AutocastState(), True, True),
        (AutocastState("unplanned", "layer 0"), True, False),
        (AutocastState("all", "a user"), False, False),
        (AutocastState().with_recipe(MXFP8BlockScaling()), True, True),
    ],
)
def test_who_runs_in_fp8(autocast, planned, unplanned):
    """A plan that knows its layer has settled whether that is one of the first and last."""
    assert runs_fp8(Site(fp8_plan(0)), autocast) is planned
    assert runs_fp8(Site(fp8_plan()), autocast) is unplanned
    assert not runs_fp8(Site(bf16_site("a", None, "a test")), autocast), "nothing switches FP8 on"
    assert not runs_fp8(Site(fp8_plan(), Fp8State(phases=PrecisionSchedule(0.5, length=4))), autocast), (
        "warm-up"
    )


def test_a_switch_is_a_value():
    assert AutocastState() == AutocastState() and hash(AutocastState()) == hash(AutocastState())
    with pytest.raises(AttributeError):
        AutocastState().off = "all"


def test_layers_are_switched_off_for_those_that_did_not_know():
    with fp8_disabled("layer 0", unplanned=True):
        assert current_autocast_state() == AutocastState("unplanned", "layer 0")
        with fp8_disabled("debugging"), fp8_disabled("layer 1", unplanned=True):
            assert off() == "debugging", "a user's own reason outside stays"
        with (
            autocast_context(current_autocast_state().with_recipe(MXFP8BlockScaling())),
            fp8_disabled("debugging"),
        ):
            assert current_autocast_state().recipe == MXFP8BlockScaling() and off() == "debugging"
        assert current_autocast_state() == AutocastState("unplanned", "layer 0")
    assert current_autocast_state() == AutocastState()


def test_fp8_disabled_nests_and_none_changes_nothing():
    assert current_autocast_state() == AutocastState()
    with fp8_disabled(None):
        assert current_autocast_state() == AutocastState()
    with fp8_disabled("debugging"):
        assert off() == "debugging"
        with fp8_disabled(None):
            assert off() == "debugging", "no context can autocast FP8 on again"
        with fp8_disabled("layer 0"):
            assert off() == "layer 0"
        assert off() == "debugging"
    with pytest.raises(KeyError), fp8_disabled("x"):
        raise KeyError
    assert current_autocast_state() == AutocastState()


class Watch:
    """Multiplies by a weight; notes where it ran."""

    def __init__(self, disable: str | None = None):
        self.seen: list[tuple[bool, str | None]] = []
        self.disable = disable

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with fp8_disabled(self.disable):
            self.seen.append((in_backward(), off()))
            return (x * x).sin()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("disable", [None, "layer 0 stays in BF16"])
def test_recompute_is_seen_as_such_and_disables_again(reentrant, disable):
    x = torch.randn(4, requires_grad=True)
    watch, plain = Watch(disable), Watch(disable)
    y = checkpoint(watch, plain(x), use_reentrant=reentrant)
    assert not in_backward()
    plain(y).sum().backward()
    assert watch.seen == [(False, disable), (True, disable)]
    assert plain.seen == [(False, disable), (False, disable)]
    assert not in_backward() and current_autocast_state() == AutocastState()


@pytest.mark.parametrize("reentrant", [True, False])
def test_nested_recompute(reentrant):
    x = torch.randn(4, requires_grad=True)
    watch = Watch()

    def block(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(watch, x, use_reentrant=reentrant)

    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    recomputed = [seen for seen, _ in watch.seen]
    assert recomputed[0] is False and len(recomputed) >= 2 and all(recomputed[1:])


def test_plain_forwards_and_backwards_are_no_recompute():
    x = torch.randn(4, requires_grad=True)
    watch = Watch()
    for _ in range(2):
        watch(x).sum().backward()
    with torch.no_grad():
        watch(x)
    assert watch.seen == [(False, None)] * 3


# ------------------------------------------------------------------------------------------------- recomputations


def recomputed(forwards: list[AutocastState], memory: Forwards, site: Site) -> list[bool]:
    """Whether each call's recomputation, outside of the contexts, runs in FP8."""
    runs: list[bool] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        found = runs_fp8(site, memory.state_for_call(site, True))
        if in_backward():
            runs.append(found)
        return x.sin()

    x, total = torch.ones(2, requires_grad=True), torch.zeros(())
    for autocast in forwards:
        with autocast_context(autocast):
            total = total + checkpoint(call, x, use_reentrant=True).sum()
    total.backward()
    return runs


@pytest.mark.parametrize("layer", [None, 0])
def test_a_recomputation_asks_what_was_meant_and_not_how_it_was_put(layer):
    """Two reasons are one answer; a state that does not concern the site is none."""
    site = Site(fp8_plan(layer))
    assert (
        recomputed([AutocastState("all", "one"), AutocastState("all", "two")], Forwards(), site)
        == [False] * 2
    )
    layers = [AutocastState("unplanned", "layer 0"), AutocastState("unplanned", "layer 1")]
    assert recomputed(layers, Forwards(), site) == [layer == 0] * 2
    differ = [AutocastState("unplanned", "layer 0"), AutocastState()]
    if layer == 0:
        assert recomputed(differ, Forwards(), site) == [True] * 2
        return
    with pytest.raises(RuntimeError, match=r"a ran with FP8 switched off and on.*remember_fp8"):
        recomputed(differ, Forwards(), site)


def test_a_recipe_counts_only_where_it_is_run():
    differ, site = [AutocastState().with_recipe(MXFP8BlockScaling()), AutocastState()], Site(fp8_plan())
    assert recomputed(differ, Forwards(), site) == [True] * 2
    with pytest.raises(RuntimeError, match="remember_fp8"):
        recomputed(differ, Forwards(by_recipe=True), site)


# -------------------------------------------------------------------------------------------- traced code, threads


def outside(site: Site, x: torch.Tensor) -> torch.Tensor:
    return x + 1 if runs_fp8(site, current_autocast_state()) else x - 1


def inside(site: Site, x: torch.Tensor) -> torch.Tensor:
    with fp8_disabled("inside"):
        y = outside(site, x)
    return 10 * y + outside(site, x)


def test_traced_code_finds_the_switch_around_it_and_inside_of_it(nothing_compiled):
    """Reasons are for people: where traced code only reads the state, another one is no other graph."""
    counter, x, site = CompileCounterWithBackend("eager"), torch.zeros(()), Site(fp8_plan())
    reading = torch.compile(outside, fullgraph=True, backend=counter)
    switching = torch.compile(inside, fullgraph=True, backend="eager")
    for reason in (None, "one", None, "two", "three"):
        with fp8_disabled(reason):
            assert (reading(site, x), switching(site, x)) == ((-1, -11) if reason else (1, -9))
            assert off() == reason
    assert counter.frame_count == 2
    again = remember_fp8(reading)
    with fp8_disabled("elsewhere"):
        assert again(site, x) == 1 and reading(site, x) == -1
    assert counter.frame_count == 2


def test_threads_that_leave_in_turn_leave_nothing_behind(nothing_compiled):
    """The first to enter is the first to leave: what the second puts back must not be the first one's."""
    first_left, both_in = threading.Event(), threading.Barrier(2)
    heard: list[str | None] = []

    def first() -> None:
        with fp8_disabled("first"):
            both_in.wait()
            heard.append(off())
        first_left.set()

    thread = threading.Thread(target=first)
    thread.start()
    with fp8_disabled("second"):
        both_in.wait()
        first_left.wait()
        heard.append(off())
    thread.join()
    reading = torch.compile(outside, fullgraph=True, backend="eager")
    assert heard == ["first", "second"] and reading(Site(fp8_plan()), torch.zeros(())) == 1


def reason() -> str:
    return current_autocast_state().reason


def test_remembering_reaches_other_threads_and_leaves_nothing_behind():
    with fp8_disabled("here"):
        inside = remember_fp8(reason)
    outside = remember_fp8(reason)
    heard = []
    thread = threading.Thread(target=lambda: heard.extend([inside(), outside(), reason()]))
    thread.start()
    thread.join()
    with fp8_disabled("another"):
        heard += [inside(), outside(), reason()]
    assert heard == ["here", "", "", "here", "", "another"] and current_autocast_state() == AutocastState()


# ------------------------------------------------------------------------------------------------------------ watched

X = torch.ones(2, 2)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def recomputed_call(forwards: WatchedForwards) -> bool:
    with mock.patch.object(switch_file, "backward_task", return_value=0):
        return forwards.as_operator(X)


def test_modes_and_tensors_without_memory():
    assert not is_watched(X, X)
    with Mode():
        assert is_watched(X)
    with FakeTensorMode() as mode:
        assert is_watched(X)
    assert is_watched(X, mode.from_tensor(X)) and is_watched(X.to("meta"))


@pytest.mark.parametrize("was", [True, False])
def test_a_recomputation_goes_as_its_forward_did(was):
    state = Fp8State()
    forwards = WatchedForwards(state)
    if was:
        with Mode():
            assert forwards.as_operator(X)
        assert recomputed_call(forwards)
    else:
        assert not forwards.as_operator(X)
        with Mode():
            assert not recomputed_call(forwards)
    state.iteration += 1
    assert not recomputed_call(forwards), "forwards of another iteration tell nothing"


def test_forwards_that_differed_tell_nothing():
    forwards = WatchedForwards(Fp8State())
    with Mode():
        forwards.as_operator(X)
    forwards.as_operator(X)
    assert not recomputed_call(forwards)
    with Mode():
        assert recomputed_call(forwards)


def test_a_capture_takes_all_steps():
    state = Fp8State()
    state.begin_capture()
    with Mode():
        assert not WatchedForwards(state).as_operator(X)
