"""Directories made without transformers: a Llama's by hand, and any family's from its config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_fp8.commands.main import main
from megatron_fp8.huggingface.architectures import entries
from megatron_fp8.huggingface.config import architecture_of, model_section
from megatron_fp8.huggingface.qkv_layout import part_shapes

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "intermediate_size": 256,
    "vocab_size": 200,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def tensors(layers: int = 2) -> dict[str, torch.Tensor]:
    """The tensors of CONFIG, bfloat16; shapes are written out, not derived."""
    shapes = {
        "model.embed_tokens.weight": (200, 128),
        "lm_head.weight": (200, 128),
        "model.norm.weight": (128,),
    }
    for number in range(layers):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (128,),
            f"{layer}.post_attention_layernorm.weight": (128,),
            f"{layer}.self_attn.q_proj.weight": (256, 128),
            f"{layer}.self_attn.k_proj.weight": (128, 128),
            f"{layer}.self_attn.v_proj.weight": (128, 128),
            f"{layer}.self_attn.o_proj.weight": (128, 256),
            f"{layer}.mlp.gate_proj.weight": (256, 128),
            f"{layer}.mlp.up_proj.weight": (256, 128),
            f"{layer}.mlp.down_proj.weight": (128, 256),
        }
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def write(folder: Path, config: dict[str, Any] | None = None, **changed: torch.Tensor | None) -> Path:
    """A directory with some fields of config.json and some tensors (by name; None: left out) changed."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {**CONFIG, **(config or {})}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v != "absent"}))
    kept = {name: tensor for name, tensor in {**tensors(), **changed}.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    return folder


IN_BLOCKS: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def write_family(
    folder: Path, fields: dict[str, Any], values: Callable[..., torch.Tensor] = torch.ones
) -> Path:
    """A directory of CONFIG with other fields, of any family; with IN_BLOCKS its linears are FP8.

    Args:
        values: makes each tensor from its shape; codes are cast from it, and scales are it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    section = model_section(config)
    found: dict[str, torch.Tensor] = {}
    for entry in entries(architecture_of(config), section):
        for name, shape in part_shapes(entry, section).items():
            in_fp8 = entry.site is not None and "quantization_config" in config
            found[name] = values(shape).to(torch.float8_e4m3fn if in_fp8 else torch.bfloat16)
            if in_fp8:
                found[f"{name}_scale_inv"] = values([-(-size // 128) for size in shape])
    save_file(found, folder / "model.safetensors")
    return folder


def gemm_parts(*rows: int, cols: int = 256) -> dict[str, torch.Tensor]:
    """Weights of one GEMM by name, `a.0.weight` and so on, from small values to large ones."""
    generator = torch.Generator().manual_seed(2)
    scales = torch.logspace(-3, 3, len(rows))
    return {
        f"a.{i}.weight": (torch.randn(n, cols, generator=generator) * s).bfloat16()
        for i, (n, s) in enumerate(zip(rows, scales, strict=True))
    }


def refused(capsys: Any, *arguments: object) -> str:
    """What a command says that refuses its input: one line."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    said: str = capsys.readouterr().err
    assert said.startswith("error: ") and len(said.splitlines()) == 1, said
    return said
