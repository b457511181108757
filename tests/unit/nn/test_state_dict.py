"""The state of FP8 by name: training goes on from it bit for bit, and what does not fit changes nothing."""

import copy

import pytest
import torch

from benchmarks.support.compare import assert_all_same_bytes
from megatron_fp8.nn import convert_to_fp8, fp8_autocast, fp8_state_dict, load_fp8_state_dict
from megatron_fp8.recipe import DelayedScaling
from tests.support.small_training import DELAYED, Tower, assert_same_state, sgd, train


def test_state_saved_and_resumed_bit_for_bit():
    recipe = DelayedScaling(amax_history_len=3, interval=2, stochastic_rounding=True)  # both count iterations
    straight = convert_to_fp8(Tower(), recipe)
    optimizer = sgd(straight, momentum=0.9)
    train(straight, optimizer, range(3))
    saved = copy.deepcopy((straight.state_dict(), optimizer.state_dict(), fp8_state_dict(straight)))
    losses = train(straight, optimizer, range(3, 6))
    for fp8_first in (True, False):
        resumed = convert_to_fp8(Tower(seed=9), recipe)
        again = sgd(resumed, momentum=0.9)
        if fp8_first:
            load_fp8_state_dict(resumed, saved[2])
        resumed.load_state_dict(saved[0], strict=True)
        again.load_state_dict(copy.deepcopy(saved[1]))
        if not fp8_first:
            load_fp8_state_dict(resumed, saved[2])
        assert train(resumed, again, range(3, 6)) == losses
        assert_same_state(resumed, straight)
    cold = convert_to_fp8(Tower(), recipe)
    cold.load_state_dict(saved[0])
    assert train(cold, sgd(cold), range(3, 6)) != losses  # the state matters


def test_what_the_saved_state_holds():
    model = convert_to_fp8(Tower(), DELAYED)
    saved = fp8_state_dict(model)
    roles = ("input", "weight", "grad_output")
    parts = ("scale", "amax_history", "warm")
    names = {f"{n}.{r}.{p}" for n in ("up", "down") for r in roles for p in parts}
    amaxes = {"up.weight.amax", "down.weight.amax"}
    assert saved.keys() == names | amaxes | {"up.iteration", "down.iteration"}
    assert all(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in saved.values())
    assert fp8_state_dict(convert_to_fp8(Tower())).keys() == {"up.iteration", "down.iteration"}
    with pytest.raises(ValueError, match=r"18 entries are missing \(down.grad_output.amax_history"):
        load_fp8_state_dict(model, {"up.iteration": torch.tensor(3), "down.iteration": torch.tensor(3)})
    with pytest.raises(ValueError, match=r"18 are unknown"):
        load_fp8_state_dict(convert_to_fp8(Tower()), saved)


def test_a_damaged_state_changes_nothing():
    model, fresh = (convert_to_fp8(Tower(), DELAYED) for _ in range(2))
    train(model, sgd(model), range(2))
    before = fp8_state_dict(fresh)
    for key, wrong in [("down.input.amax_history", torch.zeros(0)), ("down.weight.scale", torch.ones(2))]:
        with pytest.raises(ValueError, match=f"damaged: {key}"):
            load_fp8_state_dict(fresh, {**fp8_state_dict(model), key: wrong})
        assert_all_same_bytes(before, fp8_state_dict(fresh))


def test_delayed_scaling_of_an_fp8_autocast_is_saved_copied_and_resumed():
    def go_on(model, steps):
        with fp8_autocast(recipe=DELAYED):
            return train(model, sgd(model), steps)

    straight = convert_to_fp8(Tower())
    go_on(straight, range(3))
    weights, saved = copy.deepcopy(straight.state_dict()), fp8_state_dict(straight)
    assert f"up@{DELAYED!r}.input.scale" in saved and len(saved) == 22
    copied = copy.deepcopy(straight)
    assert_same_state(copied, straight)
    losses = go_on(straight, range(3, 6))
    assert go_on(copied, range(3, 6)) == losses
    fresh, used = convert_to_fp8(Tower()), convert_to_fp8(Tower())
    go_on(used, range(9, 12))  # its sites are there
    for model in (fresh, used):
        load_fp8_state_dict(model, saved)
        model.load_state_dict(weights)
        assert_all_same_bytes(saved, fp8_state_dict(model))  # also before the recipe was called
        assert go_on(model, range(3, 6)) == losses
        assert_same_state(model, straight)
    # What the saved state lacks starts cold; what it names wrongly or in part is refused.
    cold = convert_to_fp8(Tower())
    load_fp8_state_dict(used, fp8_state_dict(cold))
    used.load_state_dict(cold.state_dict())
    assert go_on(used, range(3)) == go_on(cold, range(3))
    part = {name: tensor for name, tensor in saved.items() if not name.endswith("input.warm")}
    with pytest.raises(ValueError, match="2 entries are missing"):
        load_fp8_state_dict(fresh, part)
    with pytest.raises(ValueError, match="1 are unknown"):
        load_fp8_state_dict(fresh, {**saved, f"side@{DELAYED!r}.input.scale": torch.ones(1)})
