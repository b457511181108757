"""A small run's config, and changes of a served directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG = {
    "model": {
        "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 2, "num_query_groups": 1,
        "kv_channels": 64, "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": "silu",
        "add_bias_linear": False, "vocab_size": 512, "hidden_dropout": 0.0, "attention_dropout": 0.0, "fp8": "hybrid",
        "fp8_recipe": "rowwise", "fp8_overrides": {"*.layers.1.mlp.*": "bf16"},
    },
    "train": {
        "train_iters": 2, "micro_batch_size": 2, "global_batch_size": 2, "seq_length": 32, "eval_interval": 0,
        "eval_iters": 0, "threads": 1,
    },
    "checkpoint": {"save_interval": 2},
}  # fmt: skip


def edit_config(served: Path, **fields: Any) -> None:
    config = json.loads((served / "config.json").read_text())
    for name, value in fields.items():
        place = config["quantization_config"] if name in config["quantization_config"] else config
        place[name] = value
    (served / "config.json").write_text(json.dumps(config))


def edit_tensors(served: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(served / "model.safetensors")
    change(tensors)
    save_file(tensors, served / "model.safetensors", metadata={"format": "pt"})
