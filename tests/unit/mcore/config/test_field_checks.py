"""The table of Megatron-Core's fields, held against Megatron-Core's dataclasses and its source."""

import dataclasses
import inspect
import types
import warnings
from pathlib import Path

import megatron.core
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import transformer_config as megatron_config

import megatron_fp8
from megatron_fp8.mcore.config import field_checks
from megatron_fp8.mcore.config.field_checks import DEFAULTS, KNOWN, announce_fields, check_fields
from megatron_fp8.mcore.config.field_table import FIELDS, OWN_RULES
from megatron_fp8.mcore.config.mla_field_rules import LATENT_FIELDS
from megatron_fp8.mcore.config.transformer_config import TransformerConfig
from megatron_fp8.train import model
from megatron_fp8.train.config.sections import OptimizerSection
from tests.support.draws import draws
from tests.support.nonsense import NONSENSE, edges

SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
OTHER = {  # a value that is not the default, of the right kind, for fields that are refused or have no effect
    bool: lambda default: not default,
    int: lambda default: default * 2,
}
NAMED = {
    "attention_backend": "flash", "experimental_attention_variant": "dsa", "fp4": "e2m1", "quant_recipe": object(),
    "symmetric_ar_type": "one_shot", "cuda_graph_impl": "local", "transformer_impl": "inference_optimized",
    "pipeline_model_parallel_comm_backend": "ucc", "hierarchical_context_parallel_sizes": [2, 2],
    "cp_comm_type": "a2a", "tp_comm_bootstrap_backend": "mpi", "linear_attention_freq": 2, "mrope_section": [1, 1],
    "dsa_indexer_loss_coeff": 0.5, "moe_latent_size": 16, "moe_router_topk_limited_devices": 1,
}  # fmt: skip


def set_to(name):
    default = DEFAULTS[name]
    return NAMED[name] if name in NAMED else OTHER[type(default)](default) if default is not None else 2


def make(**settings):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config = TransformerConfig(**{**SIZES, **settings})
    return config, [str(w.message) for w in said]


def test_every_field_of_megatrons_stands_in_the_table_and_no_other():
    names = [field.name for field in dataclasses.fields(megatron_config.TransformerConfig)]
    assert sorted(FIELDS) == sorted(names)
    latent = {field.name for field in dataclasses.fields(megatron_config.MLATransformerConfig)} - set(names)
    assert set(LATENT_FIELDS) == latent and set(KNOWN) == {*FIELDS, *LATENT_FIELDS}
    ours = {field.name for field in dataclasses.fields(TransformerConfig)} - set(names)
    elsewhere = {"fp8_backend", "fp8_fallback", "fp8_overrides", "fp8_high_precision_warmup"}
    assert ours == set(OWN_RULES) | elsewhere | {"fp8_high_precision_healing"}


def test_where_a_field_is_said_to_be_read_it_is_read():
    roots = Path(megatron.core.__file__).parent, Path(megatron_fp8.__file__).parents[1]
    for name, field in KNOWN.items():
        assert bool(field.where) or bool(field.ignored) or bool(field.refused), name
        if field.where:
            file = (roots[field.where.startswith("megatron_fp8")] / field.where).with_suffix(".py")
            assert name in file.read_text(), (name, file)
        others = {*field.only[:1], field.also, field.unless} - {""}
        assert others <= set(KNOWN), name


def test_every_default_is_as_its_rule_says():
    for name, field in KNOWN.items():
        assert name in SIZES or field.rule.holds(DEFAULTS[name]), name


def test_a_field_that_a_newer_megatron_adds_cannot_slip_through(monkeypatch):
    monkeypatch.setitem(DEFAULTS, "fp2", None)
    config, _ = make(fp8="hybrid")
    check_fields(config)
    config.fp2 = "e1m0"
    with pytest.raises(ValueError, match="fp2='e1m0' is a field of a newer Megatron-Core"):
        check_fields(config)


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field_checks._is_refused(field)])
def test_what_cannot_be_had_is_refused_with_fp8(name):
    with pytest.raises(ValueError) as error:
        make(**{"fp8": "hybrid", name: set_to(name)})
    assert str(error.value).startswith(f"{name}=") and "\n" not in str(error.value)
    assert FIELDS[name].refused in str(error.value)


def test_what_has_no_effect_is_said_with_fp8():
    for name, field in FIELDS.items():
        if field.ignored:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                announce_fields(types.SimpleNamespace(**{**DEFAULTS, name: set_to(name)}))
            said = [str(w.message) for w in caught]
            assert [line for line in said if line.startswith(f"{name}=") and field.ignored in line], name
    assert not [line for line in make(fp8="hybrid")[1] if "no effect" in line]
    assert not [line for line in make(fp8="hybrid", transformer_impl="local")[1] if "no effect" in line]


def test_with_fp8_off_megatron_decides_alone():
    """What plain Megatron-Core takes is taken, what it refuses is refused, with its own words."""

    def outcome(kind, name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                kind(**{**SIZES, name: set_to(name)})
            except Exception as error:
                return type(error), str(error)

    checked = [name for name, field in FIELDS.items() if field.refused or field.ignored]
    assert len(checked) > 60
    for name in checked:
        assert outcome(TransformerConfig, name) == outcome(megatron_config.TransformerConfig, name), name
    assert any("fp4='e2m1' cannot work here" in line for line in make(fp4="e2m1")[1])


def test_a_copy_of_a_config_is_said_nothing_of():
    config, _ = make(fp8="hybrid", bf16=True, params_dtype=torch.bfloat16, num_moe_experts=4)
    announced = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        announce_fields(config)
        announced = [str(w.message) for w in said]
    assert not announced
    assert dataclasses.replace(config).num_moe_experts == 4


SETTABLE = [name for name in FIELDS if not name.startswith("_")]


def taken_or_refused_in_one_line(name, value):
    try:
        make(**{"fp8": "hybrid", name: value})
    except ValueError as error:
        assert str(error) and len(str(error).splitlines()) == 1, (name, value)
    except AssertionError:  # Megatron-Core's way to refuse a conflict of several fields
        assert FIELDS[name].rule.holds(value), (name, value)


@draws(100)
@given(st.data())
def test_any_value_of_any_field_is_taken_or_refused_in_one_line(data):
    """With FP8 on: no value reaches Megatron-Core's arithmetic as a traceback."""
    name = data.draw(st.sampled_from(SETTABLE))
    taken_or_refused_in_one_line(name, data.draw(st.sampled_from([*edges(FIELDS[name].rule), *NONSENSE])))


@pytest.mark.long
@pytest.mark.parametrize("name", SETTABLE)
def test_every_value_of_every_field_is_taken_or_refused_in_one_line(name):
    for value in [*edges(FIELDS[name].rule), *NONSENSE]:
        taken_or_refused_in_one_line(name, value)


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


@pytest.mark.parametrize("field", [f for f in FIELDS if FIELDS[f].rule.edges])
def test_numbers_are_such_as_float32_has(field):
    """One that float32 takes for 0 or infinity ends a training after its start, or does nothing without a word."""
    rule = FIELDS[field].rule
    assert not rule.holds(1e39)
    least = rule.edges[0]
    assert not rule.holds(1e-320) or (least <= 0 and rule.holds(0))


@pytest.mark.parametrize("layout", ["Et*999999999L", "E(tt)*1,000,000L", "Et*" + "9" * 5000 + "L"])
def test_a_layout_is_not_written_out_before_it_is_looked_at(layout):
    with pytest.raises(ValueError, match=r"pipeline_model_parallel_layout=.*1000 times"):
        make(fp8="hybrid", pipeline_model_parallel_layout=layout)
