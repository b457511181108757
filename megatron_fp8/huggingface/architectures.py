"""Supported model families, and tensor name mappings from Hugging Face to Megatron-Core.

Data only. All families are one model with options: RMSNorm before attention and MLP, rotary positions,
SwiGLU. Attention has grouped queries: Qwen2 adds a bias to the query, key and value projections, Qwen3 a norm
of each head's query and key. DeepSeek-V3 has latent attention. Mixtral, Qwen3-MoE and DeepSeek-V3 have
experts instead of the MLP, in all layers or some; DeepSeek-V3 also has shared experts and multi-token
prediction layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class ExpertNames:
    """A family's names for experts: the module in a layer, and each expert's gate, up and down projection."""

    block: str
    projections: tuple[str, str, str]


@dataclass(frozen=True)
class Architecture:
    """A model family.

    Attributes:
        name: `architectures` in config.json.
        model_type: `model_type` in config.json.
        qkv_bias: the query, key and value projections have a bias.
        qk_norm: queries and keys are normalised per head.
        head_dim: default if config.json has none; None: hidden size / heads.
        rope_theta, rms_norm_eps: defaults if config.json has none.
        sliding_window: default if config.json has no such field, not even null; None: full attention.
        experts: names of its experts; None: a dense model.
        latent: latent attention (queries, keys and values from latents).
        fused: fused tensors of a directory -> the modules whose rows they contain, per layer. Such a family
            can be read; it is written as an equivalent family.
    """

    name: str
    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = None
    experts: ExpertNames | None = None
    latent: bool = False
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def computes_as(self, other: Architecture) -> bool:
        """Whether the two families compute the same, apart from defaults of config.json."""
        own_fields, other_fields = (
            (a.qkv_bias, a.qk_norm, a.experts, a.latent, a.fused) for a in (self, other)
        )
        return own_fields == other_fields


_GATED = ("gate_proj", "up_proj", "down_proj")

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("LlamaForCausalLM", "llama"),
        Architecture("MistralForCausalLM", "mistral", sliding_window=4096),
        Architecture(
            "Phi3ForCausalLM",
            "phi3",
            rms_norm_eps=1e-5,
            fused={
                "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
            },
        ),
        Architecture("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
        Architecture("Qwen3ForCausalLM", "qwen3", qk_norm=True, head_dim=128),
        Architecture(
            "MixtralForCausalLM",
            "mixtral",
            rope_theta=1e6,
            rms_norm_eps=1e-5,
            experts=ExpertNames("block_sparse_moe", ("w1", "w3", "w2")),
        ),
        Architecture("Qwen3MoeForCausalLM", "qwen3_moe", qk_norm=True, experts=ExpertNames("mlp", _GATED)),
        Architecture("DeepseekV3ForCausalLM", "deepseek_v3", latent=True, experts=ExpertNames("mlp", _GATED)),
    )
}

"""Families by name. Of equivalent families, the first is the default for exports of runs not imported from another."""

_SCALED = "it multiplies embeddings by the root of hidden_size, which Megatron-Core does not"
REFUSED = {
    "GemmaForCausalLM": _SCALED,
    "Gemma2ForCausalLM": f"{_SCALED}, and it bounds scores and logits by tanh",
    "Gemma3ForCausalLM": f"{_SCALED}, and most of its layers attend to a window, with frequencies of their own",
    "Gemma3ForConditionalGeneration": f"{_SCALED}, and it takes images",
    "PhiForCausalLM": "its attention and MLP read the same input, side by side, and Megatron-Core's one after the other",
    "Qwen2MoeForCausalLM": "its shared expert has a gate, and its config lists layers with experts differently",
    "DeepseekV2ForCausalLM": "its router is another one",
}
"""Unsupported families that users request, with the reason."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint, and its parts.

    Attributes:
        megatron: its name; for a layer's tensor without `decoder.layers.N.`.
        parts: Hugging Face names in the order of fusion; for a layer's tensor without `model.layers.N.`.
        shape: names of its sizes (qkv_layout.py); `qkv` for the fused rows of queries, keys and values.
        vocabulary: its rows are padded.
        copy: second name under which the directory stores the same tensor.
        as_stored: it has its own dtype, independent of the model's.
        site: the linear whose weight it is or belongs to; None: not a linear's, or never in FP8.
    """

    megatron: str
    parts: tuple[str, ...]
    shape: tuple[str, ...]
    vocabulary: bool = False
    copy: bool = False
    site: str | None = None
    as_stored: bool = False

    @property
    def qkv(self) -> bool:
        """Whether queries, keys and values are interleaved by group of heads (qkv_layout.py)."""
        return self.shape[0] == "qkv"

    @property
    def turned(self) -> bool:
        """Whether the last rows of each head produce rotary channels, in latent attention."""
        return self.shape[0] in ("queries", "kv_rank_and_rope")


def _weight(site: str, part: str, rows: str, cols: str, half: str = "") -> Entry:
    """The weight of a linear. A checkpoint stores the halves of a gated MLP's first projection separately; _w is the
    gate's."""
    return Entry(f"{site}.weight{half}", (f"{part}.weight",), (rows, cols), site=site)


def _norm(megatron: str, part: str, size: str = "hidden") -> Entry:
    return Entry(megatron, (f"{part}.weight",), (size,))


def _gated(ours: str, theirs: str, names: tuple[str, str, str], size: str) -> tuple[Entry, ...]:
    """A gated MLP with `size` channels."""
    gate, up, down = (f"{theirs}.{name}" for name in names)
    return (
        _weight(f"{ours}.linear_fc1", gate, size, "hidden", "_w"),
        _weight(f"{ours}.linear_fc1", up, size, "hidden", "_v"),
        _weight(f"{ours}.linear_fc2", down, "hidden", size),
    )


EMBEDDING = Entry(
    "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), ("vocab", "hidden"), vocabulary=True
)
FINAL_NORM = _norm("decoder.final_layernorm.weight", "model.norm")
HEAD = Entry("output_layer.weight", ("lm_head.weight",), ("vocab", "hidden"), vocabulary=True)

_QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
_HEADS = (
    Entry(
        "self_attention.linear_qkv.weight",
        tuple(f"{name}.weight" for name in _QKV),
        ("qkv", "hidden"),
        site="self_attention.linear_qkv",
    ),
    _weight("self_attention.linear_proj", "self_attn.o_proj", "hidden", "heads"),
)
_QKV_BIAS = Entry("self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in _QKV), ("qkv",))
_QK_NORM = tuple(
    _norm(f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm", "head_dim") for part in "qk"
)

# Latent attention: queries from their own latent or from the hidden state.
_QUERY_LATENT = (
    _weight("self_attention.linear_q_down_proj", "self_attn.q_a_proj", "q_rank", "hidden"),
    _norm("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm", "q_rank"),
    _weight("self_attention.linear_q_up_proj", "self_attn.q_b_proj", "queries", "q_rank"),
)
_QUERY = (_weight("self_attention.linear_q_proj", "self_attn.q_proj", "queries", "hidden"),)
_LATENT = (
    _weight(
        "self_attention.linear_kv_down_proj", "self_attn.kv_a_proj_with_mqa", "kv_rank_and_rope", "hidden"
    ),
    _norm("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm", "kv_rank"),
    _weight("self_attention.linear_kv_up_proj", "self_attn.kv_b_proj", "keys_and_values", "kv_rank"),
    _weight("self_attention.linear_proj", "self_attn.o_proj", "hidden", "values"),
)

# A multi-token prediction layer, besides its decoder layer.
_NEXT_TOKEN = (
    _norm("enorm.weight", "enorm"),
    _norm("hnorm.weight", "hnorm"),
    # DeepSeek's directories, and inference engines, have it in high precision.
    Entry("eh_proj.weight", ("eh_proj.weight",), ("hidden", "two_hidden")),
    _norm("final_layernorm.weight", "shared_head.norm"),
)


# ------------------------------------------------------------------------------------------------------ a whole model


def entries(architecture: Architecture, section: dict[str, Any]) -> Iterator[Entry]:
    """All tensors of a model, with full names, in forward order.

    Args:
        section: the model section of a run (config.py).
    """
    yield EMBEDDING
    layers = section["num_layers"]
    for number, has_experts in enumerate(layers_of_experts(section)):
        of_layer = _layer(architecture, section, has_experts)
        yield from _with_full_names(of_layer, f"decoder.layers.{number}.", f"model.layers.{number}.")
    yield FINAL_NORM
    if not section.get("share_embeddings_and_output_weights"):
        yield HEAD
    for number in range(section.get("mtp_num_layers") or 0):
        theirs = f"model.layers.{layers + number}."
        yield replace(EMBEDDING, parts=(f"{theirs}embed_tokens.weight",), copy=True)
        yield from _with_full_names(_NEXT_TOKEN, f"mtp.layers.{number}.", theirs)
        of_layer = _layer(architecture, section, layers_of_experts(section)[-1])
        yield from _with_full_names(of_layer, f"mtp.layers.{number}.transformer_layer.", theirs)
        head = EMBEDDING if section.get("share_embeddings_and_output_weights") else HEAD
        yield replace(head, parts=(f"{theirs}shared_head.head.weight",), copy=True)


def fused_rows(architecture: Architecture, shapes: Mapping[str, list[int]]) -> dict[str, dict[str, int]]:
    """Name of a fused weight in a directory -> its parts, with the number of rows of each.

    Args:
        shapes: shapes of all separate weights, by Hugging Face name.
    """
    found: dict[str, dict[str, int]] = {}
    for fused, modules in architecture.fused.items():
        first = f"{modules[0]}.weight"
        for layer in (name.removesuffix(first) for name in shapes if name.endswith(first)):
            parts = [f"{layer}{module}.weight" for module in modules]
            found[f"{layer}{fused}.weight"] = {part: shapes[part][0] for part in parts}
    return found


def gemms(listed: list[Entry]) -> dict[str, tuple[str, ...]]:
    """Megatron-Core's name of each linear in the layers -> the Hugging Face linears of the same GEMM."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in listed:
        if entry.site is not None:
            names = tuple(part.removesuffix(".weight") for part in entry.parts)
            found[entry.site] = found.get(entry.site, ()) + names
    return found


def fused_latents(sites: dict[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """From ``gemms``: both projections to latents of each attention, which vLLM fuses."""
    names = {part for parts in sites.values() for part in parts}
    queries = [name.removesuffix(".q_a_proj") for name in names if name.endswith(".q_a_proj")]
    return [(f"{attention}.q_a_proj", f"{attention}.kv_a_proj_with_mqa") for attention in sorted(queries)]


def never_fp8(listed: list[Entry]) -> list[str]:
    """Hugging Face names of linears in the layers that no format quantizes: routers, and eh_proj."""
    matrices = [
        entry for entry in listed if len(entry.shape) == 2 and not entry.vocabulary and entry.site is None
    ]
    return [part.removesuffix(".weight") for entry in matrices for part in entry.parts]


def layers_of_experts(section: dict[str, Any]) -> list[bool]:
    """For each layer, whether it has experts. Interprets Megatron-Core's moe_layer_freq: a list, or the period."""
    layers, frequency = section["num_layers"], section.get("moe_layer_freq") or 1
    if not section.get("num_moe_experts"):
        return [False] * layers
    if isinstance(frequency, int):
        return [number % frequency == 0 for number in range(layers)]
    return [bool(is_moe) for is_moe in frequency]


def _layer(architecture: Architecture, section: dict[str, Any], has_experts: bool) -> list[Entry]:
    """The tensors of a layer."""
    if architecture.latent:
        attention = [*(_QUERY_LATENT if section.get("q_lora_rank") else _QUERY), *_LATENT]
        norms = "input_layernorm.weight", "pre_mlp_layernorm.weight"
    else:
        attention = [
            *_HEADS,
            *([_QKV_BIAS] if architecture.qkv_bias else ()),
            *(_QK_NORM if architecture.qk_norm else ()),
        ]
        # Megatron-Core names these norms after the next linear, as if fused into it.
        norms = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
    return [
        _norm(norms[0], "input_layernorm"),
        *attention,
        _norm(norms[1], "post_attention_layernorm"),
        *(_experts(architecture, section) if has_experts else _gated("mlp", "mlp", _GATED, "ffn")),
    ]


def _experts(architecture: Architecture, section: dict[str, Any]) -> Iterator[Entry]:
    """Router, experts and shared expert. Site numbers are those of one rank with all experts."""
    assert architecture.experts is not None
    block, names = architecture.experts.block, architecture.experts.projections
    yield Entry("mlp.router.weight", (f"{block}.gate.weight",), ("experts", "hidden"))
    if section.get("moe_router_enable_expert_bias"):
        yield Entry(
            "mlp.router.expert_bias", (f"{block}.gate.e_score_correction_bias",), ("experts",), as_stored=True
        )
    for number in range(section["num_moe_experts"]):
        for entry in _gated(f"mlp.experts.experts.{number}", f"{block}.experts.{number}", names, "moe_ffn"):
            assert entry.site is not None
            yield replace(entry, site=entry.site.replace(".experts.experts.", ".experts.local_experts."))
    if section.get("moe_shared_expert_intermediate_size"):
        yield from _gated("mlp.shared_experts", f"{block}.shared_experts", names, "shared_ffn")


def _with_full_names(of_layer: list[Entry] | tuple[Entry, ...], ours: str, theirs: str) -> Iterator[Entry]:
    """A layer's tensors with full names."""
    for entry in of_layer:
        yield replace(
            entry,
            megatron=ours + entry.megatron,
            parts=tuple(theirs + part for part in entry.parts),
            site=entry.site and ours + entry.site,
        )
