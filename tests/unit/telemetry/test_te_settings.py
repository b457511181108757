"""Transformer Engine's debug YAML: what is read, and what is refused by name."""

from __future__ import annotations

import re

import pytest
import yaml

from megatron_fp8.telemetry.settings import te_settings
from megatron_fp8.telemetry.stat_registry import Blocks

EXAMPLE = """
tensor_stats:
  enabled: True
  layers:
    layer_name_regex_pattern: .*(fc1|self_attention).*
  transformer_engine:
    LogTensorStats:
      enabled: True
      stats: [mean]
      freq: 1
      tensors_struct:
        - tensor: activation
          freq: 10
          start_step: 5
          end_step: 100
        - tensor: gradient
          stats: [mean, max, min]
          freq: 2
          start_end_list: [[0, 20], [80, 100]]
        - tensor: weight
          stats: [dynamic_range, {max_blockwise_dynamic_range: {block_size: 128, dims: 2}}]
        - tensor: wgrad
          stats: [{max_blockwise_dynamic_range: {}}]
    LogFp8TensorStats:
      enabled: True
      tensors: [weight, gradient]
      stats: [mxfp8_underflows%, underflows%, scale_inv_min_columnwise]
      freq: 5
      start_step: 0
      end_step: 80
switched_off:
  enabled: False
  layers: {layer_types: [all]}
  transformer_engine: {FakeQuant: {enabled: True}}
"""


def test_the_example(tmp_path):
    path = tmp_path / "stats.yaml"
    path.write_text(EXAMPLE)
    settings = te_settings(path)
    assert settings == te_settings(yaml.safe_load(EXAMPLE))
    assert settings.what_if == ("mxfp8",)
    fc1, fc2 = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.linear_fc2"

    def iterations(tensor: str, name: str) -> list[int]:
        return [i for i in range(120) if name in settings.names(fc1, tensor, i)]

    assert iterations("input", "mean") == list(range(10, 101, 10))
    assert iterations("grad_output", "min") == [*range(0, 21, 2), *range(80, 101, 2)]
    assert iterations("weight", Blocks(128, 2, True).name) == list(range(120))
    assert iterations("wgrad", Blocks(32, 1).name) == list(range(120))
    assert iterations("grad_output", "mxfp8_underflows%") == list(range(0, 81, 5))
    assert settings.names(fc1, "weight", 40)[2:] == (
        "mxfp8_underflows%",
        "underflows%",
        "scale_inv_min_columnwise",
    )
    assert settings.names(fc1, "output") == () == settings.names(fc2, "input")


def section(feature: str = "LogTensorStats", layers=None, **fields):
    """A configuration of one section, with one feature."""
    fields = {"enabled": True, "tensors": ["activation"], "stats": ["mean"]} | fields
    fields = {key: value for key, value in fields.items() if value is not ...}
    layers = {"layer_types": ["fc1"]} if layers is None else layers
    return {"s": {"enabled": True, "layers": layers, "transformer_engine": {feature: fields}}}


@pytest.mark.parametrize(
    ("layers", "matching"),
    [
        ({"layer_types": ["fc1", "qkv"]}, "a.linear_fc1 a.linear_qkv"),
        ({"layer_types": ["all"]}, "a.linear_fc1 a.linear_qkv a.linear_fc2"),
        ({"layer_types": ["a.linear.fc"]}, ""),
        ({"exact_layer_names": ["a.linear_fc1"]}, "a.linear_fc1"),
        ({"layer_name_regex_pattern": "fc[12]$"}, "a.linear_fc1 a.linear_fc2"),
    ],
)
def test_layers(layers, matching):
    settings = te_settings(section(layers=layers))
    found = [
        name for name in ("a.linear_fc1", "a.linear_qkv", "a.linear_fc2") if settings.names(name, "input")
    ]
    assert found == matching.split()


REFUSED = [
    ({}, "enables no LogTensorStats or LogFp8TensorStats"),
    ({"s": {"layers": {}}}, "section s: enabled=None must be True or False"),
    ({"s": {"enabled": True}}, "section s, layers needs exactly one of"),
    (
        {"s": {"enabled": True, "layers": {"layer_types": ["x"]}, "LogTensorStats": {}}},
        "LogTensorStats is not supported",
    ),
    (
        section("LogFP8TensorStats"),
        "section s: LogFP8TensorStats is not supported, only LogTensorStats, LogFp8",
    ),
    (section(layers={"layer_numbers": [1]}), "layer_numbers is not supported"),
    (section(layers={"layer_name_regex_pattern": "("}), "is no regular expression"),
    (section(tensors_struct=[]), "needs tensors or tensors_struct, one of the two"),
    (section(tensors=["input"]), "tensor 'input' is none of activation"),
    (section(freq=0), "freq=0 must be a whole number"),
    (section(stats=...), "stats=None must be a list"),
    (section(stats=["mse"]), "mse belongs to LogFp8TensorStats"),
    (section("LogFp8TensorStats", stats=["mse"], tensors=["dgrad"]), "dgrad has no codes"),
    (
        section(stats=[{"max_blockwise_dynamic_range": {"size": 3}}]),
        "size is not supported, only block_size, dims",
    ),
    (section(stats=[{"max_blockwise_dynamic_range": {"dims": 3}}]), "_dims_3"),
]


@pytest.mark.parametrize(("config", "text"), REFUSED, ids=[text[-40:] for _, text in REFUSED])
def test_what_is_not_supported_is_refused_by_name(config, text):
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        te_settings(config)
    assert "\n" not in str(error.value)


def test_a_feature_that_is_off_may_be_any():
    config = section()
    config["s"]["transformer_engine"]["FakeQuant"] = {"enabled": False, "quant_format": "x"}
    assert len(te_settings(config).selections) == 1


def test_a_file_that_is_no_yaml(tmp_path):
    """files/strict_yaml.py has the limits."""
    path = tmp_path / "stats.yaml"
    path.write_text("s:\n  enabled: True\n  enabled: False\n")
    with pytest.raises(
        ValueError, match=r"stats.yaml is no YAML: the key 'enabled' stands twice, again in line 3"
    ):
        te_settings(path)
    with pytest.raises(FileNotFoundError):
        te_settings(tmp_path / "none.yaml")
