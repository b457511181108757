"""Settings reach the recipes that have a field of their name: one way for every front end."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_fp8.numerics.formats import E4M3, E5M2, Format
from megatron_fp8.plan.settings import (
    FP8_FORMATS,
    RecipeSettings,
    fp8_format_field,
    from_settings,
    has_setting,
)
from megatron_fp8.recipe import (
    RECIPES,
    ROW,
    TENSOR,
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    Recipe,
    Rule,
)

EVERYTHING = RecipeSettings(
    Format.E4M3, 0, 1e-6, True, True, 7, "most_recent", 3, "tests.support.fp8_params.mixed_factory"
)


def test_fp8_format_is_another_name_of_two_settings():
    assert set(FP8_FORMATS) == {"e4m3", "hybrid"}
    assert {fp8_format_field(name) for name in FP8_FORMATS} == {"fp8"}
    assert {fp8_format_field(name) for name in (*RECIPES, None, "unknown", [1])} == {"fp8_recipe"}


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_said_is_the_recipe_itself(name):
    if name == "custom":
        with pytest.raises(ValueError, match="quantizer_factory is None: give quantizer_factory as"):
            from_settings(name, RecipeSettings())
        return
    assert from_settings(name, RecipeSettings()) == RECIPES[name]()


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_said_reaches_every_field_of_its_name(name):
    recipe = from_settings(name, EVERYTHING)
    assert type(recipe) is RECIPES[name]
    said = {**vars(EVERYTHING), "use_power_2_scales": True, "use_f32_scales": False}
    for field in dataclasses.fields(recipe):
        if name not in ("custom", "nvfp4"):  # whose fields no setting has
            assert getattr(recipe, field.name) == said[field.name], field.name
    assert has_setting(name, "amax_history_len") == (name == "delayed")


def test_powers_of_two_are_said_once_for_recipes_that_have_the_choice():
    for wanted in (None, True, False):
        settings = RecipeSettings(pow2_scales=wanted)
        assert from_settings("tensorwise", settings) == Float8CurrentScaling(bool(wanted))
        assert from_settings("blockwise", settings) == Float8BlockScaling(use_f32_scales=wanted is False)


@pytest.mark.parametrize("prefix, words", [("fp8_", "for fp8_recipe='rowwise'"), ("", "for 'rowwise'")])
def test_a_margin_where_there_is_none(prefix, words):
    with pytest.raises(ValueError, match=f"^{prefix}margin=2 does not exist {words}.*set {prefix}margin=0$"):
        from_settings("rowwise", RecipeSettings(margin=2, prefix=prefix))


def test_a_recipe_that_cannot_be_is_refused_when_it_is_made():
    @dataclasses.dataclass(frozen=True)
    class Wrong(Recipe):
        rules: tuple[Rule, Rule, Rule]

        def rule(self, role: str) -> Rule:
            return dict(zip(("input", "weight", "grad_output"), self.rules, strict=True))[role]

    good = Rule(E4M3, ROW)
    assert Wrong((good, good, good)).rule("input") == good
    with pytest.raises(
        ValueError, match=r"Wrong: wgrad would multiply E5M2 \(grad_output\) by E5M2 \(input\)"
    ):
        Wrong((Rule(E5M2, ROW), good, Rule(E5M2, ROW)))
    with pytest.raises(ValueError, match="Wrong: weight cannot be delayed"):
        Wrong((good, Rule(E4M3, TENSOR, delayed=True), good))
    with pytest.raises(NotImplementedError, match="has no rule"):
        dataclasses.dataclass(type("Empty", (Recipe,), {}))()
    assert isinstance(CustomRecipe(lambda role: good), Recipe)


@pytest.mark.parametrize("wrong", [2.0, True, [2], "2"])
def test_what_is_refused_is_so_whatever_was_made_before(wrong):
    """A model asks for its recipe once for each site, and gets one; numbers that are equal need not be good ones."""
    assert from_settings("delayed", RecipeSettings(margin=2)) is from_settings(
        "delayed", RecipeSettings(margin=2)
    )
    assert from_settings("delayed", RecipeSettings(margin=1)).margin == 1
    for name in ("delayed", "tensorwise"):
        with pytest.raises(ValueError, match="margin"):
            from_settings(name, RecipeSettings(margin=wrong))
