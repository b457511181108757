"""The precision plan: one frozen entry a site, with its reason; overrides by name."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron_fp8.plan.site_plan import bf16_site, check_overrides_match, fp8_site, matching_override
from megatron_fp8.recipe import CustomRecipe, Float8CurrentScaling, MXFP8BlockScaling
from tests.support.sites import ALL_RECIPES, RECIPES

NAMES = [
    f"decoder.layers.{layer}.{part}"
    for layer in (0, 1, 10)
    for part in ("self_attention.linear_qkv", "mlp.linear_fc1")
]


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
def test_unquantised_role_takes_its_gemms_out_of_fp8(role, in_fp8):
    plan = fp8_site("a", 0, ALL_RECIPES[f"no-{role}"], "emulated", "asked for")
    assert {gemm for gemm, precision in plan.gemms.items() if precision == "fp8"} == in_fp8
    assert plan.precision == "fp8" and plan.rules[role] is None
    assert plan.reason == f"asked for; {role} not quantised by the recipe"


def test_fp8_wgrad_off():
    plan = fp8_site("a", 0, Float8CurrentScaling(), "emulated", "asked for", fp8_wgrad=False)
    assert plan.gemms == {"fprop": "fp8", "dgrad": "fp8", "wgrad": "bf16"}
    assert "fp8_wgrad=False" in plan.reason
    plain = fp8_site("a", 0, ALL_RECIPES["no-input"], "emulated", "asked for", fp8_wgrad=False)
    assert "fp8_wgrad" not in plain.reason, "wgrad was not FP8 anyway"


@pytest.mark.parametrize("quantised", [(), ("input",), ("weight",), ("grad_output",)])
def test_site_without_an_fp8_gemm_is_a_bf16_site(quantised):
    """Nothing is quantised where no GEMM has two quantised operands, and the report must not say otherwise."""
    recipe = CustomRecipe(lambda role: MXFP8BlockScaling() if role in quantised else None)
    plan = fp8_site("a", 7, recipe, "emulated", "asked for")
    assert plan.precision == "bf16" and set(plan.gemms.values()) == {"bf16"}
    assert plan.recipe is None and plan.backend is None and plan.layer == 7
    assert set(plan.rules.values()) == {None}
    assert "not quantised by the recipe" in plan.reason


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


@pytest.mark.parametrize(
    "pattern, matches",
    [
        ("*", NAMES),
        ("linear_fc1", [n for n in NAMES if n.endswith("linear_fc1")]),
        ("linear_*", NAMES),
        ("decoder.layers.0.*", NAMES[:2]),
        ("decoder.layers.1.*", NAMES[2:4]),
        ("decoder.layers.[01].mlp.*", [NAMES[1], NAMES[3]]),
        ("*.mlp.*", [n for n in NAMES if ".mlp." in n]),
        ("mlp.linear_fc1", []),
        ("layers.0", []),
        ("LINEAR_FC1", []),
    ],
)
def test_globs_match_the_full_name_or_its_last_part(pattern, matches):
    assert [name for name in NAMES if matching_override(name, {pattern: "bf16"})] == matches


def test_last_match_wins():
    overrides = {"*": "bf16", "linear_fc1": "mxfp8", "decoder.layers.10.*": "rowwise"}
    assert matching_override(NAMES[0], overrides) == ("*", "bf16")
    assert matching_override(NAMES[1], overrides) == ("linear_fc1", "mxfp8")
    assert matching_override(NAMES[5], overrides) == ("decoder.layers.10.*", "rowwise")
    backwards = dict(reversed(overrides.items()))
    assert matching_override(NAMES[5], backwards) == ("*", "bf16")
    assert matching_override(NAMES[0], {}) is None


def test_glob_that_matches_nothing_is_an_error():
    check_overrides_match({"linear_fc1": "bf16", "decoder.layers.10.*": "mxfp8"}, NAMES)
    check_overrides_match({}, [])
    with pytest.raises(
        ValueError, match=r"'linear_fc3' matches no GEMM site; the sites are decoder\.layers\.0\."
    ):
        check_overrides_match({"linear_fc1": "bf16", "linear_fc3": "bf16"}, iter(NAMES))
