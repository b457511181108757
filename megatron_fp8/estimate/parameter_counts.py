"""All parameters of a GPT on one rank, in Megatron-Core's order.

The order determines their layout in buffers. One rank's parameters differ from the whole model's in the
dimension that tensor parallelism splits, in the rank's experts, and in the padding of the vocabulary.

Plain attention computes queries, keys and values with one linear. Multi-latent attention projects hidden
states down to latents and latents up to heads; tensor parallelism splits the down projections by output
features too, and each rank gathers the parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from .model import Chunk, Layer, Model

Kind = Literal["embedding", "output", "norm", "bias", "linear", "router"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a chunk.

    Attributes:
        name: its name in the chunk's module, with global layer numbers.
        shape: shape on this rank.
        kind: its type; 'linear' is the weight of the GEMM site ``site``.
        cut: number of ranks with different parts of it.
        expert: whether it is an expert's, with its own data-parallel group.
        tied: shared by the first and the last stage, which sum their gradients.
        copy: a duplicate of another stage's or module's parameter; the model counts it once.
        sequence: whether its gradient is summed over the tensor-parallel ranks, which usually see parts of
            the sequence.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    cut: int = 1
    expert: bool = False
    tied: bool = False
    copy: bool = False
    sequence: bool = False

    @property
    def size(self) -> int:
        """Number of values on this rank."""
        return math.prod(self.shape)

    @property
    def site(self) -> str:
        """The GEMM site's name if this is a linear's weight, else empty."""
        return self.name.removesuffix(".weight") if self.kind == "linear" else ""


def chunk_parameters(model: Model, chunk: Chunk) -> list[Parameter]:
    """The parameters of a chunk on one rank, in module order."""
    known = model.parameters_by_chunk
    if chunk not in known:
        known[chunk] = _chunk_parameters(model, chunk)
    return known[chunk]


def _chunk_parameters(model: Model, chunk: Chunk) -> list[Parameter]:
    found: list[Parameter] = []
    hidden, tp = model.hidden_size, model.tensor_model_parallel_size
    tied = model.share_embeddings_and_output_weights
    rows = model.padded_vocabulary // tp
    # Stages share the embedding if the output layer is tied to it, or if the last stage predicts several tokens.
    shared = (tied or model.predictions > 1) and model.pipeline_model_parallel_size > 1
    if chunk.embeds:
        embedding = partial(Parameter, kind="embedding", copy=not chunk.first)
        found.append(embedding("embedding.word_embeddings.weight", (rows, hidden), cut=tp, tied=shared))
        if model.position_embedding_type == "learned_absolute":
            found.append(embedding("embedding.position_embeddings.weight", (model.positions, hidden)))
    for layer in chunk.layers:
        found += _layer(model, layer)
    if chunk.last:
        found += _norm(model, "decoder.final_layernorm", hidden)
        for layer in chunk.predicting:
            found += _prediction(model, layer)
    if chunk.last and not (tied and chunk.embeds):  # otherwise the output layer uses this stage's embedding
        found.append(Parameter("output_layer.weight", (rows, hidden), "output", tp, tied=tied, copy=tied))
    return found


def _prediction(model: Model, layer: Layer) -> Iterator[Parameter]:
    """One depth of multi-token prediction: norms of a hidden state and a token embedding, their projection, a layer, a
    norm."""
    prefix, hidden = layer.name.removesuffix("transformer_layer."), model.hidden_size
    yield from _norm(model, f"{prefix}enorm", hidden)
    yield from _norm(model, f"{prefix}hnorm", hidden)
    yield from _linear(model, layer.projection, 2 * hidden, hidden, bias=False)
    yield from _layer(model, layer)
    yield from _norm(model, f"{prefix}final_layernorm", hidden)


def _layer(model: Model, layer: Layer) -> Iterator[Parameter]:
    prefix, hidden = layer.name, model.hidden_size
    yield from _norm(model, f"{prefix}input_layernorm", hidden)
    *others, last = projections(model)
    for one in (last, *others):
        yield from _linear(model, f"{prefix}{one.name}", one.k, one.n, row=one.row, bias=one.bias)
    for name, size in norms(model):
        yield from _norm(model, f"{prefix}{name}", size)
    yield from _norm(model, f"{prefix}pre_mlp_layernorm", hidden)
    if layer.experts:
        yield from _experts(model, f"{prefix}mlp.")
    else:
        yield from _mlp(model, f"{prefix}mlp.", model.ffn_hidden_size)


def _experts(model: Model, prefix: str) -> Iterator[Parameter]:
    assert model.num_moe_experts is not None
    router = partial(Parameter, kind="router", sequence=model.sequence_parallel)
    yield router(f"{prefix}router.weight", (model.num_moe_experts, model.hidden_size))
    if model.add_bias_linear:
        yield router(f"{prefix}router.bias", (model.num_moe_experts,))
    for expert in range(model.local_experts):
        name = f"{prefix}experts.local_experts.{expert}."
        yield from _mlp(model, name, model.moe_ffn_hidden_size, model.expert_tp)
    if model.moe_shared_expert_intermediate_size:
        shared = f"{prefix}shared_experts."
        if model.moe_shared_expert_gate:
            yield router(f"{shared}gate_weight", (1, model.hidden_size))
        yield from _mlp(model, shared, model.moe_shared_expert_intermediate_size)


def _mlp(model: Model, prefix: str, ffn: int, expert_tp: int = 0) -> Iterator[Parameter]:
    hidden = model.hidden_size
    yield from _linear(model, f"{prefix}linear_fc1", hidden, model.gate * ffn, expert_tp=expert_tp)
    yield from _linear(model, f"{prefix}linear_fc2", ffn, hidden, row=True, expert_tp=expert_tp)


def _linear(
    model: Model,
    name: str,
    k: int,
    n: int,
    *,
    row: bool = False,
    bias: bool | None = None,
    expert_tp: int = 0,
) -> Iterator[Parameter]:
    """A linear [n, k], split by output features, or by input features (``row``): then every rank has the whole bias.

    ``expert_tp``: of an expert, the ranks that split it.
    """
    parts, expert = expert_tp or model.tensor_model_parallel_size, bool(expert_tp)
    shape = (n, k // parts) if row else (n // parts, k)
    yield Parameter(f"{name}.weight", shape, "linear", parts, expert)
    if model.add_bias_linear if bias is None else bias:
        sequence = row and model.sequence_parallel and not expert
        yield Parameter(f"{name}.bias", shape[:1], "bias", 1 if row else parts, expert, sequence=sequence)


def _norm(model: Model, name: str, size: int) -> Iterator[Parameter]:
    # Megatron-Core sums gradients of head norms (by name) even if ranks see the whole sequence.
    sequence = model.sequence_parallel or (
        model.qk_layernorm and name.endswith(("q_layernorm", "k_layernorm"))
    )
    for part in ("weight", "bias")[: 2 if model.normalization == "LayerNorm" else 1]:
        yield Parameter(f"{name}.{part}", (size,), "norm", sequence=sequence)


@dataclass(frozen=True)
class Totals:
    """Parameters of the whole model, each counted once.

    Attributes:
        total: without multi-token prediction; vocabulary without padding.
        active: those that multiply one token: of the experts only as many as the token is sent to.
        prediction: additional, of multi-token prediction: used in training only, and not part of published
            totals.
        padding: additional, from padding the vocabulary.
        embedding: part of total: token and position embeddings and the output layer.
    """

    total: int
    active: int
    prediction: int
    padding: int
    embedding: int


def totals(model: Model) -> Totals:
    """Parameter counts of the whole model."""
    total = active = prediction = embedding = 0
    padding_rows = model.padded_vocabulary - model.vocabulary
    padding = 0
    for chunk in model.chunks():
        for parameter in chunk_parameters(model, chunk):
            if parameter.copy:
                continue
            whole = parameter.size * parameter.cut
            if parameter.expert:
                whole *= model.expert_model_parallel_size
            if parameter.name.startswith("mtp."):
                prediction += whole
                continue
            if parameter.kind in ("embedding", "output") and "position" not in parameter.name:
                padding += padding_rows * model.hidden_size
                whole -= padding_rows * model.hidden_size
            embedding += whole * (parameter.kind in ("embedding", "output"))
            if parameter.expert:
                assert model.num_moe_experts is not None
                active += whole * model.moe_router_topk // model.num_moe_experts
            else:
                active += whole
            total += whole
    return Totals(total, active, prediction, padding, embedding)


@dataclass(frozen=True)
class Projection:
    """A linear [n, k] of attention, over all ranks.

    Attributes:
        name: site name without the layer's prefix.
        k, n: sizes.
        bias: whether it has a bias.
        row: whether tensor parallelism splits it by input features (row-parallel); otherwise by output
            features.
        latent: whether every rank gathers its whole output, as a latent.
        rotary: for a latent, columns that go into the heads of every rank unchanged except for positions.
    """

    name: str
    k: int
    n: int
    bias: bool = False
    row: bool = False
    latent: bool = False
    rotary: int = 0

    def part(self, tp: int) -> tuple[int, int]:
        """(n, k) on one of ``tp`` ranks."""
        return (self.n, self.k // tp) if self.row else (self.n // tp, self.k)


def projections(model: Model) -> tuple[Projection, ...]:
    """Attention's linears in execution order."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    last = Projection(
        "self_attention.linear_proj", heads * model.value_width, hidden, bias=model.add_bias_linear, row=True
    )
    if not model.multi_latent_attention:
        width = (heads + 2 * model.num_query_groups) * model.kv_channels
        bias = model.add_bias_linear or model.add_qkv_bias
        return Projection("self_attention.linear_qkv", hidden, width, bias=bias), last
    queries = heads * model.key_width
    first: tuple[Projection, ...] = (Projection("self_attention.linear_q_proj", hidden, queries),)
    if model.q_lora_rank is not None:
        first = (
            Projection("self_attention.linear_q_down_proj", hidden, model.q_lora_rank, latent=True),
            Projection("self_attention.linear_q_up_proj", model.q_lora_rank, queries),
        )
    rank, rotary = model.kv_lora_rank, model.qk_pos_emb_head_dim
    return (
        *first,
        Projection("self_attention.linear_kv_down_proj", hidden, rank + rotary, latent=True, rotary=rotary),
        Projection("self_attention.linear_kv_up_proj", rank, heads * (model.qk_head_dim + model.v_head_dim)),
        last,
    )


def norms(model: Model) -> tuple[tuple[str, int], ...]:
    """(name, channels) of the norms inside attention: of heads, or of latents."""
    if not model.qk_layernorm:
        return ()
    if not model.multi_latent_attention:
        return ("self_attention.q_layernorm", model.kv_channels), (
            "self_attention.k_layernorm",
            model.kv_channels,
        )
    queries = () if model.q_lora_rank is None else (("self_attention.q_layernorm", model.q_lora_rank),)
    return (*queries, ("self_attention.kv_layernorm", model.kv_lora_rank))


def gathers_input(site: str) -> bool:
    """Whether sequence parallelism gathers this linear's input (it is column-parallel)."""
    return not site.endswith(("linear_proj", "linear_fc2")) and ".experts." not in site
