"""Recipes: Transformer Engine's names and keywords, validation, and that equality means 'quantizes alike'."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from megatron_fp8.numerics.formats import E4M3, E5M2, Format
from megatron_fp8.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Granularity,
    MXFP8BlockScaling,
    Rule,
    alignment,
)

BUILT_IN = [DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, Float8BlockScaling, MXFP8BlockScaling]
ROLES = ("input", "weight", "grad_output")

DEFAULTS = {
    DelayedScaling: {
        "margin": 0, "fp8_format": Format.HYBRID, "amax_history_len": 1024, "amax_compute_algo": "max",
        "interval": 1, "amax_epsilon": 0.0,
    },
    Float8CurrentScaling: {
        "use_power_2_scales": False, "fp8_format": Format.HYBRID, "margin": 0, "amax_epsilon": 0.0,
    },
    Float8RowwiseScaling: {"fp8_format": Format.E4M3, "amax_epsilon": 0.0},
    Float8BlockScaling: {"fp8_format": Format.E4M3, "use_f32_scales": False, "amax_epsilon": 0.0},
    MXFP8BlockScaling: {"fp8_format": Format.E4M3},
}  # fmt: skip

# One other value for every field: each must change the recipe's equality, hash and repr.
OTHER = {
    "margin": 2,
    "fp8_format": None,  # the other of the two, see below
    "amax_history_len": 16,
    "amax_compute_algo": "most_recent",
    "interval": 4,
    "amax_epsilon": 1e-6,
    "use_power_2_scales": True,
    "use_f32_scales": True,
    "stochastic_rounding": True,
}


def other_value(recipe, field: str):
    if field != "fp8_format":
        return OTHER[field]
    return Format.E4M3 if recipe.fp8_format is Format.HYBRID else Format.HYBRID


@pytest.mark.parametrize("cls", BUILT_IN)
def test_keywords_and_defaults(cls):
    recipe = cls()
    for keyword, value in DEFAULTS[cls].items():
        assert getattr(recipe, keyword) == value, keyword
        assert keyword in inspect.signature(cls).parameters


@pytest.mark.parametrize("cls", BUILT_IN)
def test_every_field_is_part_of_identity(cls):
    """A peer's repr omits the amax algorithm and two recipes share state; here every field counts."""
    base = cls()
    assert base == cls() and hash(base) == hash(cls()) and repr(base) == repr(cls())
    for field in dataclasses.fields(cls):
        changed = dataclasses.replace(base, **{field.name: other_value(base, field.name)})
        assert changed != base, field.name
        assert repr(changed) != repr(base), field.name
        assert field.name in repr(changed) and field.name not in repr(base), field.name
        assert eval(repr(changed), {cls.__name__: cls}) == changed
        assert len({base, changed}) == 2, field.name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(base, field.name, getattr(changed, field.name))


@pytest.mark.parametrize("cls", BUILT_IN)
def test_formats_by_role(cls):
    hybrid, e4m3 = cls(fp8_format=Format.HYBRID), cls(fp8_format=Format.E4M3)
    assert [hybrid.rule(role).fmt for role in ROLES] == [E4M3, E4M3, E5M2]
    assert [e4m3.rule(role).fmt for role in ROLES] == [E4M3, E4M3, E4M3]
    with pytest.raises(ValueError, match=r"weights.*input.*weight.*grad_output"):
        hybrid.rule("weights")


@pytest.mark.parametrize("cls", BUILT_IN)
@pytest.mark.parametrize("bad", ["e5m2", "fp8", 8, None], ids=repr)
def test_unknown_format_is_refused(cls, bad):
    with pytest.raises(ValueError, match=r"(?i)hybrid.*e4m3|e4m3.*hybrid") as error:
        cls(fp8_format=bad)
    assert str(bad) in str(error.value)


@pytest.mark.parametrize(
    "cls, keyword, bad",
    [
        (DelayedScaling, "margin", 0.5),
        (DelayedScaling, "margin", "1"),
        (Float8CurrentScaling, "margin", None),
        (DelayedScaling, "amax_history_len", 0),
        (DelayedScaling, "amax_history_len", 1.0),
        (DelayedScaling, "interval", 0),
        (DelayedScaling, "interval", -3),
        (DelayedScaling, "amax_compute_algo", "mean"),
        (DelayedScaling, "amax_epsilon", -1e-9),
        (DelayedScaling, "amax_epsilon", 1e39),
        (Float8CurrentScaling, "amax_epsilon", float("nan")),
        (Float8RowwiseScaling, "amax_epsilon", float("inf")),
        (Float8BlockScaling, "amax_epsilon", "small"),
        (Float8BlockScaling, "use_f32_scales", "false"),
        (Float8CurrentScaling, "use_power_2_scales", 0),
        (MXFP8BlockScaling, "stochastic_rounding", None),
    ],
)
def test_bad_values_are_named(cls, keyword, bad):
    """The message names the keyword and the value."""
    with pytest.raises(ValueError, match=keyword) as error:
        cls(**{keyword: bad})
    assert repr(bad) in str(error.value)


def test_mxfp8_has_no_epsilon_or_margin():
    with pytest.raises(TypeError):
        MXFP8BlockScaling(amax_epsilon=1.0)
    with pytest.raises(TypeError):
        MXFP8BlockScaling(margin=1)


@pytest.mark.parametrize(
    "recipe, blocks, scale",
    [
        (DelayedScaling(), ["tensor"] * 3, "fp32"),
        (Float8CurrentScaling(), ["tensor"] * 3, "fp32"),
        (Float8CurrentScaling(use_power_2_scales=True), ["tensor"] * 3, "pow2"),
        (Float8RowwiseScaling(), ["row"] * 3, "pow2"),
        (Float8BlockScaling(), ["1x128", "128x128", "1x128"], "pow2"),
        (Float8BlockScaling(use_f32_scales=True), ["1x128", "128x128", "1x128"], "fp32"),
        (MXFP8BlockScaling(), ["1x32"] * 3, "e8m0"),
    ],
    ids=str,
)
def test_granularity_and_scale(recipe, blocks, scale):
    rules = [recipe.rule(role) for role in ROLES]
    assert [str(rule.granularity) for rule in rules] == blocks
    assert {rule.scale for rule in rules} == {scale}
    assert {rule.delayed for rule in rules} == {isinstance(recipe, DelayedScaling)}


def test_power_of_two_scales_reach_every_role():
    """In a peer the keyword leaves the quantizer unchanged."""
    recipe = Float8CurrentScaling(use_power_2_scales=True, margin=1, amax_epsilon=0.5)
    for role in ROLES:
        rule = recipe.rule(role)
        assert (rule.scale, rule.margin, rule.epsilon) == ("pow2", 1, 0.5)


def mixed(role: str):
    """A factory as a user would write it."""
    return {"input": MXFP8BlockScaling(), "weight": Float8BlockScaling(), "grad_output": None}[role]


def test_custom_recipe_takes_rules_recipes_and_none():
    recipe = CustomRecipe(mixed)
    assert recipe.rule("input") == MXFP8BlockScaling().rule("input")
    assert recipe.rule("weight") == Float8BlockScaling().rule("weight")
    assert recipe.rule("grad_output") is None
    own = Rule(E5M2, MXFP8BlockScaling().rule("input").granularity, "pow2")
    only_grad = CustomRecipe(lambda role: own if role == "grad_output" else None)
    assert only_grad.rule("grad_output") is own and only_grad.rule("input") is None
    assert CustomRecipe(mixed) == recipe and hash(CustomRecipe(mixed)) == hash(recipe)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.qfactory = None


@pytest.mark.parametrize(
    "factory, message",
    [
        ("package.module:factory", "package.module:factory"),
        (lambda role: "e4m3", "str"),
        (lambda role: DelayedScaling(), "DelayedScaling"),
        (lambda role: Rule(E5M2, MXFP8BlockScaling().rule("input").granularity), "E5M2"),
        (lambda: None, "one argument"),
        (lambda role, site: None, "one argument"),
    ],
    ids=["not callable", "a string", "delayed without state", "E5M2 x E5M2", "no argument", "two arguments"],
)
def test_custom_recipe_refuses(factory, message):
    with pytest.raises(ValueError, match=message):
        CustomRecipe(factory)


def test_a_factory_is_asked_once_for_each_role():
    """One that answers otherwise the next time would quantize forward and backward by different rules."""
    asked = []
    recipe = CustomRecipe(lambda role: asked.append(role) or MXFP8BlockScaling())
    assert [recipe.rule(role).scale for role in ROLES * 2] == ["e8m0"] * 6
    assert asked == list(ROLES)


@pytest.mark.parametrize("width, expected", [(8, 16), (24, 48), (32, 32), (64, 16), (128, 16)])
def test_tokens_fill_small_blocks(width, expected):
    in_blocks = Rule(E4M3, Granularity(1, width))
    for role in ("input", "grad_output"):
        assert (
            alignment(CustomRecipe(lambda asked, role=role: in_blocks if asked == role else None)) == expected
        )
    assert alignment(CustomRecipe(lambda asked: in_blocks if asked == "weight" else None)) == 16, "no tokens"
