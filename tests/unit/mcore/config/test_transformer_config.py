"""TransformerConfig: what is accepted, what is refused and how, and what survives copying."""

import copy
import dataclasses
import functools
import pickle
import sys
import types

import pytest
from megatron.core.enums import Fp8Recipe
from megatron.core.transformer import transformer_config as megatron_config

from megatron_fp8.estimate import config_reader as estimate_settings
from megatron_fp8.mcore.config.fp8_checks import RECIPES
from megatron_fp8.mcore.config.transformer_config import IterationEnd, check_without_te
from megatron_fp8.mcore.report import recipe_line
from megatron_fp8.nn import Fp8Config
from megatron_fp8.recipe import recipe_name
from megatron_fp8.study.requirements import recipes_of
from megatron_fp8.train.config import run_config
from tests.support.megatron_settings import FACTORY, SIZES, make


def test_it_is_a_megatron_config_with_megatrons_defaults():
    ours, theirs = make(), megatron_config.TransformerConfig(**SIZES)
    assert isinstance(ours, megatron_config.TransformerConfig)
    for f in dataclasses.fields(theirs):
        # Fresh closures, and the one default that is ours.
        if f.name not in ("init_method", "output_layer_init_method", "embedding_init_method", "fp8_recipe"):
            assert getattr(ours, f.name) == getattr(theirs, f.name), f.name


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "nvfp4"])
def test_a_recipe_name_is_accepted_under_both_names(recipe):
    for name in ("fp8_format", "fp8_recipe"):
        config = make(fp8="hybrid", **{name: recipe}, **(FACTORY if recipe == "custom" else {}))
        assert (config.fp8, config.fp8_recipe, config.fp8_format) == ("hybrid", recipe, recipe)


def test_the_default_recipe_is_that_of_every_entry_of_ours():
    """It was Megatron-Core's here and in `train`, and tensorwise in convert_to_fp8."""
    expected = recipe_name(Fp8Config().resolved_recipe)
    assert (
        make(fp8="e4m3").fp8_recipe
        == make(fp8="e4m3", fp8_recipe=None).fp8_recipe
        == expected
        == "tensorwise"
    )
    assert run_config.parse(["--model.fp8=hybrid"]).model.fp8_recipe == expected
    assert [recipe_name(recipe) for recipe in recipes_of({"fp8": "hybrid"})] == [expected]
    sizes = [f"--model.{name}={size}" for name, size in SIZES.items()]
    assert estimate_settings.read([*sizes, "--model.fp8=hybrid"]).model.fp8_recipe in (None, expected)


def test_a_plans_first_line_says_whose_choice_the_recipe_is():
    plain = megatron_config.TransformerConfig(**SIZES)
    assert recipe_line(plain) == recipe_line(make()) == "BF16: fp8 is off"
    assert recipe_line(make(fp4="e2m1")) == "FP4 e2m1, fp4_recipe nvfp4"
    plain.fp8 = "hybrid"  # its own check asks for Transformer Engine
    assert recipe_line(make(fp8="hybrid")) == "FP8 hybrid, fp8_recipe tensorwise"
    assert recipe_line(plain) == (
        "FP8 hybrid, fp8_recipe delayed (Megatron-Core's TransformerConfig defaults to 'delayed',"
        " megatron_fp8.TransformerConfig to 'tensorwise')"
    )


@pytest.mark.parametrize(
    "fields, remedy",
    [
        ({"fp8": "mxfp8"}, "'mxfp8' is a recipe: write fp8='hybrid' and fp8_recipe='mxfp8'"),
        (
            {"fp8": "hybrid", "fp8_recipe": "delayed", "first_last_layers_bf16": True},
            "megatron_fp8.TransformerConfig, which has the same fields, does",
        ),
    ],
)
def test_a_config_of_megatron_cores_class_is_refused_with_the_remedy(fields, remedy):
    config = megatron_config.TransformerConfig(**SIZES)
    vars(config).update(fields)
    with pytest.raises(ValueError, match=remedy):
        check_without_te(megatron_config.TransformerConfig.__post_init__, config)
    vars(config).update(fp8="hybrid", first_last_layers_bf16=False)
    check_without_te(megatron_config.TransformerConfig.__post_init__, config)
    make(fp8="hybrid", fp8_recipe="delayed", first_last_layers_bf16=True)


def test_an_enum_is_accepted_and_stored_as_its_name():
    config = make(fp8="hybrid", fp8_recipe=Fp8Recipe.mxfp8)
    assert type(config.fp8_recipe) is str and config.fp8_recipe == Fp8Recipe.mxfp8


@pytest.mark.parametrize("name", ["hybrid", "e4m3"])
def test_an_element_format_given_as_fp8_format_means_fp8(name):
    config = make(fp8_format=name)
    assert (config.fp8, config.fp8_recipe) == (name, "tensorwise")
    assert make(fp8_recipe="mxfp8", fp8_format=name).fp8_recipe == "mxfp8", "as it is"
    assert make(fp8=name, fp8_format=name).fp8 == name


def test_megatrons_version_check_is_put_back_even_after_an_error():
    before = megatron_config.is_te_min_version
    with pytest.raises(ValueError, match="sequence parallelism"):
        make(fp8="hybrid", sequence_parallel=True)
    assert megatron_config.is_te_min_version is before


# -------------------------------------------------------------------------------- after construction


def test_fp8_format_is_assignable_until_the_model_is_built():
    config = make(fp8="hybrid", fp8_format="tensorwise")
    config.fp8_format = "mxfp8"
    assert config.fp8_recipe == "mxfp8"
    config.fp8_format = "e4m3"
    assert (config.fp8, config.fp8_recipe) == ("e4m3", "mxfp8")
    with pytest.raises(ValueError, match="mxfp9"):
        config.fp8_format = "mxfp9"
    config.freeze()
    config.freeze()
    for name, value in [("fp8_format", "delayed"), ("fp8", None), ("first_last_layers_bf16", True)]:
        with pytest.raises(ValueError, match="after the model was built"):
            setattr(config, name, value)
    config.num_query_groups = 2  # Megatron-Core changes other fields while it builds


def test_freeze_checks_what_was_assigned():
    config = make(fp8="hybrid")
    config.fp8_interval = 0
    with pytest.raises(ValueError, match="fp8_interval=0"):
        config.freeze()


def fp8_settings(config):
    return {name: value for name, value in vars(config).items() if name.startswith("fp8")}


def test_copies():
    config = make(fp8="hybrid", fp8_format="mxfp8", fp8_overrides={"*.linear_fc1": "bf16"})
    assert dataclasses.replace(config, fp8_recipe="delayed").fp8_format == "delayed"
    assert dataclasses.replace(config, num_layers=8).fp8_recipe == "mxfp8"
    with pytest.raises(ValueError, match=r"dataclasses\.replace"):
        dataclasses.replace(config, fp8_format="delayed")
    config.freeze()
    for twin in (copy.deepcopy(config), copy.copy(config)):
        assert twin.is_frozen
        assert fp8_settings(twin) == fp8_settings(config)
    assert not dataclasses.replace(config).is_frozen
    deep = copy.deepcopy(config)
    deep.fp8_overrides["x"] = "bf16"
    assert "x" not in config.fp8_overrides


def test_pickle():
    config = make(fp8="hybrid", fp8_format="mxfp8", finalize_model_grads_func=print)
    # Megatron's default init functions are closures, which pickle cannot store.
    config.init_method = config.output_layer_init_method = config.embedding_init_method = None
    again = pickle.loads(pickle.dumps(config))
    assert again == config and again.fp8_format == "mxfp8"
    assert again.finalize_model_grads_func.function is print


# ---------------------------------------------------------------------------------- end of iteration


@pytest.fixture
def calls(monkeypatch):
    """The order of what runs at the end of an iteration, with a stand-in for the iteration module."""
    calls = []
    module = types.ModuleType("megatron_fp8.mcore.iteration")
    module.finish_iteration = lambda model: calls.append(("finish", model))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_the_users_finalize_function_is_followed_by_the_end_of_the_iteration(calls):
    def finalize(model, num_tokens, *, pg_collection):
        calls.append(("user", model, num_tokens, pg_collection))
        return "result"

    config = make(fp8="hybrid")
    config.finalize_model_grads_func = finalize
    assert config.finalize_model_grads_func(["chunk"], None, pg_collection="groups") == "result"
    assert calls == [("user", ["chunk"], None, "groups"), ("finish", ["chunk"])]


def test_it_is_wrapped_once_however_often_it_is_copied(calls):
    config = make(fp8="hybrid", finalize_model_grads_func=functools.partial(print, end=""))
    config.finalize_model_grads_func = config.finalize_model_grads_func
    again = copy.deepcopy(dataclasses.replace(config))
    again.finalize_model_grads_func([])
    assert calls == [("finish", [])]


def test_without_a_function_fp8_still_ends_its_iteration(calls):
    assert make().finalize_model_grads_func is None
    make(fp8="hybrid").finalize_model_grads_func([])
    assert calls == [("finish", [])]
    assert isinstance(make(finalize_model_grads_func=print).finalize_model_grads_func, IterationEnd)
