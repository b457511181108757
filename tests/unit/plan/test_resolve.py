"""What a linear runs in, and why: settings, a name and a device become an entry of the plan."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fp8.backends.native import backend as native
from megatron_fp8.plan.resolve import SiteRequest, cast_specs, named_recipes, resolve
from megatron_fp8.recipe import CustomRecipe, DelayedScaling, Float8BlockScaling, MXFP8BlockScaling
from tests.support.scaled_mm import fake_torch
from tests.support.sites import ALL_RECIPES

CPU = torch.device("cpu")
FC1 = "decoder.layers.3.mlp.linear_fc1"


def plan(
    overrides: dict[str, Any], recipe: str = "mxfp8", bf16_reason: str | None = None, **fields: Any
) -> Any:
    request = SiteRequest(
        ALL_RECIPES[recipe],
        named_recipes(overrides, lambda name: ALL_RECIPES[name]),
        reason="recipe of all",
        overrides=overrides,
        prefix="fp8_",
        **{"backend": "emulated", **fields},
    )
    return resolve(request, FC1, 3, CPU, bf16_reason=bf16_reason)


M, B = "e4m3 1x32 e8m0", "e4m3 1x128 pow2"


@pytest.mark.parametrize(
    "overrides, roles, reason",
    [
        ({}, [M, M, "e5m2 1x32 e8m0"], "recipe of all; backend asked for"),
        (
            {"*:wgrad": "bf16"},
            [M, M, "e5m2 1x32 e8m0"],
            "recipe of all; fp8_overrides '*:wgrad': bf16; backend asked for",
        ),
        (
            {"linear_fc1:input": "blockwise", "*.linear_fc1:wgrad": "e4m3"},
            [B, M, "e5m2 1x32 e8m0 in dgrad, e4m3 1x32 e8m0 in wgrad"],
            "recipe of all; fp8_overrides 'linear_fc1:input': blockwise; fp8_overrides '*.linear_fc1:wgrad': e4m3;"
            " backend asked for",
        ),
        (
            {"*:fprop": "blockwise", "*:grad_output": "bf16"},
            [f"{B} in fprop, {M} in wgrad", f"e4m3 128x128 pow2 in fprop, {M} in dgrad", None],
            "recipe of all; fp8_overrides '*:fprop': blockwise; fp8_overrides '*:grad_output': bf16; backend asked for",
        ),
        (
            {"*:input": "bf16", "*:fprop": "e4m3"},
            [f"{M} in fprop, high precision in wgrad", M, "e5m2 1x32 e8m0"],
            "recipe of all; fp8_overrides '*:input': bf16; fp8_overrides '*:fprop': e4m3; backend asked for",
        ),
        (
            {"*:wgrad": "bf16", "*": "blockwise"},
            [B, "e4m3 128x128 pow2", B],
            "fp8_overrides '*'; backend asked for",
        ),
        ({"*": "e4m3"}, [M, M, M], "recipe of all; fp8_overrides '*': e4m3; backend asked for"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_the_report_shows_each(overrides, roles, reason):
    entry = plan(overrides).as_dict()
    assert list(entry["roles"].values()) == roles and entry["reason"] == reason
    assert json.loads(json.dumps(entry)) == entry


@pytest.mark.parametrize(
    "overrides, in_fp8, reason",
    [
        ({}, set(), "an end"),
        ({"*:input": "e4m3", "*:weight": "mxfp8", "*:wgrad": "bf16"}, set(), "an end"),
        ({"*:fprop": "mxfp8"}, {"fprop"}, "an end; fp8_overrides '*:fprop': mxfp8; backend asked for"),
        ({"*:dgrad": "e4m3"}, {"dgrad"}, "an end; fp8_overrides '*:dgrad': e4m3; backend asked for"),
        ({"*": "fp8"}, {"fprop", "dgrad", "wgrad"}, "fp8_overrides '*'; backend asked for"),
        ({"*": "fp8", "*.linear_fc1": "bf16"}, set(), "fp8_overrides '*.linear_fc1'"),
        ({"*": "bf16"}, set(), "fp8_overrides '*'"),
        ({"*": "bf16", "linear_fc1": "bf16", "*:dgrad": "bf16"}, set(), "fp8_overrides 'linear_fc1'"),
        (
            {"*:weight": "blockwise", "*:grad_output": "mxfp8", "*:fprop": "e4m3"},
            {"fprop"},
            "an end; fp8_overrides '*:weight': blockwise; fp8_overrides '*:fprop': e4m3; backend asked for",
        ),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_what_puts_a_layer_back(overrides, in_fp8, reason):
    """A GEMM by name, or the whole linear; how a role is quantized says nothing of who is in FP8."""
    found = plan(overrides, bf16_reason="an end")
    assert {gemm for gemm, precision in found.gemms.items() if precision == "fp8"} == in_fp8
    assert found.precision == ("fp8" if in_fp8 else "bf16") and found.reason == reason
    if "*:weight" in overrides and in_fp8:
        assert str(found.rules["weight"]) == "e4m3 128x128 pow2"


def test_fp8_wgrad_holds_unless_wgrad_is_named():
    for overrides, precision in (({}, "bf16"), ({"*": "blockwise"}, "bf16"), ({"*:wgrad": "fp8"}, "fp8")):
        found = plan(overrides, fp8_wgrad=False)
        assert found.gemms == {"fprop": "fp8", "dgrad": "fp8", "wgrad": precision}
        assert ("fp8_wgrad=False" in found.reason) == (precision == "bf16")


def test_unquantized_roles_hold_unless_they_are_named():
    for overrides, rule in (({}, None), ({"*": "blockwise"}, None), ({"*:weight": "blockwise"}, "blockwise")):
        found = plan(overrides, unquantized=("weight",))
        assert found.rules["weight"] == (None if rule is None else ALL_RECIPES[rule].rule("weight"))
        assert ("weight not quantized as asked" in found.reason) == (rule is None)


@pytest.mark.parametrize(
    "overrides, gemm",
    [
        ({"*": "e5m2"}, "fprop"),
        ({"*:fprop": "e5m2"}, "fprop"),
        ({"*:weight": "e5m2"}, "dgrad"),
        ({"*:input": "e5m2"}, "wgrad"),
    ],
    ids=str,
)
def test_e5m2_by_e5m2_is_refused_by_name(overrides, gemm, capsys):
    key, value = next(iter(overrides.items()))
    words = rf"{FC1} \(recipe of all; fp8_overrides '\{key}': {value}\): {gemm} would multiply E5M2"
    with pytest.raises(ValueError, match=words):
        plan(overrides)
    left = plan(overrides, warn=True)
    assert left.precision == "bf16" and left.reason.startswith(f"fp8_fallback: {FC1}")
    assert f"{gemm} would multiply E5M2" in capsys.readouterr().err


@pytest.fixture
def tensor_cores():
    """A GPU that this CPU stands in for: all products of torch but MX."""
    with (
        mock.patch.object(native, "device_reason", return_value=None),
        fake_torch(refuse={"mx": "MX needs sm100"}),
    ):
        yield


@pytest.mark.parametrize(
    "overrides, said, lacks",
    [
        (
            {"*:input": "mxfp8"},
            "recipe of all; fp8_overrides '*:input': mxfp8",
            "no tensor-core GEMM multiplies 1x32",
        ),
        ({"*.linear_fc1": "mxfp8"}, "fp8_overrides '*.linear_fc1'", "MX needs sm100"),
        (
            {"*": "bf16", "*:fprop": "mxfp8"},
            "fp8_overrides '*'; fp8_overrides '*:fprop': mxfp8",
            "MX needs sm100",
        ),
    ],
    ids=str,
)
def test_what_a_named_backend_does_not_multiply_is_refused_by_name(overrides, said, lacks, tensor_cores):
    """The linear and its overrides, the backend, the GEMM; of a linear of which no override speaks the last two."""
    assert plan({}, "rowwise", backend="native").backend == "native"
    words = f"{FC1} ({said}): fp8_backend 'native' cannot run on cpu: fprop: "
    with pytest.raises(ValueError, match=rf"^{re.escape(words)}.*{lacks}"):
        plan(overrides, "rowwise", backend="native")
    left = plan(overrides, "rowwise", backend="native", warn=True)
    assert left.precision == "bf16" and left.reason.startswith(f"fp8_fallback: {words}")
    with pytest.raises(ValueError, match=r"^fp8_backend 'native' cannot run on cpu: fprop: "):
        plan({"linear_fc2:input": "e4m3"}, "mxfp8", backend="native")


def test_a_format_of_nothing_is_refused():
    request = SiteRequest(
        CustomRecipe(lambda role: None if role == "weight" else Float8BlockScaling()),
        overrides={"*:weight": "e4m3"},
    )
    with pytest.raises(
        ValueError, match=r"'\*:weight': 'e4m3' is a format, and the recipe does not quantize weight"
    ):
        cast_specs(request, FC1)


def test_a_recipe_may_stand_there_itself():
    recipe = MXFP8BlockScaling(stochastic_rounding=True)
    found = plan({"*:dgrad": recipe}, "blockwise")
    assert found.operands["dgrad"]["grad_output"].rule == recipe.rule("grad_output")
    assert found.operands["wgrad"]["grad_output"].rule == Float8BlockScaling().rule("grad_output")
    assert "fp8_overrides '*:dgrad': MXFP8BlockScaling" in found.reason
    assert plan({"*": recipe}, "blockwise").recipe is recipe


def test_linears_that_are_alike_share_all_but_their_names() -> None:
    """A model of 100,000 linears asks for as many plans."""

    def request(recipe: Any) -> SiteRequest:
        named = {"mxfp8": ALL_RECIPES["mxfp8"]}
        return SiteRequest(recipe, named, reason="of all", overrides={"*.b": "mxfp8"})

    whole = DelayedScaling()
    one, other, named = (
        resolve(request(whole), f"layers.{i}.{name}", i, CPU) for i, name in enumerate("acb")
    )
    assert (one.name, one.layer, other.name, other.layer) == ("layers.0.a", 0, "layers.1.c", 1)
    assert one.operands is other.operands and one == dataclasses.replace(
        other, name=one.name, layer=one.layer
    )
    assert named.operands != one.operands
    high = resolve(request(whole), "layers.0.a", 0, CPU, bf16_reason="the first")
    assert high.precision == "bf16" and high.reason == "the first"
    kept = resolve(dataclasses.replace(request(whole), fp8_wgrad=False), "layers.0.a", 0, CPU)
    assert kept.gemms["wgrad"] == "bf16" and one.gemms["wgrad"] == "fp8"


def test_a_factory_made_into_a_recipe_again_is_asked_again() -> None:
    """Plans are shared by equal recipes: of an object that cannot be hashed, and of one that changes its mind."""

    @dataclasses.dataclass
    class Factory:
        recipe: Any

        def __call__(self, role: str) -> Any:
            return self.recipe

    factory = Factory(MXFP8BlockScaling())
    before = resolve(SiteRequest(CustomRecipe(factory)), FC1, 3, CPU)
    same = CustomRecipe(lambda role: MXFP8BlockScaling())
    assert CustomRecipe(factory) == same and repr(CustomRecipe(factory)) == repr(same)
    factory.recipe = Float8BlockScaling()
    after = resolve(SiteRequest(CustomRecipe(factory)), FC1, 3, CPU)
    assert before.operands["fprop"]["input"].rule == MXFP8BlockScaling().rule("input")
    assert after.operands["fprop"]["input"].rule == Float8BlockScaling().rule("input")
    assert CustomRecipe(factory) != same and repr(CustomRecipe(factory)) != repr(same)  # fp8_autocast's key
