"""Communication of a rank in an iteration, by collective: bytes and calls, no times.

``bytes`` is the size of the whole tensor of a collective: the result of an all-gather, the input of a
reduce-scatter or all-reduce, the tensor sent to the next or previous stage. tests/functional/test_estimate.py
counts the same in trainings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from ..params.stored_codes import granularities
from ..plan.cast_spec import CastSpec
from ..plan.site_plan import SitePlan, dispatch_cast
from .activations import probability_bytes
from .config_reader import Settings
from .fp8_weights import shares_gradient_buffer, weight_rules
from .linear_communication import Call, Traffic, column, gathered_scales, row
from .model import OUTPUT, Chunk, Layer, Model
from .model_state import Buffer, chunk_buffers, group_size, is_apart
from .parameter_counts import Projection, chunk_parameters, projections


def stage_traffic(settings: Settings, chunks: list[Chunk]) -> list[Traffic]:
    """The traffic of a pipeline stage's rank in one iteration, one entry per kind; none for groups of one rank."""
    found: dict[Traffic, Traffic] = {}
    for entry in _traffic(settings, chunks):
        if entry.ranks > 1 and entry.bytes:
            kind = replace(entry, bytes=0, calls=0)
            total = found.get(kind, kind)
            found[kind] = replace(entry, bytes=total.bytes + entry.bytes, calls=total.calls + entry.calls)
    return list(found.values())


def _traffic(settings: Settings, chunks: list[Chunk]) -> Iterator[Traffic]:
    model = settings.model
    for chunk in chunks:
        yield from _gradients(settings, chunk)
        for entry in _microbatch(settings, chunk):
            yield entry * settings.microbatches
    yield from _iteration(settings, chunks)
    if model.pipeline_model_parallel_size > 1:
        size = model.activation_bytes * settings.local_tokens * model.hidden_size
        for chunk in chunks:
            if not chunk.last:
                yield (
                    Traffic("activations to the next stage", "send", "pipeline", 2, size)
                    * settings.microbatches
                )
            if not chunk.first:
                what = "their gradients to the previous stage"
                yield Traffic(what, "send", "pipeline", 2, size) * settings.microbatches


# ----------------------------------------------------------------------------------------------------- once an iteration


def _gradients(settings: Settings, chunk: Chunk) -> Iterator[Traffic]:
    """Gradients over data-parallel ranks, and parameters with the distributed optimizer."""
    distributed = settings.optimizer.use_distributed_optimizer
    shared = shares_gradient_buffer(settings)
    buffers = chunk_buffers(settings, chunk)
    # Dense parameters and experts have separate optimizers. Each one's step gathers all of the model's parameters
    # (Megatron-Core 0.16, distrib_optimizer.py, step_with_ready_grads), unless the next forward does, or the buffers are
    # the gradients' (mcore/optimizer/fp8_params.py).
    once = settings.optimizer.overlap_param_gather or shared
    gathers = 1 if once else len({buffer.expert for buffer in buffers})
    for buffer in buffers:
        axis, count = "expert data" if buffer.expert else "data", len(buffer.buckets)
        call: Call = "reduce-scatter" if distributed else "all-reduce"
        yield Traffic("gradients", call, axis, buffer.ranks, 4 * buffer.size, count)
        if distributed:
            each = settings.model.activation_bytes
            if buffer.fp8:
                each = 2 if shared else 1
            yield Traffic("parameters", "all-gather", axis, buffer.ranks, each * buffer.size, count) * gathers
            if buffer.fp8 and not shared:
                size = _parameter_amaxes(settings, buffer)
                yield Traffic("amaxes of parameters", "all-reduce", axis, buffer.ranks, size)


def _parameter_amaxes(settings: Settings, buffer: Buffer) -> int:
    """Bytes of the amaxes shared by ranks with parts of a weight (params/shards.py): one per block, and a count."""
    count = 0
    for parameter in buffer.parameters:
        rule, _ = weight_rules(settings.plan(parameter.site))
        assert rule is not None
        shape = parameter.shape if not rule.granularity.is_tensor else (1, 1)
        for block in granularities(rule):
            count += -(-shape[0] // (block.rows or shape[0])) * -(-shape[1] // (block.cols or shape[1]))
        count += 1
    return 4 * count


def _iteration(settings: Settings, chunks: list[Chunk]) -> Iterator[Traffic]:
    model = settings.model
    parameters = [parameter for chunk in chunks for parameter in chunk_parameters(model, chunk)]
    layers = [layer for chunk in chunks for layer in chunk.every if layer.experts]
    tp, ranks = model.tensor_model_parallel_size, settings.gpus // model.pipeline_model_parallel_size
    norms = sum(parameter.size for parameter in parameters if parameter.sequence)
    yield Traffic("gradients of norms", "all-reduce", "tensor", tp, 4 * norms)
    if model.pipeline_model_parallel_size > 1:
        for parameter in parameters:
            if parameter.tied:
                size = 4 * parameter.size
                yield Traffic("gradient of the tied embedding", "all-reduce", "embedding", 2, size)
    if model.moe_router_enable_expert_bias:
        counts = 4 * len(layers) * (model.num_moe_experts or 0)  # float32 counts
        yield Traffic("tokens of each expert, for its bias", "all-reduce", "tensor and data", ranks, counts)
    slots: Counter[bool] = Counter()
    for parameter in parameters:
        if parameter.site:
            slots[is_apart(model, parameter)] += _slots(settings.plan(parameter.site))
    for layer in layers:
        casts = (_sent_to_experts(settings, layer, role) for role in ("input", "grad_output"))
        slots[False] += sum(cast is not None for cast in casts)
    if any(chunk.last for chunk in chunks):
        slots[False] += _slots(settings.plan(OUTPUT))
    same_experts = (
        group_size(settings, expert=True) * model.expert_tp
    )  # ranks with the same experts or parts of them
    for apart, count in slots.items():
        if count:
            group = same_experts if apart else ranks
            yield Traffic("amaxes of the iteration", "all-reduce", "amax", group, 4 * (2 * count + 2))


def _slots(plan: SitePlan) -> int:
    """Casts of a site that record amaxes: one per role, or two if its GEMMs need different casts."""
    pairs = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
    count = 0
    for role, gemms in pairs.items():
        one, other = (plan.operands[gemm][role] for gemm in gemms)
        count += (one is not None) + (other is not None and other != one)
    return count


# ---------------------------------------------------------------------------------------------------- once a microbatch


def _microbatch(settings: Settings, chunk: Chunk) -> Iterator[Traffic]:
    model, tp = settings.model, settings.model.tensor_model_parallel_size
    whole = model.activation_bytes * settings.tokens * model.hidden_size
    again = recomputed_layers(model, chunk)
    for layer in chunk.every:
        for one in layer_traffic(settings, layer):
            yield one * (2 if layer in again and one.what.endswith("forward") else 1)
    for _ in range(chunk.first + len(chunk.predicting)):
        # With learned positions, embeddings are summed over all ranks first and split afterwards.
        split = model.sequence_parallel and model.position_embedding_type != "learned_absolute"
        yield Traffic("embedding", "reduce-scatter" if split else "all-reduce", "tensor", tp, whole)
        if model.sequence_parallel:
            yield Traffic("embedding", "all-gather", "tensor", tp, whole)
    if chunk.last:
        for one in _output(settings):
            yield one * model.predictions


def _output(settings: Settings) -> Iterator[Traffic]:
    """The output layer and the loss, for one predicted token per position."""
    model, tokens = settings.model, settings.tokens
    tp, whole = model.tensor_model_parallel_size, model.activation_bytes * tokens * model.hidden_size
    if settings.plan(OUTPUT).precision == "fp8":
        for one in column(settings, OUTPUT, model.hidden_size):
            yield replace(one, what="output layer")
    elif model.sequence_parallel:
        yield Traffic("output layer", "all-gather", "tensor", tp, 2 * whole, 2)
        yield Traffic("output layer", "reduce-scatter", "tensor", tp, whole)
    else:
        yield Traffic("output layer", "all-reduce", "tensor", tp, whole)
    yield Traffic("cross entropy", "all-reduce", "tensor", tp, 3 * 4 * tokens, 3)


def recomputed_layers(model: Model, chunk: Chunk) -> tuple[Layer, ...]:
    """Layers whose forward runs twice."""
    if model.recompute_granularity != "full":
        return ()
    if model.recompute_method == "block":  # excludes multi-token prediction
        return chunk.layers[: model.recompute_num_layers or 1]
    return chunk.every


def layer_traffic(settings: Settings, layer: Layer) -> Iterator[Traffic]:
    """A layer's traffic for one microbatch, forward and backward; includes the projection of a multi-token prediction
    layer."""
    model = settings.model
    if layer.number is None:
        yield from _mtp_projection(settings, layer.projection)
    for one in projections(model):
        site = f"{layer.name}{one.name}"
        yield from row(settings, site) if one.row else column(settings, site, one.k)
        if one.latent:
            yield from _latent(settings, one)
    times = 1 + ("core_attn" in model.recomputed)
    for traffic in _context(settings):
        yield traffic * (times if traffic.what.endswith("forward") else 1)
    if not layer.experts:
        yield from _mlp(settings, f"{layer.name}mlp.")
        return
    yield from _balance(settings)
    times = 1 + ("moe" in model.recomputed)
    for traffic in _expert_exchange(settings, layer):
        yield traffic * (times if traffic.what.endswith("forward") else 1)
    if model.moe_shared_expert_intermediate_size:
        yield from _mlp(settings, f"{layer.name}mlp.shared_experts.")


def _context(settings: Settings) -> Iterator[Traffic]:
    """Attention's exchanges between context-parallel ranks (mcore/layers/context_parallel.py)."""
    model, tokens, cp = settings.model, settings.tokens, settings.model.context_parallel_size
    tp, size = model.tensor_model_parallel_size, model.activation_bytes
    groups = model.num_attention_heads if model.multi_latent_attention else model.num_query_groups
    both = tokens * groups * (model.key_width + model.value_width) // tp
    if model.context_exchange == "all_gather":
        yield Traffic("keys and values, forward", "all-gather", "context", cp, size * cp * both)
        yield Traffic("keys and values, backward", "reduce-scatter", "context", cp, size * cp * both)
    elif model.context_exchange == "p2p":
        for direction in ("forward", "backward"):
            yield Traffic(f"keys and values, {direction}", "send", "context", cp, size * both) * (cp - 1)
        yield Traffic("their gradients, backward", "send", "context", cp, 4 * both) * cp
    elif model.context_exchange == "a2a":
        queries = tokens * model.heads * (model.key_width + model.value_width)  # and results
        for direction in ("forward", "backward"):
            moved = size * (both + queries)
            yield Traffic(f"attention, {direction}", "all-to-all", "context", cp, moved, 4)


def _mlp(settings: Settings, prefix: str) -> Iterator[Traffic]:
    yield from column(settings, f"{prefix}linear_fc1", settings.model.hidden_size)
    yield from row(settings, f"{prefix}linear_fc2")


def _latent(settings: Settings, down: Projection) -> Iterator[Traffic]:
    """Exchange of latent parts, so that each rank has all columns of its tokens (mcore/patches/megatron_fixes.py)."""
    model, tokens = settings.model, settings.tokens
    tp, size = model.tensor_model_parallel_size, model.activation_bytes
    if not model.sequence_parallel:
        yield Traffic("latents, forward", "all-gather", "tensor", tp, size * tokens * down.n)
        yield Traffic("latents, backward", "all-reduce", "tensor", tp, size * tokens * down.rotary)
        return
    for direction in ("forward", "backward"):
        yield Traffic(f"latents, {direction}", "all-to-all", "tensor", tp, size * tokens * down.n // tp)
    yield Traffic("latents, forward", "all-gather", "tensor", tp, size * tokens * down.rotary)
    yield Traffic("latents, backward", "reduce-scatter", "tensor", tp, size * tokens * down.rotary)


def _mtp_projection(settings: Settings, site: str) -> Iterator[Traffic]:
    """Multi-token prediction's projection of concatenated hidden states and embeddings; ranks gather its columns."""
    model = settings.model
    tp, whole = model.tensor_model_parallel_size, model.activation_bytes * settings.tokens * model.hidden_size
    yield from column(settings, site, 2 * model.hidden_size)
    yield Traffic("activations, forward", "all-gather", "tensor", tp, whole)
    if model.sequence_parallel:
        yield Traffic("gradients of activations, backward", "all-gather", "tensor", tp, whole)


def _balance(settings: Settings) -> Iterator[Traffic]:
    """Token counts by expert, summed over ranks for the auxiliary losses."""
    model, what = settings.model, "tokens of each expert, for a loss"
    near = model.tensor_model_parallel_size * model.context_parallel_size
    for loss in model.balancing_losses:
        counts = 8 * (model.num_moe_experts or 0)
        if loss == "global_aux_loss":
            ranks = settings.gpus // model.pipeline_model_parallel_size
            yield Traffic(what, "all-reduce", "tensor and data", ranks, counts)
        else:
            each = settings.train.micro_batch_size if loss == "seq_aux_loss" else 1
            yield Traffic(what, "all-reduce", "tensor and context", near, counts * each)


def _sent_to_experts(settings: Settings, layer: Layer, role: str) -> CastSpec | None:
    """The cast of tokens ('input'), or of gradients of their sums ('grad_output'), before they are sent to experts."""
    model = settings.model
    if not model.moe_fp8_dispatch:
        return None
    linear = "linear_fc1" if role == "input" else "linear_fc2"
    # All ranks use the same cast, and experts differ by overrides only.
    count = (model.num_moe_experts or 0) if model.fp8_overrides else 1
    sites = [f"{layer.name}mlp.experts.local_experts.{expert}.{linear}" for expert in range(count)]
    return dispatch_cast([settings.plan(site) for site in sites], role)[0]


def _expert_exchange(settings: Settings, layer: Layer) -> Iterator[Traffic]:
    """Tokens and router weights sent to the ranks of their experts and back; gradients in reverse. What a rank receives
    depends on the routing; the sizes are what it sends, which is the mean of what ranks receive."""
    model = settings.model
    ep, etp = model.expert_model_parallel_size, model.expert_tp
    routed = settings.local_tokens * model.moe_router_topk
    plain, weights = routed * model.activation_bytes * model.hidden_size, routed * probability_bytes(model)
    there = {}
    for direction, role in (("forward", "input"), ("backward", "grad_output")):
        cast = _sent_to_experts(settings, layer, role)
        there[direction] = plain
        if cast is not None:
            scales = gathered_scales(cast.rule, routed, model.hidden_size)
            there[direction] = routed * model.hidden_size + scales
    counts = 8 * (model.num_moe_experts or 0) * ep * etp
    yield Traffic("tokens of each expert, forward", "all-gather", "expert", ep * etp, counts)
    for direction, size in there.items():
        yield Traffic(
            f"tokens to experts, {direction}", "all-to-all", "expert", ep, size + weights + plain, 3
        )
    # Tensor-parallel experts: each rank processes the tokens of all ranks of the group.
    exchanged: tuple[tuple[str, Call, int, int], ...] = (
        ("forward", "all-gather", there["forward"] + weights, 2),
        ("forward", "reduce-scatter", plain, 1),
        ("backward", "reduce-scatter", plain + weights, 2),
        ("backward", "all-gather", there["backward"], 1),
    )
    for direction, call, size, calls in exchanged:
        yield Traffic(f"tokens of cut experts, {direction}", call, "expert tensor", etp, size * etp, calls)
