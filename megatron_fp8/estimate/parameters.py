"""All parameters of a GPT on one rank, in Megatron-Core's order.

The order determines their layout in buffers. One rank's parameters differ from the whole model's in the
dimension that tensor parallelism splits, in the rank's experts, and in the padding of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from .attention import norms, projections
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
        layer: global layer number; None outside the decoder's layers.
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
    layer: int | None = None
    expert: bool = False
    tied: bool = False
    copy: bool = False
    sequence: bool = False

    @property
    def size(self) -> int:
        """Number of values on this rank."""
        return math.prod(self.shape)

    @property
    def site(self) -> str | None:
        """The GEMM site's name if this is a linear's weight."""
        return self.name.removesuffix(".weight") if self.kind == "linear" else None


def of_chunk(model: Model, chunk: Chunk) -> list[Parameter]:
    """The parameters of a chunk on one rank, in module order."""
    found: list[Parameter] = []
    hidden, tp = model.hidden_size, model.tensor_model_parallel_size
    tied = model.share_embeddings_and_output_weights
    rows = model.padded_vocabulary // tp
    # Stages share the embedding if the output layer is tied to it, or if the last stage predicts several tokens.
    shared = (tied or model.predictions > 1) and model.pipeline_model_parallel_size > 1
    if chunk.embeds:
        found.append(
            Parameter(
                "embedding.word_embeddings.weight",
                (rows, hidden),
                "embedding",
                tp,
                tied=shared,
                copy=not chunk.first,
            )
        )
        if model.position_embedding_type == "learned_absolute":
            found.append(
                Parameter(
                    "embedding.position_embeddings.weight",
                    (model.positions, hidden),
                    "embedding",
                    copy=not chunk.first,
                )
            )
    for layer in chunk.layers:
        found += _layer(model, layer)
    if chunk.last:
        found += _norm(model, "decoder.final_layernorm", hidden, None)
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
    yield from _column(model, f"{prefix}eh_proj", 2 * hidden, hidden, None, bias=False)
    yield from _layer(model, layer)
    yield from _norm(model, f"{prefix}final_layernorm", hidden)


def _layer(model: Model, layer: Layer) -> Iterator[Parameter]:
    prefix, hidden, number = layer.name, model.hidden_size, layer.number
    yield from _norm(model, f"{prefix}input_layernorm", hidden, number)
    *others, last = projections(model)
    for one in (last, *others):
        make = _row if one.row else _column
        yield from make(model, f"{prefix}{one.name}", one.k, one.n, number, bias=one.bias)
    for name, size in norms(model):
        yield from _norm(model, f"{prefix}{name}", size, number)
    yield from _norm(model, f"{prefix}pre_mlp_layernorm", hidden, number)
    if not layer.experts:
        yield from _mlp(model, f"{prefix}mlp.", model.ffn, number, model.tensor_model_parallel_size)
        return
    yield from _experts(model, f"{prefix}mlp.", number)


def _experts(model: Model, prefix: str, layer: int | None) -> Iterator[Parameter]:
    assert model.num_moe_experts is not None
    router = partial(Parameter, kind="router", layer=layer, sequence=model.sequence_parallel)
    yield router(f"{prefix}router.weight", (model.num_moe_experts, model.hidden_size))
    if model.add_bias_linear:
        yield router(f"{prefix}router.bias", (model.num_moe_experts,))
    for expert in range(model.local_experts):
        name = f"{prefix}experts.local_experts.{expert}."
        yield from _mlp(model, name, model.expert_ffn, layer, model.expert_tp, expert=True)
    if model.moe_shared_expert_intermediate_size:
        shared = f"{prefix}shared_experts."
        if model.moe_shared_expert_gate:
            yield router(f"{shared}gate_weight", (1, model.hidden_size))
        tp = model.tensor_model_parallel_size
        yield from _mlp(model, shared, model.moe_shared_expert_intermediate_size, layer, tp)


def _mlp(
    model: Model, prefix: str, ffn: int, layer: int | None, cut: int, *, expert: bool = False
) -> Iterator[Parameter]:
    hidden = model.hidden_size
    yield from _column(model, f"{prefix}linear_fc1", hidden, model.gate * ffn, layer, cut=cut, expert=expert)
    yield from _row(model, f"{prefix}linear_fc2", ffn, hidden, layer, cut=cut, expert=expert)


def _column(
    model: Model,
    name: str,
    k: int,
    n: int,
    layer: int | None,
    *,
    bias: bool | None = None,
    cut: int | None = None,
    expert: bool = False,
) -> Iterator[Parameter]:
    """A column-parallel linear [n, k], split by output features."""
    parts = cut or model.tensor_model_parallel_size
    yield Parameter(f"{name}.weight", (n // parts, k), "linear", parts, layer, expert)
    if model.add_bias_linear if bias is None else bias:
        yield Parameter(f"{name}.bias", (n // parts,), "bias", parts, layer, expert)


def _row(
    model: Model,
    name: str,
    k: int,
    n: int,
    layer: int | None,
    *,
    bias: bool | None = None,
    cut: int | None = None,
    expert: bool = False,
) -> Iterator[Parameter]:
    """A row-parallel linear [n, k], split by input features; every rank has the whole bias."""
    parts = cut or model.tensor_model_parallel_size
    yield Parameter(f"{name}.weight", (n, k // parts), "linear", parts, layer, expert)
    if model.add_bias_linear if bias is None else bias:
        yield Parameter(
            f"{name}.bias", (n,), "bias", 1, layer, expert, sequence=model.sequence_parallel and not expert
        )


def _norm(model: Model, name: str, size: int, layer: int | None = None) -> Iterator[Parameter]:
    # Megatron-Core sums gradients of head norms (by name) even if ranks see the whole sequence.
    of_heads = model.qk_layernorm and name.endswith(("q_layernorm", "k_layernorm"))
    for part in ("weight", "bias")[: 2 if model.normalization == "LayerNorm" else 1]:
        yield Parameter(
            f"{name}.{part}", (size,), "norm", layer=layer, sequence=model.sequence_parallel or of_heads
        )


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
        for parameter in of_chunk(model, chunk):
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
