"""Rules of a run's options: each has one, its default keeps it, and no value passes as a traceback."""

import dataclasses
import traceback
import warnings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_fp8.train.config.field_rules import RELATIONS, RULES, check_rules
from megatron_fp8.train.config.model_section import GPTOptions, transformer_config
from megatron_fp8.train.config.run_config import SECTIONS, RunConfig, known_keys, parse
from megatron_fp8.train.launch.parallel import check_layout
from tests.support.draws import draws
from tests.support.invalid_values import NONSENSE, WRITTEN, edges

SMALL = ["--model.num_layers=4", "--model.hidden_size=64", "--model.num_attention_heads=4"]


def test_every_option_has_a_rule_and_every_rule_an_option():
    for name, kind in {**SECTIONS, "model": GPTOptions}.items():
        assert set(RULES[name]) == {field.name for field in dataclasses.fields(kind)}, name
    assert set(RULES[""]) == {field.name for field in dataclasses.fields(RunConfig)} - set(SECTIONS)
    for section, relations in RELATIONS.items():
        assert all(set(relation.names) <= set(RULES[section]) for relation in relations)


def test_every_default_keeps_its_rule():
    run = RunConfig()
    for name in RULES:
        check_rules(name, getattr(run, name) if name else run)


@pytest.mark.parametrize("section", sorted(RULES))
def test_every_value_of_every_option_keeps_its_rule_or_is_named(section):
    for name, rule in RULES[section].items():
        for value in [*edges(rule), *NONSENSE]:
            kept_or_named(section, name, value)


def kept_or_named(section, name, value):
    settings = (
        GPTOptions() if section == "model" else getattr(RunConfig(), section) if section else RunConfig()
    )
    setattr(settings, name, value)
    try:
        check_rules(section, settings)
    except ValueError as error:
        assert f"{section}.{name}=".removeprefix(".") in str(error) and len(str(error).splitlines()) == 1
    else:
        assert RULES[section][name].holds(value)


OF_MEGATRON = "Megatron-Core says: "


def taken(arguments):
    """What `train` does before ranks meet; None, or the line that refuses it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run = parse(arguments)
            transformer_config(run.model)
            check_layout(run.model, run.train, 1)
        except ValueError as error:
            raised_in = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1].filename
            return f"{OF_MEGATRON if 'site-packages/megatron' in raised_in else ''}{error}"


@draws(25)
@given(st.sampled_from(known_keys()), st.sampled_from(WRITTEN), st.sampled_from(["", "null", "hybrid"]))
@example("model.rotary_percent", "0.01", "")
@example("model.kv_channels", "1", "")
@example("train.seed", "9223372036854775808", "hybrid")
def test_any_text_on_the_command_line_is_taken_or_refused_in_one_line(key, written, fp8):
    taken_or_named(key, written, fp8)


@pytest.mark.long
@pytest.mark.parametrize("key", known_keys())
def test_every_text_on_the_command_line_is_taken_or_refused_in_one_line(key):
    for written in WRITTEN:
        taken_or_named(key, written, "hybrid")


def taken_or_named(key, written, fp8):
    said = taken([*SMALL, *([f"--model.fp8={fp8}"] if fp8 else []), f"--{key}={written}"])
    if said is not None:
        assert OF_MEGATRON in said or key.rpartition(".")[2] in said, said
        assert len(said.splitlines()) == 1, said


@pytest.fixture(scope="module")
def small():
    return parse(SMALL)


@pytest.mark.parametrize("fp8", [None, "hybrid"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_channels": 0}, "model.kv_channels=0"),
        ({"activation_func_clamp_value": 1e39}, "model.activation_func_clamp_value=1e+39"),
        ({"softmax_scale": 1e39}, "model.softmax_scale=1e+39"),
        ({"pipeline_model_parallel_layout": "XYZ"}, "Invalid layer character: X"),
        ({"num_query_groups": 3}, "model.num_attention_heads=4, model.num_query_groups=3"),
        ({"tensor_model_parallel_size": 0}, "model.tensor_model_parallel_size=0"),
        ({"num_moe_experts": 2, "moe_router_topk": 3}, "model.moe_router_topk=3, model.num_moe_experts=2"),
        ({"fp32_residual_connection": True}, "model.fp32_residual_connection=True"),
        ({"rotary_percent": 0.1}, "makes 1, and rotary positions turn pairs"),
        ({"hidden_size": 66}, "model.hidden_size=66"),
        ({"virtual_pipeline_model_parallel_size": 2}, "model.virtual_pipeline_model_parallel_size=2"),
        ({"params_dtype": "float16"}, "model.params_dtype="),
        ({"pipeline_model_parallel_size": 2, "pipeline_dtype": "float32"}, "model.pipeline_dtype="),
    ],
)
def test_a_model_that_cannot_be_is_one_line_with_fp8_on_or_off(small, options, words, fp8):
    section = dataclasses.replace(small.model, fp8=fp8, **options)
    with pytest.raises(ValueError) as error:
        transformer_config(section)
    assert words in str(error.value) and len(str(error.value).splitlines()) == 1


def test_a_recipe_is_only_without_effect_where_fp8_was_switched_off_by_name():
    assert taken([*SMALL, "--model.fp8=null", "--model.fp8_format=mxfp8"]) is None
    for key in ("fp8_format", "fp8_recipe"):
        assert "fp8_recipe='mxfp8' without model.fp8" in taken([*SMALL, f"--model.{key}=mxfp8"])


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--optimizer.lr=1e38"], "optimizer.lr=1e+38, optimizer.adam_beta1=0.9"),
        (["--optimizer.lr=1e20", "--optimizer.weight_decay=1e30"], "optimizer.weight_decay=1e+30"),
    ],
)
def test_steps_beyond_float32_are_refused(options, names):
    """torch's Adam raises "value cannot be converted to type float without overflow" in the first step."""
    assert names in (taken([*SMALL, *options]) or "")


def test_a_watchdog_of_less_than_a_second_is_refused():
    """Any machine that is busy has such iterations."""
    rule = RULES["train"]["watchdog"]
    assert all(rule.holds(value) for value in (0, 0.0, 1, 15.0, 10**6))
    assert not any(rule.holds(value) for value in (-1, 0.5, True, float("nan"), float("inf"), "15", None))
