"""Fields about positions: those that do nothing in a model are said, what cannot be had is refused."""

import dataclasses
import warnings
from pathlib import Path

import megatron.core
import pytest

from megatron_fp8.mcore.config.field_checks import KNOWN
from megatron_fp8.train.config.model_section import TURNED, GPTOptions, ModelSection, transformer_config
from megatron_fp8.train.config.position_fields import POSITION_FIELDS

DENSE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
LATENT = {**DENSE, "multi_latent_attention": True, "qk_pos_emb_head_dim": 8}


def said(fields):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transformer_config(ModelSection(**fields))
    return [str(w.message) for w in caught if "no effect" in str(w.message)]


def test_fields_are_gpt_models_or_the_tables_and_read_where_it_is_said():
    options = {field.name for field in dataclasses.fields(GPTOptions)}
    for name, field in TURNED.items():
        assert name in (options if name in POSITION_FIELDS else KNOWN)
        assert {*field.only[:1], field.unless} - {""} <= {*KNOWN, *TURNED}
        assert name in (Path(megatron.core.__file__).parent / f"{field.where}.py").read_text()


@pytest.mark.parametrize("fp8", [None, "hybrid"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scaling": True}, "with multi_latent_attention"),
        ({"rope_scaling_factor": 4.0}, "without rope_scaling"),
        ({"rope_scaling": True, "rope_scaling_factor": 4.0}, "with multi_latent_attention"),
        ({"rotary_percent": 0.5}, "without rope_type='rope'"),
        ({"kv_channels": 17}, "with multi_latent_attention"),
        ({"mscale": 0.5}, ""),
    ],
)
def test_fields_of_dense_positions_in_latent_attention(fields, words, fp8):
    lines = [f"{name}={value!r} has no effect {words}" for name, value in fields.items()]
    assert sorted(said({**LATENT, **fields, "fp8": fp8})) == (sorted(lines) if words else [])


@pytest.mark.parametrize("fp8", [None, "hybrid"])
@pytest.mark.parametrize("kind", ["learned_absolute", "none"])
def test_rotary_fields_without_rotary_positions(kind, fp8):
    fields = {
        "rotary_percent": 0.5,
        "rotary_base": 500,
        "rope_scaling": True,
        "no_rope_freq": 2,
        "rotary_interleaved": True,
    }
    found = said({**DENSE, **fields, "position_embedding_type": kind, "fp8": fp8})
    assert sorted(found) == sorted(
        f"{name}={value!r} has no effect without position_embedding_type='rope'"
        for name, value in fields.items()
    )
    assert said({**DENSE, **fields, "fp8": fp8}) == []


@pytest.mark.parametrize("fp8", [None, "hybrid"])
@pytest.mark.parametrize("name, value", [("kv_lora_rank", 32), ("q_lora_rank", None), ("mscale", 0.5)])
def test_fields_of_latent_attention_in_a_dense_model(name, value, fp8):
    assert said({**DENSE, name: value, "fp8": fp8}) == [
        f"{name}={value!r} has no effect without multi_latent_attention"
    ]


@pytest.mark.parametrize("fp8", [None, "hybrid"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({**LATENT, "position_embedding_type": "none"}, "model.position_embedding_type='none' with"),
        (
            {**LATENT, "rope_type": "rope", "rotary_percent": 0.1},
            "model.rope_type='rope', model.rotary_percent=0.1, model.qk_pos_emb_head_dim=8",
        ),
        ({**LATENT, "rotary_base": 1}, "model.rotary_base=1 must be"),
        ({**DENSE, "rotary_percent": 0.1}, "of 16 channels of a head (model.kv_channels) makes 1"),
    ],
)
def test_positions_that_cannot_be_had(fields, words, fp8):
    with pytest.raises(ValueError) as error:
        transformer_config(ModelSection(**fields, fp8=fp8))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_two_tables_of_positions_are_refused():
    """Megatron-Core trains that of the last stage apart from the first one's, and cannot save both."""
    two = {**DENSE, "mtp_num_layers": 1, "pipeline_model_parallel_size": 2}
    learned = {"position_embedding_type": "learned_absolute"}
    with pytest.raises(ValueError, match=r"a table of positions of its own.* Take 'rope'"):
        transformer_config(ModelSection(**two, **learned))
    transformer_config(ModelSection(**two))
    transformer_config(ModelSection(**{**two, "pipeline_model_parallel_size": 1}, **learned))
