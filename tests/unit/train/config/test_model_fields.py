"""The table of model fields: it names every field there is, once, and what it does not name counts as the function."""

import dataclasses
from collections import Counter

import pytest

from megatron_fp8.train.config.model_fields import FREE, FUNCTION, IMPORT_PATHS, SHAPE, differences, kind_of
from megatron_fp8.train.config.model_section import ModelSection

SECTION = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}


def test_every_field_of_the_model_section_is_in_the_table_once():
    """One that Megatron-Core adds fails here until somebody decides what it means for a checkpoint."""
    fields = {field.name for field in dataclasses.fields(ModelSection)}
    named = Counter([*SHAPE, *FUNCTION, *FREE])
    assert set(named) == fields
    assert set(named.values()) == {1}


def test_every_field_that_names_code_is_known():
    fields = {field.name for field in dataclasses.fields(ModelSection)}
    assert {name for name in fields if "factory" in name or name.endswith(("_func_path", "_class"))} == set(
        IMPORT_PATHS
    )


def test_a_field_that_nobody_knows_changes_the_function():
    assert kind_of("attention_by_magic") == "function"
    assert differences(SECTION, {**SECTION, "attention_by_magic": 2}, {}) == {"attention_by_magic": (None, 2)}
    assert differences({**SECTION, "attention_by_magic": 2}, SECTION, {}) == {"attention_by_magic": (2, None)}
    for off in (None, False):
        assert differences({**SECTION, "attention_by_magic": off}, SECTION, {}) == {}


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ({}, {"num_query_groups": 4, "kv_channels": 16, "ffn_hidden_size": 256}, {}),
        ({}, {"rotary_base": 500}, {"rotary_base": (10000, 500)}),
        ({"rotary_base": 500}, {}, {"rotary_base": (500, 10000)}),
        ({"window_size": [1, 2]}, {"window_size": (1, 2)}, {}),
        ({"fp8_format": "mxfp8"}, {"fp8_recipe": "mxfp8"}, {}),
        ({"num_moe_experts": 2}, {"num_moe_experts": 2, "moe_layer_freq": [1, 1, 1, 1]}, {}),
        (
            {"num_moe_experts": 2, "moe_layer_freq": 2},
            {"num_moe_experts": 2, "moe_layer_freq": [0, 1, 0, 1]},
            {"moe_layer_freq": ([1, 0, 1, 0], [0, 1, 0, 1])},
        ),
    ],
)
def test_what_is_left_out_counts_as_its_default(before, now, changed):
    defaults = {"rotary_base": 10000, "moe_layer_freq": 1}
    assert differences({**SECTION, **before}, {**SECTION, **now}, defaults) == changed


def test_wider_heads_of_the_same_matrices_are_another_shape():
    assert differences(SECTION, {**SECTION, "num_attention_heads": 2}, {}) == {
        "num_attention_heads": (4, 2),
        "num_query_groups": (4, 2),
        "kv_channels": (16, 32),
    }
