"""Fp8Config's exceptions by name: of linears, of their GEMMs and of their operands."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from megatron_fp8.nn import (
    Fp8Config,
    Fp8Linear,
    convert_to_fp8,
    fp8_autocast,
    fp8_state_dict,
    fp8_step,
    load_fp8_state_dict,
)
from megatron_fp8.recipe import Float8RowwiseScaling, MXFP8BlockScaling
from tests.support.size_table import make_table

FP8 = {"fprop": "fp8", "dgrad": "fp8", "wgrad": "fp8"}


def make() -> nn.Module:
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))  # noqa: E731
    return nn.ModuleDict({"up": block(), "down": block(), "lm_head": nn.Linear(32, 48)})


def test_each_linear_runs_as_its_last_matches_say(capsys):
    overrides = {"up.*:wgrad": "bf16", "*.0:grad_output": "e4m3", "down.2": "bf16", "up.2:input": "rowwise"}
    model = convert_to_fp8(
        make(), config=Fp8Config(recipe="mxfp8", overrides=overrides, backward_format="e5m2")
    )
    assert model.fp8_report.converted == ["up.0", "up.2", "down.0"]
    assert model.fp8_report.skipped["down.2"] == "overrides 'down.2'"
    table = capsys.readouterr().out
    assert "overrides 'up.*:wgrad': bf16; overrides '*.0:grad_output': e4m3; backend" in table
    plans = {name: model.get_submodule(name).fp8_site.plan for name in model.fp8_report.converted}
    assert {name: plan.gemms["wgrad"] for name, plan in plans.items()} == {
        "up.0": "bf16",
        "up.2": "bf16",
        "down.0": "fp8",
    }
    assert [plan.rules["grad_output"].fmt.name for plan in plans.values()] == ["e4m3", "e5m2", "e4m3"]
    assert plans["up.2"].rules["input"] == Float8RowwiseScaling().rule("input")
    x = torch.randn(40, 32, requires_grad=True)
    model["down"](model["up"](x)).sum().backward()
    counts = fp8_step(model)
    assert (counts.fp8_gemms, counts.hp_gemms) == (2 + 2 + 3, 1 + 1)
    assert counts.casts == 3 + 3 + 3


def test_copies_and_pickles_keep_them():
    model = convert_to_fp8(make()["up"], config=Fp8Config(overrides={"0:wgrad": "bf16"}))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (
            other[0].fp8_site.plan.gemms == {**FP8, "wgrad": "bf16"} and other[2].fp8_site.plan.gemms == FP8
        )
    assert hash(Fp8Config(overrides={"a": "bf16"})) and Fp8Config(overrides={"a": "bf16"}) != Fp8Config()


@pytest.mark.parametrize(
    "overrides, words",
    [
        (
            {"up.7": "bf16"},
            r"^overrides: 'up\.7' matches no GEMM site; the sites are up\.0, up\.2, down\.0, down\.2$",
        ),
        ({"up.0": "bf16", "ups.*:wgrad": "bf16"}, r"'ups\.\*:wgrad' matches no GEMM site"),
        ({"lm_head": "bf16"}, "'lm_head' matches no GEMM site"),
        ({"*:fprop": "e5m2"}, r"up\.0 \(.*\): fprop would multiply E5M2"),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_matches_nothing_or_cannot_be_is_an_error_and_leaves_the_model(device, overrides, words):
    model = make().to(device)
    with pytest.raises(ValueError, match=words):
        convert_to_fp8(model, config=Fp8Config(overrides=overrides))
    assert type(model["up"][0]) is nn.Linear


def test_what_a_config_refuses():
    """What check_overrides refuses, and what has no meaning here."""
    with pytest.raises(ValueError, match="'foo' is no part of a linear"):
        Fp8Config(overrides={"*:foo": "bf16"})
    with pytest.raises(ValueError, match=r"overrides\['\*'\]='custom' has no meaning by itself"):
        Fp8Config(overrides={"*": "custom"})


def test_a_margin_reaches_recipes_by_name_or_is_refused():
    with pytest.raises(ValueError, match="margin=1 does not exist for 'mxfp8'"):
        Fp8Config(margin=1, overrides={"*.0": "mxfp8"})
    config = Fp8Config(recipe="delayed", margin=1, overrides={"*:input": "tensorwise"})
    plan = Fp8Linear(32, 32, config=config).fp8_site.plan
    assert {rule.margin for rule in plan.rules.values()} == {1}


def test_a_lone_linear_is_named_linear():
    linear = Fp8Linear(32, 64, config=Fp8Config(overrides={"linear:dgrad": MXFP8BlockScaling()}))
    assert linear.fp8_site.plan.operands["dgrad"]["weight"].rule == MXFP8BlockScaling().rule("weight")
    with pytest.raises(ValueError, match="'fc1' matches no GEMM site; the sites are linear"):
        Fp8Linear(32, 64, config=Fp8Config(overrides={"fc1": "bf16"}))
    with pytest.raises(ValueError, match="'fc1' matches no GEMM site; the sites are linear"):
        Fp8Linear.from_linear(nn.Linear(32, 64), config=Fp8Config(overrides={"fc1": "bf16"}))


def test_on_the_meta_device_it_is_said_before_there_is_a_backend():
    overrides = {"up.0": "bf16", "up.2:wgrad": "bf16", "down.*": "mxfp8"}
    model = convert_to_fp8(make().to("meta"), config=Fp8Config(overrides=overrides))
    rows = {row.name: row for row in model.fp8_report.rows}
    assert not rows["up.0"].converted and rows["up.0"].reason == "overrides 'up.0'"
    assert rows["up.2"].reason.startswith("overrides 'up.2:wgrad': bf16; on the meta device")
    assert rows["down.0"].runs == "mxfp8"
    moved = model.to_empty(device="cpu")
    assert moved["up"][2].fp8_site.plan.gemms["wgrad"] == "bf16"


def test_fp8_autocast_has_a_recipe_for_all_of_a_linear():
    linear = Fp8Linear(32, 64, config=Fp8Config(overrides={"*:wgrad": "bf16"}))
    x = torch.randn(8, 32)
    with fp8_autocast(recipe="mxfp8"):
        linear(x).sum().backward()
    assert fp8_step(linear).fp8_gemms == 2  # fprop and wgrad: the input needs no gradient
    linear(x).sum().backward()
    counts = fp8_step(linear)
    assert (counts.fp8_gemms, counts.hp_gemms) == (1, 1)


def test_what_is_said_by_name_wins_over_the_size_filter(tmp_path):
    table = make_table(
        tmp_path / "table.json",
        {(32, 64, 32): 1.3, (64, 32, 32): 1.3, (512, 512, 32): 0.7},
        MXFP8BlockScaling(),
    )
    config = Fp8Config(recipe="mxfp8", size_filter=table, overrides={"0:wgrad": "bf16"})
    model = convert_to_fp8(make()["up"], config=config)
    assert model.fp8_report.converted == ["0"] and "does not pay" in model.fp8_report.skipped["2"]


def test_every_history_of_a_role_is_in_the_checkpoint():
    def made():
        torch.manual_seed(0)
        config = Fp8Config(recipe="delayed", overrides={"*:dgrad": "e4m3"})
        return convert_to_fp8(nn.Sequential(nn.Linear(32, 64)), config=config, skip=())

    trained, fresh = made(), made()
    trained(torch.randn(8, 32, requires_grad=True)).sum().backward()
    fp8_step(trained)
    state = fp8_state_dict(trained)
    assert {key for key in state if key.startswith("0.grad_output") and key.endswith("scale")} == {
        "0.grad_output.scale",
        "0.grad_output.wgrad.scale",
    }
    load_fp8_state_dict(fresh, state)
    for role, quantizer in trained[0].fp8_site.quantizers.items():
        assert torch.equal(fresh[0].fp8_site.quantizers[role].delayed_scale(), quantizer.delayed_scale())


def test_what_is_written_into_the_config_after_the_conversion_changes_nothing():
    config = Fp8Config(overrides={"0": "bf16"})
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), config=config)
    config.overrides["1"] = "bf16"
    model(torch.randn(4, 32))
    assert isinstance(model[1], Fp8Linear) and model[1].fp8_site.is_fp8
