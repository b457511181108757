"""Recipes of ours onto Transformer Engine's: what arrives in a real layer's quantizers, and what would be dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as theirs

from megatron_fp8 import Format
from megatron_fp8.backends import transformer_engine as engine
from megatron_fp8.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from tests.support.te.cases import MAPPED


@pytest.fixture(autouse=True)
def nothing_in_use(monkeypatch, extension):
    monkeypatch.setattr(engine, "_made", {})
    monkeypatch.setattr(extension, "fused_amax_and_scale_update_after_reduction", lambda *args: None)


def linear_of(made: Any) -> Any:
    """A linear that made its quantizers from a recipe of TE's, and then asked for its first cast."""
    linear = te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device="cpu")
    with (
        engine.autocast(made, None),
        pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.quantize computes on a GPU"),
    ):
        linear(torch.zeros(32, 32, dtype=torch.bfloat16))
    return linear


@pytest.mark.parametrize("recipe", MAPPED, ids=str)
def test_what_a_recipe_says_arrives_in_the_quantizers(recipe):
    made = engine.te_recipe(recipe)
    assert type(made).__name__ == type(recipe).__name__
    linear = linear_of(made)
    assert engine.quantizer_differences(linear, recipe) == []
    for other in MAPPED:
        if type(other) is type(recipe) and _casts(other) != _casts(recipe):
            assert engine.quantizer_differences(linear, other), f"{recipe} passed for {other}"


def _casts(recipe: Any) -> Any:
    """What can be seen of a recipe in quantizers and state: all but delayed scaling's margin and algorithm."""
    return getattr(recipe, "amax_history_len", None), [
        (rule.fmt.name, rule.granularity, rule.scale, rule.epsilon)
        for rule in map(recipe.rule, ("input", "weight", "grad_output"))
    ]


def test_keywords_alone_do_not_arrive():
    """Why the mapping sets attributes: the fault in Transformer Engine that it works around is still there."""
    made = theirs.Float8CurrentScaling(use_power_2_scales=True)
    assert made.use_power_2_scales and not made.fp8_quant_fwd_inp.power_2_scale
    (first, *_) = engine.quantizer_differences(linear_of(made), Float8CurrentScaling(use_power_2_scales=True))
    assert first == "input: power-of-two scale is False, asked for was True"
    made = theirs.Float8BlockScaling(use_f32_scales=True)
    assert "input: power-of-two scale is True" in engine.quantizer_differences(
        linear_of(made), Float8BlockScaling(use_f32_scales=True)
    )[0]  # fmt: skip
    made = theirs.DelayedScaling(override_linear_precision=(False, False, True))
    assert not hasattr(made, "override_linear_precision")


def test_a_setting_that_does_not_stick_is_an_error(monkeypatch):
    monkeypatch.setattr(
        theirs.DelayedScaling, "__post_init__", lambda self: setattr(self, "amax_history_len", 16)
    )
    said = r"did not take amax_history_len=1024 .* it has 16\. Use fp8_backend"
    with pytest.raises(RuntimeError, match=said):
        engine.te_recipe(DelayedScaling())


def test_a_setting_that_a_version_lacks_is_an_error(monkeypatch):
    monkeypatch.delattr(theirs.Float8CurrentScaling, "fp8_quant_bwd_grad")
    with pytest.raises(RuntimeError, match=r"did not take fp8_quant_bwd_grad=.* it has absent\.") as error:
        engine.te_recipe(Float8CurrentScaling())
    assert "\n" not in str(error.value), "QParams prints five lines"


def test_recipes_that_te_cannot_tell_apart_are_not_mixed():
    engine.te_recipe(DelayedScaling(amax_compute_algo="max"))
    engine.te_recipe(DelayedScaling(amax_compute_algo="max"))
    engine.te_recipe(DelayedScaling(amax_compute_algo="most_recent", margin=1))
    with pytest.raises(ValueError, match="are one to Transformer Engine"):
        engine.te_recipe(DelayedScaling(amax_compute_algo="most_recent"))


def test_the_refused_settings_would_have_been_dropped():
    """None of them is a field of TE's recipe: its classes would have taken and forgotten them."""
    assert not {"interval", "amax_epsilon", "stochastic_rounding", "fp8_wgrad"} & set(
        vars(theirs.DelayedScaling())
    )
    assert not {"margin", "stochastic_rounding"} & set(vars(theirs.Float8CurrentScaling()))


def test_formats_by_role():
    found = linear_of(engine.te_recipe(MXFP8BlockScaling(fp8_format=Format.HYBRID))).quantizers
    places = ("scaling_fwd", 0), ("scaling_fwd", 1), ("scaling_bwd", 0)
    assert [found[key][place].dtype.name for key, place in places] == [
        "kFloat8E4M3", "kFloat8E4M3", "kFloat8E5M2",
    ]  # fmt: skip


def test_the_engine_is_asked_about_the_gpu():
    """By its own functions, of a Blackwell."""
    assert engine.unavailable_reason() is None
    for recipe in MAPPED:
        assert engine.supports(torch.device("cuda"), recipe) is None
    assert "needs a CUDA device" in (engine.supports(torch.device("cpu")) or "")
