"""Every parameter of a GPT, in the order in which Megatron-Core's module lists them, as one rank holds it.

The order matters to whoever lays them out in buffers. Rank and whole differ in the dimension that tensor parallelism
cuts, in the experts that a rank has, and in a vocabulary that is padded so that it can be cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .model import Chunk, Model

Kind = Literal["embedding", "output", "norm", "bias", "linear", "router"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a chunk.

    Attributes:
        name: as the chunk's module has it, but with global layer numbers.
        shape: on this rank.
        kind: what it is; a 'linear' is the weight of a GEMM site, whose name is ``site``.
        cut: ranks that hold another part of it.
        layer: global number of its layer, None outside the layers.
        expert: whether it is an expert's, and so has data-parallel ranks of its own.
        tied: a second copy of the embedding's weight, or one that has such a copy.
        sequence: whether its gradient is summed over the tensor-parallel ranks, which see parts of the sequence.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    cut: int = 1
    layer: int | None = None
    expert: bool = False
    tied: bool = False
    sequence: bool = False

    @property
    def size(self) -> int:
        """Values on this rank."""
        return math.prod(self.shape)

    @property
    def site(self) -> str | None:
        """The GEMM site's name, of a linear's weight."""
        return self.name.removesuffix(".weight") if self.kind == "linear" else None


def of_chunk(model: Model, chunk: Chunk) -> list[Parameter]:
    """The parameters that one rank holds of a chunk, in the module's order."""
    found: list[Parameter] = []
    hidden, tp = model.hidden_size, model.tensor_model_parallel_size
    stages = model.pipeline_model_parallel_size
    tied = model.share_embeddings_and_output_weights
    rows = model.padded_vocabulary // tp
    if chunk.first:
        found.append(
            Parameter(
                "embedding.word_embeddings.weight",
                (rows, hidden),
                "embedding",
                tp,
                tied=tied and stages > 1,
            )
        )
        if model.position_embedding_type == "learned_absolute":
            found.append(
                Parameter("embedding.position_embeddings.weight", (model.positions, hidden), "embedding")
            )
    for layer in chunk.layers:
        found += _layer(model, layer)
    if chunk.last:
        found += _norm(model, "decoder.final_layernorm", hidden, None)
        if not tied or not chunk.first:
            found.append(Parameter("output_layer.weight", (rows, hidden), "output", tp, tied=tied))
    return found


def _layer(model: Model, layer: int) -> Iterator[Parameter]:
    prefix = f"decoder.layers.{layer}."
    hidden, channels, tp = model.hidden_size, model.channels, model.tensor_model_parallel_size
    yield from _norm(model, f"{prefix}input_layernorm", hidden, layer)
    heads, groups = model.num_attention_heads, model.query_groups
    attention = f"{prefix}self_attention."
    yield from _row(model, f"{attention}linear_proj", heads * channels, hidden, layer)
    yield from _column(
        model,
        f"{attention}linear_qkv",
        hidden,
        (heads + 2 * groups) * channels,
        layer,
        bias=model.add_bias_linear or model.add_qkv_bias,
    )
    if model.qk_layernorm:
        yield from _norm(model, f"{attention}q_layernorm", channels, layer)
        yield from _norm(model, f"{attention}k_layernorm", channels, layer)
    yield from _norm(model, f"{prefix}pre_mlp_layernorm", hidden, layer)
    if not model.has_experts(layer):
        yield from _mlp(model, f"{prefix}mlp.", model.ffn, layer, tp)
        return
    assert model.num_moe_experts is not None
    yield Parameter(
        f"{prefix}mlp.router.weight",
        (model.num_moe_experts, hidden),
        "router",
        layer=layer,
        sequence=model.sequence_parallel,
    )
    for expert in range(model.local_experts):
        yield from _mlp(
            model,
            f"{prefix}mlp.experts.local_experts.{expert}.",
            model.expert_ffn,
            layer,
            model.expert_tp,
            expert=True,
        )
    if model.moe_shared_expert_intermediate_size:
        shared = f"{prefix}mlp.shared_experts."
        if model.moe_shared_expert_gate:
            yield Parameter(
                f"{shared}gate_weight", (1, hidden), "router", layer=layer, sequence=model.sequence_parallel
            )
        yield from _mlp(model, shared, model.moe_shared_expert_intermediate_size, layer, tp)


def _mlp(
    model: Model, prefix: str, ffn: int, layer: int, cut: int, *, expert: bool = False
) -> Iterator[Parameter]:
    hidden = model.hidden_size
    yield from _column(model, f"{prefix}linear_fc1", hidden, model.gate * ffn, layer, cut=cut, expert=expert)
    yield from _row(model, f"{prefix}linear_fc2", ffn, hidden, layer, cut=cut, expert=expert)


def _column(
    model: Model,
    name: str,
    k: int,
    n: int,
    layer: int,
    *,
    bias: bool | None = None,
    cut: int | None = None,
    expert: bool = False,
) -> Iterator[Parameter]:
    """A linear [n, k] that is cut by its output features."""
    parts = cut or model.tensor_model_parallel_size
    yield Parameter(f"{name}.weight", (n // parts, k), "linear", parts, layer, expert)
    if model.add_bias_linear if bias is None else bias:
        yield Parameter(f"{name}.bias", (n // parts,), "bias", parts, layer, expert)


def _row(
    model: Model, name: str, k: int, n: int, layer: int, *, cut: int | None = None, expert: bool = False
) -> Iterator[Parameter]:
    """A linear [n, k] that is cut by its input features; its bias is whole on every rank."""
    parts = cut or model.tensor_model_parallel_size
    yield Parameter(f"{name}.weight", (n, k // parts), "linear", parts, layer, expert)
    if model.add_bias_linear:
        yield Parameter(
            f"{name}.bias", (n,), "bias", 1, layer, expert, sequence=model.sequence_parallel and not expert
        )


def _norm(model: Model, name: str, size: int, layer: int | None) -> Iterator[Parameter]:
    for part in ("weight", "bias")[: 2 if model.normalization == "LayerNorm" else 1]:
        yield Parameter(f"{name}.{part}", (size,), "norm", layer=layer, sequence=model.sequence_parallel)


@dataclass(frozen=True)
class Totals:
    """Parameters of the whole model, each once.

    Attributes:
        total: the vocabulary without its padding.
        active: of those, what one token is multiplied by: of the experts only as many as it is sent to.
        padding: what the padded vocabulary adds to the total.
        embedding: of the total, tables of tokens and positions and the output layer.
    """

    total: int
    active: int
    padding: int
    embedding: int


def totals(model: Model) -> Totals:
    """Parameters of the whole model by what counts."""
    total = active = embedding = 0
    padding_rows = model.padded_vocabulary - model.vocabulary
    padding = 0
    for chunk in model.chunks():
        for parameter in of_chunk(model, chunk):
            if parameter.kind == "output" and parameter.tied:
                continue  # the embedding's second copy
            whole = parameter.size * parameter.cut
            if parameter.kind in ("embedding", "output") and "position" not in parameter.name:
                padding += padding_rows * model.hidden_size
                whole -= padding_rows * model.hidden_size
            embedding += whole * (parameter.kind in ("embedding", "output"))
            if parameter.expert:
                assert model.num_moe_experts is not None
                whole *= model.expert_model_parallel_size
                active += whole * model.moe_router_topk // model.num_moe_experts
            else:
                active += whole
            total += whole
    return Totals(total, active, padding, embedding)
