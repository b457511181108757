"""The precision plan: one frozen entry a site, with its reason."""

import dataclasses
import json

import pytest

from megatron_fp8.plan.site_plan import bf16_site, check_fp8_site, fp8_site
from megatron_fp8.recipe import CustomRecipe, Float8CurrentScaling, MXFP8BlockScaling
from tests.support.sites import ALL_RECIPES, RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_full_recipe_runs_three_gemms_in_fp8(name):
    recipe = RECIPES[name]
    plan = fp8_site("decoder.layers.3.mlp.linear_fc1", 3, recipe, "emulated", "because")
    assert (plan.name, plan.layer, plan.precision) == ("decoder.layers.3.mlp.linear_fc1", 3, "fp8")
    assert plan.gemms == {"fprop": "fp8", "dgrad": "fp8", "wgrad": "fp8"}
    assert plan.rules == {role: recipe.rule(role) for role in ("input", "weight", "grad_output")}
    assert plan.reason == "because" and plan.backend == "emulated" and plan.recipe is recipe
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.precision = "bf16"


@pytest.mark.parametrize(
    "role, in_fp8", [("input", {"dgrad"}), ("weight", {"wgrad"}), ("grad_output", {"fprop"})]
)
def test_unquantized_role_takes_its_gemms_out_of_fp8(role, in_fp8):
    plan = fp8_site("a", 0, ALL_RECIPES[f"no-{role}"], "emulated", "asked for")
    assert {gemm for gemm, precision in plan.gemms.items() if precision == "fp8"} == in_fp8
    assert plan.precision == "fp8" and plan.rules[role] is None
    assert plan.reason == f"asked for; {role} not quantized by the recipe"


def test_fp8_wgrad_off():
    plan = fp8_site("a", 0, Float8CurrentScaling(), "emulated", "asked for", fp8_wgrad=False)
    assert plan.gemms == {"fprop": "fp8", "dgrad": "fp8", "wgrad": "bf16"}
    assert "fp8_wgrad=False" in plan.reason
    plain = fp8_site("a", 0, ALL_RECIPES["no-input"], "emulated", "asked for", fp8_wgrad=False)
    assert "fp8_wgrad" not in plain.reason, "wgrad was not FP8 anyway"


@pytest.mark.parametrize("quantized", [(), ("input",), ("weight",), ("grad_output",)])
def test_site_without_an_fp8_gemm_is_a_bf16_site(quantized):
    """Nothing is quantized where no GEMM has two quantized operands, and the report must not say otherwise."""
    recipe = CustomRecipe(lambda role: MXFP8BlockScaling() if role in quantized else None)
    plan = fp8_site("a", 7, recipe, "emulated", "asked for")
    assert plan.precision == "bf16" and set(plan.gemms.values()) == {"bf16"}
    assert plan.recipe is None and plan.backend is None and plan.layer == 7
    assert set(plan.rules.values()) == {None}
    assert "not quantized by the recipe" in plan.reason


def test_bf16_site():
    plan = bf16_site("decoder.layers.0.mlp.linear_fc1", 0, "first layer")
    assert plan.precision == "bf16" and plan.recipe is None and plan.backend is None
    assert plan.gemms == {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}
    assert plan.rules == {"input": None, "weight": None, "grad_output": None}
    assert plan.reason == "first layer"


@pytest.mark.parametrize("name", ALL_RECIPES)
def test_as_dict_survives_json(name):
    plan = fp8_site("decoder.layers.0.x", None, ALL_RECIPES[name], "emulated", "because")
    entry = json.loads(json.dumps(plan.as_dict()))
    assert entry == plan.as_dict()
    assert set(entry) == {"name", "layer", "precision", "recipe", "backend", "roles", "gemms", "reason"}
    assert entry["recipe"] == (name.partition("-")[0] if name in RECIPES else "custom")
    plain = bf16_site("output", None, "fp8 is off").as_dict()
    assert json.loads(json.dumps(plain)) == plain and plain["recipe"] is None


def test_roles_are_told_in_words():
    delayed = fp8_site("a", 0, RECIPES["delayed"], "emulated", "").as_dict()["roles"]
    assert delayed["grad_output"] == "e5m2 tensor delayed fp32"
    block = fp8_site("a", 0, RECIPES["blockwise"], "emulated", "").as_dict()["roles"]
    assert block["input"] == "e4m3 1x128 pow2" and block["weight"] == "e4m3 128x128 pow2"


def test_what_leaves_no_site_is_decided_by_the_cause_and_not_by_words():
    words = "fp8_fallback: so it says"
    check_fp8_site([])
    check_fp8_site([("bf16", "asked", words), ("fp8", "asked", "")])
    check_fp8_site([("bf16", "asked", ""), ("bf16", "fallback", "anything")])
    with pytest.raises(ValueError, match=r"leave none of 2 GEMM sites in FP8.*so it says"):
        check_fp8_site([("bf16", "asked", words), ("bf16", "size", "too small")])
