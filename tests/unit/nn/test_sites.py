"""LinearSites: one site for each device and recipe; what inference changed, and histories, go where the linear goes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.nn import convert_to_fp8, fp8_autocast, fp8_step
from megatron_fp8.recipe import MXFP8BlockScaling
from tests.support.small_training import DELAYED, Tower, assert_same_state, batch, sgd, train

CPU, META = torch.device("cpu"), torch.device("meta")
CHANGED: list[str] = []


def change(site: GemmSite) -> None:
    CHANGED.append(site.plan.name)


def test_a_site_for_each_device_and_recipe():
    model = convert_to_fp8(Tower(), DELAYED)
    sites = model.up.fp8_sites
    model(batch(0))
    with fp8_autocast(recipe="mxfp8"):
        model(batch(0))
    assert list(sites.table) == [(CPU, ""), (CPU, repr(MXFP8BlockScaling()))]
    own, other = sites.table.values()
    assert (own.plan.name, other.plan.name) == ("up", "up@mxfp8") and own.state is other.state
    assert sites.on(CPU) is own is model.up.fp8_site and sites.on(CPU, MXFP8BlockScaling()) is other
    assert sites.on(META).state is not own.state


def test_ready_until_it_moves():
    model = convert_to_fp8(Tower(), DELAYED)
    sites = model.up.fp8_sites
    assert sites.ready_on is None
    model.down(torch.ones(4, 64))
    assert sites.ready_on == CPU, "made with its group's"
    model.to("meta")
    assert sites.ready_on is None and sites.table == {}, "the state on the device went with the last weight"


def test_a_copy_within_an_iteration_ends_it_as_the_original():
    """Also what fp8_autocast's recipe recorded in it."""
    model = convert_to_fp8(Tower(), "mxfp8")
    for seed in range(2):
        with fp8_autocast(recipe=DELAYED):
            model(batch(seed) * 2.0**seed).sum().backward()
        if seed == 0:
            fp8_step(model)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        fp8_step(each)
    assert_same_state(model, twin)
    history = model.up.fp8_sites.by_recipe(CPU, repr(DELAYED)).quantizers["input"].slot
    assert history.arena.saved_slot(history)["amax_history"][-1] > 4  # the second batch's


def test_histories_wait_until_it_runs_elsewhere():
    model = convert_to_fp8(Tower(), DELAYED)
    model(batch(0)).sum().backward()
    fp8_step(model)
    scale = model.up.fp8_site.quantizers["input"].slot.scale
    model.to("meta")
    model.up.fp8_sites.on(META)
    model.to_empty(device="cpu")
    assert model.up.fp8_site.quantizers["input"].slot.scale == scale != 1


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_what_inference_changed_is_told_to_sites_made_later(how):
    model = convert_to_fp8(Tower(), DELAYED)
    model(batch(0))
    CHANGED.clear()
    model.up.fp8_sites.prepare(change)
    assert CHANGED == ["up"]
    with fp8_autocast(recipe="mxfp8"):
        model(batch(0))
    assert CHANGED == ["up"], "another recipe's site is not its own"
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    twin(batch(0))
    assert CHANGED == ["up", "up"]
    model.up.fp8_sites.on(META)
    assert CHANGED == ["up"] * 3


def test_a_recipe_entered_in_traced_code_has_no_site():
    model = convert_to_fp8(Tower())
    with pytest.raises(RuntimeError, match=r"up: enter fp8_autocast\(recipe=...\) outside of compiled code"):
        model.up.fp8_sites.by_recipe(CPU, "mxfp8")


@pytest.mark.parametrize("moved", ["all", "up"])
def test_a_model_that_leaves_its_device_keeps_histories_and_no_codes(moved):
    """Through the meta device: nothing of it may stay on the old one, and slots may not pile up with each move."""
    model, twin = (convert_to_fp8(Tower(), DELAYED) for _ in range(2))
    optimizers = sgd(model), sgd(twin)
    train(model, optimizers[0], range(2)), train(twin, optimizers[1], range(2))
    for i in range(2, 5):
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model(batch(i))
        twin(batch(i))
        before = model.up.fp8_group.states[torch.device("cpu")]
        model.get_submodule("" if moved == "all" else moved).to("meta")
        assert model.up.fp8_site.weights.entry is None and model.up.fp8_site.state.device.type == "meta"
        assert (torch.device("cpu") in model.up.fp8_group.states) == (moved == "up")
        with torch.no_grad():  # not load_state_dict, which starts histories again
            for name, parameter in model.to_empty(device="cpu").named_parameters():
                parameter.copy_(weights[name])
        train(model, sgd(model), range(i, i + 1)), train(twin, optimizers[1], range(i, i + 1))
        assert_same_state(model, twin)
        assert len(model.up.fp8_site.state.slots()) == 6
        assert (model.up.fp8_site.state is before) == (moved == "up")
