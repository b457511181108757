"""Rules of config fields, held against Megatron-Core's dataclasses, and refused fields."""

import dataclasses
import inspect
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import transformer_config as megatron_config

from megatron_fp8.mcore.config.fields import FIELD_RULES, OWN_RULES, REFUSED, RELATIONS
from megatron_fp8.mcore.config.fp8_checks import DEFAULTS, LATENT_FIELDS
from megatron_fp8.mcore.config.transformer_config import MLATransformerConfig, TransformerConfig
from megatron_fp8.train import model
from megatron_fp8.train.config.sections import OptimizerSection
from tests.support.draws import draws
from tests.support.invalid_values import NONSENSE, edges

SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
NAMED = {
    "experimental_attention_variant": "dsa",
    "cuda_graph_impl": "local",
    "hierarchical_context_parallel_sizes": [2, 2],
    "quant_recipe": object(),
}


def make(**settings):
    kind = MLATransformerConfig if LATENT_FIELDS & settings.keys() else TransformerConfig
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(**{**SIZES, **settings})


def test_rules_are_of_megatrons_fields_or_of_ours():
    ours = {field.name for field in dataclasses.fields(TransformerConfig)} - DEFAULTS.keys()
    assert {*FIELD_RULES, *REFUSED} <= DEFAULTS.keys() and set(OWN_RULES) <= ours
    assert {name for relation in RELATIONS for name in relation.names} <= DEFAULTS.keys()
    checked_apart = {"fp8_backend", "fp8_fallback", "fp8_overrides"}
    assert all("high_precision" in name for name in ours - set(OWN_RULES) - checked_apart)


def test_every_fp8_field_of_megatrons_has_a_rule_or_is_refused():
    theirs = {field.name for field in dataclasses.fields(megatron_config.TransformerConfig)}
    fp8 = {name for name in theirs if name.startswith(("fp8", "fp4")) or name.endswith("_in_bf16")}
    assert fp8 <= {*FIELD_RULES, *REFUSED}


def test_every_default_is_as_its_rule_says():
    for name, rule in FIELD_RULES.items():
        assert name in SIZES or rule.holds(DEFAULTS[name]), name


@pytest.mark.parametrize("name", REFUSED)
def test_what_layers_here_would_ignore_is_refused_with_fp8(name):
    with pytest.raises(ValueError) as error:
        make(**{"fp8": "hybrid", name: NAMED.get(name, True)})
    assert str(error.value).startswith(f"{name}=") and "\n" not in str(error.value)
    assert REFUSED[name] in str(error.value)


def test_with_fp8_off_megatron_decides_alone():
    """What plain Megatron-Core takes is taken, what it refuses is refused, with its own words."""

    def outcome(kind, name, value):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                kind(**{**SIZES, name: value})
            except Exception as error:
                return type(error), str(error)

    values = {name: NAMED.get(name, True) for name in REFUSED if name not in LATENT_FIELDS}
    values |= {"kv_channels": 0, "layernorm_epsilon": float("nan"), "num_query_groups": 3}
    for name, value in values.items():
        theirs = outcome(megatron_config.TransformerConfig, name, value)
        assert outcome(TransformerConfig, name, value) == theirs, name


@draws(100)
@given(st.data())
def test_any_value_of_any_checked_field_is_taken_or_refused_in_one_line(data):
    """With FP8 on: no value of a checked field reaches Megatron-Core's arithmetic as a traceback."""
    name = data.draw(st.sampled_from(sorted(FIELD_RULES)))
    value = data.draw(st.sampled_from([*edges(FIELD_RULES[name]), *NONSENSE]))
    try:
        make(**{"fp8": "hybrid", name: value})
    except ValueError as error:
        assert str(error) and len(str(error).splitlines()) == 1, (name, value)
    except AssertionError:  # Megatron-Core's way to refuse a conflict of several fields
        assert FIELD_RULES[name].holds(value), (name, value)


def test_what_a_run_sets_of_the_optimizer_and_of_ddp_is_megatrons():
    """Their other fields keep Megatron-Core's defaults: no option of a run reaches them."""
    kinds = (OptimizerConfig, DistributedDataParallelConfig)
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    ours = {"state_dtype", "max_loss_scale"}
    schedule = {"lr_warmup_iters", "lr_decay_iters", "lr_decay_style"}  # OptimizerParamScheduler's
    options = {field.name for field in dataclasses.fields(OptimizerSection)}
    assert options - ours - schedule <= names
    read = inspect.getsource(model)
    for name in options:
        assert f"section.{name}" in read or f"run.optimizer.{name}" in read, name


def test_numbers_are_such_as_float32_has():
    """One that float32 takes for 0 or infinity ends a training after its start, or does nothing without a word."""
    for name, rule in FIELD_RULES.items():
        if rule.edges and name != "rotary_percent":  # a part of a few channels, which a relation checks
            least = rule.edges[0]
            assert not rule.holds(1e39) and (not rule.holds(1e-320) or (least <= 0 and rule.holds(0))), name
