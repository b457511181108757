"""The model section: null is a value as any other, in Python, in a file and on the command line."""

import dataclasses
import warnings

import pytest
import yaml

from megatron_fp8.train.config.model_section import GPTOptions, ModelSection, transformer_config
from megatron_fp8.train.config.run_config import load, parse, rule_of

LATENT = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "multi_latent_attention": True}
DEFAULTS = ModelSection()
OF_GPT = {field.name for field in dataclasses.fields(GPTOptions)}
NOT_NULL = [
    field.name
    for field in dataclasses.fields(ModelSection)
    if getattr(DEFAULTS, field.name) is not None and rule_of(f"model.{field.name}")
]
MAY_BE_NULL = [name for name in NOT_NULL if (rule := rule_of(f"model.{name}")) and rule.holds(None)]


def config_of(section):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformer_config(section)


def test_there_are_fields_to_look_at():
    assert "q_lora_rank" in MAY_BE_NULL and "num_layers" in NOT_NULL


@pytest.mark.parametrize("fp8", [None, "hybrid"])
def test_null_is_never_the_default_instead(fp8):
    """Each field with another default than null: the config has the null, or the field is named in an error."""
    for name in set(NOT_NULL) - OF_GPT:
        try:
            config = config_of(ModelSection(**{**LATENT, "fp8": fp8, name: None}))
        except ValueError as error:
            assert f"{name}=None" in str(error) and "\n" not in str(error), name
            assert name not in MAY_BE_NULL, name
        else:
            assert getattr(config, name) is None and name in MAY_BE_NULL, name


@pytest.mark.parametrize("name", MAY_BE_NULL)
def test_null_where_the_rule_takes_it(tmp_path, name):
    options = [f"--model.{key}={str(value).lower()}" for key, value in LATENT.items()]
    assert getattr(parse([*options, f"--model.{name}=null"]).model, name) is None
    file = tmp_path / "null.yaml"
    file.write_text(yaml.safe_dump({"model": {**LATENT, name: None}}))
    assert getattr(load(file).model, name) is None
    load(file).save(file)
    assert getattr(config_of(load(file).model), name) is None


@pytest.mark.parametrize("name", ["hidden_dropout", "num_layers", "activation_func", "fp8_wgrad"])
def test_null_where_the_rule_does_not_take_it(tmp_path, name):
    file = tmp_path / "null.yaml"
    file.write_text(yaml.safe_dump({"model": {**LATENT, name: None}}))
    with pytest.raises(ValueError, match=rf"model\.{name}=None must be"):
        config_of(load(file).model)
