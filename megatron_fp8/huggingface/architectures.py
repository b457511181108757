"""Which models are known, and which tensor of Hugging Face's is which of Megatron-Core's. Data; nothing is computed here.

The families are one model with options: RMSNorm before attention and MLP, rotary positions, grouped queries, SwiGLU.
Qwen2 adds a bias to the query, key and value projections, Qwen3 a norm over each head's query and key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """A model family.

    Attributes:
        name: as `architectures` in config.json has it.
        model_type: as `model_type` there.
        qkv_bias: the query, key and value projections have a bias.
        qk_norm: queries and keys are normalised, head by head.
        head_dim: of a config.json that does not give it; None: hidden size / heads.
    """

    name: str
    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("LlamaForCausalLM", "llama"),
        Architecture("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
        Architecture("Qwen3ForCausalLM", "qwen3", qk_norm=True, head_dim=128),
    )
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint and what it is made of.

    Attributes:
        megatron: its name; of a layer's tensor without `decoder.layers.N.`.
        parts: Hugging Face's names, in the order in which they are fused; of a layer's without `model.layers.N.`.
        qkv: queries, keys and values of each group of heads lie together (layout.py).
        vocabulary: its rows are padded.
    """

    megatron: str
    parts: tuple[str, ...]
    qkv: bool = False
    vocabulary: bool = False


_QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")

EMBEDDING = Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary=True)
FINAL_NORM = Entry("decoder.final_layernorm.weight", ("model.norm.weight",))
HEAD = Entry("output_layer.weight", ("lm_head.weight",), vocabulary=True)

_LAYER = (
    # Megatron-Core stores a norm under the name of the linear that follows, as if it were fused into it.
    Entry("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",)),
    Entry("self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in _QKV), qkv=True),
    Entry("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    Entry("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",)),
    # A checkpoint keeps the halves of the gated MLP's fused first projection apart: _w is the gate's.
    Entry("mlp.linear_fc1.weight_w", ("mlp.gate_proj.weight",)),
    Entry("mlp.linear_fc1.weight_v", ("mlp.up_proj.weight",)),
    Entry("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
)
_QKV_BIAS = Entry("self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in _QKV), qkv=True)
_QK_NORM = tuple(
    Entry(f"self_attention.{part}_layernorm.weight", (f"self_attn.{part}_norm.weight",)) for part in "qk"
)

GEMMS = {
    "self_attention.linear_qkv": _QKV,
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
"""The linears of a layer: Megatron-Core's, and the ones of Hugging Face's that it multiplies at once."""


def entries(architecture: Architecture, layers: int, tied: bool) -> Iterator[Entry]:
    """Every tensor of a model, with full names, in the order of the forward pass.

    Args:
        layers: number of layers.
        tied: the output layer is the embedding.
    """
    yield EMBEDDING
    of_layer = [*_LAYER]
    if architecture.qkv_bias:
        of_layer.append(_QKV_BIAS)
    if architecture.qk_norm:
        of_layer += _QK_NORM
    for number in range(layers):
        for entry in of_layer:
            yield Entry(
                f"decoder.layers.{number}.{entry.megatron}",
                tuple(f"model.layers.{number}.{part}" for part in entry.parts),
                entry.qkv,
                entry.vocabulary,
            )
    yield FINAL_NORM
    if not tied:
        yield HEAD


def gemms(layers: int) -> dict[str, tuple[str, ...]]:
    """Megatron-Core's name of every linear in the layers, and Hugging Face's names of its parts."""
    return {
        f"decoder.layers.{number}.{name}": tuple(f"model.layers.{number}.{part}" for part in parts)
        for number in range(layers)
        for name, parts in GEMMS.items()
    }
