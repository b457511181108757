"""The FP8 linears of a model by name, and linears made one by one that become one group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_fp8.nn import Fp8Linear, convert_to_fp8, fp8_state_dict
from megatron_fp8.nn.module_lookup import fp8_linears, groups_of
from megatron_fp8.nn.trainer import Fp8Trainer
from tests.support.small_training import DELAYED, Tower, assert_same_state, batch, sgd, train


class Own(Tower):
    """Built of Fp8Linears, as Tower is of nn.Linears."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = Fp8Linear(32, 64, recipe=DELAYED), Fp8Linear(64, 32, recipe=DELAYED)


def test_linears_made_one_by_one_become_one_group():
    model, converted = Own(), convert_to_fp8(Tower(), DELAYED)
    assert train(model, sgd(model), range(3)) == train(converted, sgd(converted), range(3))
    assert model.up.fp8_group is model.down.fp8_group
    assert_same_state(model, converted)
    model(batch(0)).sum().backward()
    sgd(model).step()
    with pytest.raises(RuntimeError, match="fp8_step was not called"):
        model(batch(0))


def test_slots_of_united_linears_are_in_module_order_whichever_ran():
    model = Own()
    model.down(torch.ones(4, 64))
    (group,) = groups_of(model)
    assert group.root is model and group.names == ["up", "down"]
    model.up(batch(0))
    (state,) = group.states.values()
    assert [slot.name for slot in state.slots()][::3] == ["up.input", "down.input"]
    assert state.counts.fp8_gemms == 2, "what the lone one counted is the group's"


def test_another_config_is_another_group():
    model = Own()
    model.down = Fp8Linear(64, 32, recipe="mxfp8")
    first, second = groups_of(model)
    assert groups_of(model) == [first, second] and (first.names, second.names) == (["up"], ["down"])


def test_phases_of_a_trainer_hold_for_linears_made_one_by_one():
    model = Own()
    trainer = Fp8Trainer(model, sgd(model), lambda m, x: m(x).square().mean(), warmup=0.5, length=4)
    found = []
    for i in range(4):
        trainer.train_step(batch(i))
        found.append(model.up.fp8_site.state.last.fp8_gemms)
    assert found == [0, 0, 6, 6]


def test_names_are_those_of_the_bare_model():
    model = convert_to_fp8(Tower())
    wrapped = nn.ModuleDict({"a": nn.DataParallel(model)})
    assert list(fp8_linears(wrapped)) == ["a.up", "a.down"]
    with pytest.raises(ValueError, match="Tower has no FP8 linear"):
        fp8_linears(Tower())


def test_a_child_called_module_is_no_wrapper():
    """Its linear and that of the same name beside it must not share an entry; a wrapper adds nothing to names."""

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.up = Tower(), nn.Linear(32, 32)

    model = convert_to_fp8(Holder(), DELAYED)
    names = {key.removesuffix(".iteration") for key in fp8_state_dict(model) if key.endswith(".iteration")}
    assert names == {"module.up", "module.down", "up"}
    assert fp8_state_dict(nn.DataParallel(model)).keys() == fp8_state_dict(model).keys()
    both = nn.ModuleDict({"a": nn.DataParallel(model), "b": model.up})
    assert "a.module.up.iteration" in fp8_state_dict(both)
