"""Fp8Group: what belongs to one model, made when it first runs, gone when the model is gone, not shared by copies."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from megatron_fp8.nn import Fp8Linear, convert_to_fp8, fp8_state_dict, fp8_step
from megatron_fp8.nn.fp8_group import Fp8Group
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.precision_schedule import PrecisionSchedule
from tests.support.small_training import DELAYED, Tower, assert_same_state, batch, sgd, train

CPU, META = torch.device("cpu"), torch.device("meta")
ROLES = ("input", "weight", "grad_output")


def test_sites_of_all_linears_are_made_in_module_order_by_the_first_that_runs():
    model = convert_to_fp8(Tower(), DELAYED)
    assert model.up.fp8_group.states == {}
    model.down(torch.ones(4, 64))
    assert model.up.fp8_group is model.down.fp8_group
    (state,) = model.up.fp8_group.states.values()
    assert [slot.name for slot in state.slots()] == [f"{n}.{r}" for n in ("up", "down") for r in ROLES]


def test_a_linear_holds_two_references_and_the_group_none_back():
    plain, converted = Tower(), convert_to_fp8(Tower())
    model = converted.up
    model(batch(0)).sum().backward()
    fp8_step(model)
    assert vars(model).keys() - vars(plain.up).keys() == {"fp8_group", "fp8_sites"}
    gone = [weakref.ref(x) for x in (model, model.fp8_group, model.fp8_sites, model.fp8_site)]
    gc.disable()
    try:
        del model, converted
        assert [ref() for ref in gone] == [None] * 4, "without a search for cycles"
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "copy"])
def test_copies_of_a_linear(how):
    """Another group, but for a shallow copy: that is another linear of its group."""
    model = convert_to_fp8(Tower(), DELAYED)
    for i in range(2):
        model(batch(i)).sum().backward()
        fp8_step(model)
    linear = model.up
    copied = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        "copy": copy.copy,
    }[how](linear)
    assert (copied.fp8_group is linear.fp8_group) == (how == "copy")
    assert copied.fp8_sites is not linear.fp8_sites and copied.fp8_sites.linear is copied
    assert copied.fp8_name == "up" and copied.fp8_sites.linear is copied
    assert copied.fp8_group.names == (["up", "down", "up"] if how == "copy" else ["up"])
    slots = [x.fp8_site.quantizers["input"].slot for x in (copied, linear)]
    assert (slots[0].scale == slots[1].scale) == (how == "deepcopy"), "a deep copy alone has the histories"
    assert slots[0] is not slots[1]
    assert copied(batch(0)).shape == (16, 64)


def test_a_deep_copy_goes_on_as_the_original_does():
    """Also where scales are due in every third iteration only, and in the phase of its trainer."""
    model = convert_to_fp8(Tower(), DelayedScaling(amax_history_len=4, interval=3))
    train(model, sgd(model), range(2))
    twin = copy.deepcopy(model)
    for each in (model, twin):
        train(each, sgd(each), range(2, 6))
    assert_same_state(model, twin)


def test_the_step_of_an_optimizer_reaches_the_groups_it_trains_and_no_other():
    one, other = (convert_to_fp8(Tower(), DELAYED) for _ in range(2))
    for model in (one, other):
        model(batch(0)).sum().backward()
    generations = [m.up.fp8_site.state.weight_generation for m in (one, other)]
    sgd(one).step()
    assert [bool(m.up.fp8_site.state.missing_end) for m in (one, other)] == [True, False]
    now = [m.up.fp8_site.state.weight_generation for m in (one, other)]
    assert now == [generations[0] + 1, generations[1]]
    fp8_step(one)
    assert not one.up.fp8_site.state.missing_end


def test_phases_hold_on_devices_that_come_later():
    model = convert_to_fp8(Tower())
    model(batch(0))
    group = model.up.fp8_group
    group.set_phases(PrecisionSchedule(0.5, 0.0, 4))
    assert group.state(CPU).phase == group.state(META).phase == "warm-up"


def test_resuming_reaches_every_state():
    group = Fp8Group(convert_to_fp8(nn.Sequential(nn.Linear(32, 32)))[0].fp8_config)
    first = group.state(CPU)
    group.resume(7)
    assert (first.iteration, first.weight_generation, group.state(META).iteration) == (7, 1, 7)


def test_a_linear_that_is_the_whole_model_is_called_linear():
    """After its first step, too, which looks for the names that linears have in their model."""
    lone = Fp8Linear(32, 32, recipe=DELAYED)
    for model in (lone, convert_to_fp8(nn.Linear(32, 32), recipe=DELAYED)):
        model(torch.randn(4, 32)).sum().backward()
        fp8_step(model)
        assert model.fp8_site.plan.name == "linear"
        assert ".iteration" in fp8_state_dict(model)  # its parameters have no prefix either
