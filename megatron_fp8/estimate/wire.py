"""What a rank exchanges with others in an iteration, by collective: counted, not timed.

``bytes`` are those of the whole tensor that a collective is about: what an all-gather gives, what a reduce-scatter takes,
what an all-reduce sums, what is sent to the next or previous stage.
tests/functional/test_estimate.py counts the same in trainings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ..numerics.rule import Granularity, Rule
from ..params.fp8_parameter import granularities
from ..plan.site_plan import SitePlan
from .activations import kept_rule, probability_bytes
from .buffers import Buffer, group_size, is_apart, of_chunk_buffers
from .model import Chunk, Model
from .parameters import of_chunk
from .settings import Settings
from .sites import OUTPUT, Plans, shares_gradient_buffer, side_scales, two_rules, weight_rules

Call = Literal["all-gather", "reduce-scatter", "all-reduce", "send", "all-to-all"]


@dataclass(frozen=True)
class Traffic:
    """One kind of exchange.

    Attributes:
        what: in words, the key of the estimate's ``wire``.
        call: the collective.
        axis: the group: 'tensor', 'data', 'context', 'pipeline', 'expert', 'expert tensor', 'embedding', 'expert data',
            'amax'.
        ranks: in the group.
        bytes: of the whole tensor, over an iteration.
        calls: in an iteration.
    """

    what: str
    call: Call
    axis: str
    ranks: int
    bytes: int
    calls: int = 1

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.what, self.call, self.axis, self.ranks, self.bytes * times, self.calls * times)

    @property
    def sent(self) -> int:
        """Bytes that a rank sends, by rings and, to the next or previous stage, directly."""
        if self.call == "send":
            return self.bytes
        return self.bytes * (self.ranks - 1) // self.ranks * (2 if self.call == "all-reduce" else 1)


def of_stage(settings: Settings, chunks: list[Chunk], plans: Plans) -> list[Traffic]:
    """The traffic of a rank of a pipeline stage in one iteration, one entry a kind; groups of one rank send nothing."""
    found: dict[tuple[str, str, str], Traffic] = {}
    for one in _all(settings, chunks, plans):
        if one.ranks == 1 or not one.bytes:
            continue
        key = (one.what, one.call, one.axis)
        known = found.get(key)
        if known is not None:
            one = Traffic(
                one.what, one.call, one.axis, one.ranks, one.bytes + known.bytes, one.calls + known.calls
            )
        found[key] = one
    return list(found.values())


def _all(settings: Settings, chunks: list[Chunk], plans: Plans) -> Iterator[Traffic]:
    model = settings.model
    for chunk in chunks:
        yield from _gradients(settings, chunk, plans)
        for one in _microbatch(settings, chunk, plans):
            yield one * settings.microbatches
    yield from _iteration(settings, chunks, plans)
    if model.pipeline_model_parallel_size > 1:
        size = model.activation_bytes * settings.tokens // model.token_share * model.hidden_size
        for chunk in chunks:
            for ends, what in (
                (chunk.last, "activations to the next stage"),
                (chunk.first, "their gradients to the previous stage"),
            ):
                if not ends:
                    yield (Traffic(what, "send", "pipeline", 2, size) * settings.microbatches)


# ----------------------------------------------------------------------------------------------------- once an iteration


def _gradients(settings: Settings, chunk: Chunk, plans: Plans) -> Iterator[Traffic]:
    """Gradients of all data-parallel ranks, and with the distributed optimizer the parameters of all."""
    distributed = settings.optimizer.use_distributed_optimizer
    shared = shares_gradient_buffer(settings)
    buffers = of_chunk_buffers(settings, chunk, plans)
    # Dense parameters and experts have an optimizer each, and each one's step gathers all of the model's parameters
    # (Megatron-Core 0.16, distrib_optimizer.py, step_with_ready_grads), unless the next forward does.
    gathers = 1 if settings.optimizer.overlap_param_gather else len({buffer.expert for buffer in buffers})
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
                yield Traffic(
                    "amaxes of parameters", "all-reduce", axis, buffer.ranks, _parameter_amaxes(buffer, plans)
                )


def _parameter_amaxes(buffer: Buffer, plans: Plans) -> int:
    """Bytes of the amaxes that ranks with parts of a weight share (params/shards.py): one a block, and a count."""
    count = 0
    for bucket in buffer.buckets:
        for parameter, _ in bucket.places:
            assert parameter.site is not None
            rule, _ = weight_rules(plans.of(parameter.site, parameter.layer))
            assert rule is not None
            shape = parameter.shape if not rule.granularity.is_tensor else (1, 1)
            for block in granularities(rule):
                count += -(-shape[0] // (block.rows or shape[0])) * -(-shape[1] // (block.cols or shape[1]))
            count += 1
    return 4 * count


def _iteration(settings: Settings, chunks: list[Chunk], plans: Plans) -> Iterator[Traffic]:
    model = settings.model
    parameters = [parameter for chunk in chunks for parameter in of_chunk(model, chunk)]
    tp = model.tensor_model_parallel_size
    norms = sum(parameter.size for parameter in parameters if parameter.sequence)
    if model.sequence_parallel:
        yield Traffic("gradients of norms", "all-reduce", "tensor", tp, 4 * norms)
    tied = [parameter for parameter in parameters if parameter.tied]
    if model.pipeline_model_parallel_size > 1:
        for parameter in tied:
            yield Traffic("gradient of the tied embedding", "all-reduce", "embedding", 2, 4 * parameter.size)
    slots: dict[bool, int] = {}
    for parameter in parameters:
        if parameter.site is None:
            continue
        plan = plans.of(parameter.site, parameter.layer)
        apart = is_apart(model, parameter)
        slots[apart] = slots.get(apart, 0) + _slots(plan)
    if any(chunk.last for chunk in chunks):
        slots[False] = slots.get(False, 0) + _slots(plans.output)
    for apart, count in slots.items():
        ranks = settings.gpus // model.pipeline_model_parallel_size
        if apart:  # the ranks that hold the same experts, or parts of them
            ranks = group_size(settings, expert=True) * model.expert_tp
        if count:
            yield Traffic("amaxes of the iteration", "all-reduce", "amax", ranks, 4 * (2 * count + 1))


def _slots(plan: SitePlan) -> int:
    """Casts of a site that record: one a role, or two where its GEMMs want different ones."""
    count = 0
    for role, (one, other) in (
        ("input", ("fprop", "wgrad")),
        ("weight", ("fprop", "dgrad")),
        ("grad_output", ("dgrad", "wgrad")),
    ):
        casts = (plan.operands[one][role], plan.operands[other][role])
        count += (
            1 if casts[0] == casts[1] and casts[0] is not None else sum(cast is not None for cast in casts)
        )
    return count


# ---------------------------------------------------------------------------------------------------- once a microbatch


def _microbatch(settings: Settings, chunk: Chunk, plans: Plans) -> Iterator[Traffic]:
    model, tokens = settings.model, settings.tokens
    tp = model.tensor_model_parallel_size
    whole = model.activation_bytes * tokens * model.hidden_size
    again = _recomputed_layers(model, chunk)
    for layer in chunk.layers:
        for one in of_layer(settings, layer, plans):
            yield one * (2 if layer in again and one.what.endswith("forward") else 1)
    if chunk.first:
        # Where learned positions are added, tokens are summed on all ranks and split afterwards.
        split = model.sequence_parallel and model.position_embedding_type != "learned_absolute"
        yield Traffic("embedding", "reduce-scatter" if split else "all-reduce", "tensor", tp, whole)
        if model.sequence_parallel:
            yield Traffic("embedding", "all-gather", "tensor", tp, whole)
    if chunk.last:
        if plans.output.precision == "fp8":
            for one in _column(settings, plans, OUTPUT, None):
                yield replace(one, what="output layer")
        elif model.sequence_parallel:
            yield Traffic("output layer", "all-gather", "tensor", tp, 2 * whole, 2)
            yield Traffic("output layer", "reduce-scatter", "tensor", tp, whole)
        else:
            yield Traffic("output layer", "all-reduce", "tensor", tp, whole)
        yield Traffic("cross entropy", "all-reduce", "tensor", tp, 3 * 4 * tokens, 3)


def _recomputed_layers(model: Model, chunk: Chunk) -> range:
    """Layers whose forward runs twice."""
    if model.recompute_granularity != "full":
        return range(0)
    if model.recompute_method == "block":
        return chunk.layers[: model.recompute_num_layers or 1]
    return chunk.layers


def of_layer(settings: Settings, layer: int, plans: Plans) -> Iterator[Traffic]:
    """A layer's traffic for one microbatch, forward and backward."""
    model, tokens = settings.model, settings.tokens
    name = f"decoder.layers.{layer}."
    yield from _column(settings, plans, f"{name}self_attention.linear_qkv", layer)
    cp = model.context_parallel_size
    if cp > 1:
        keys = 2 * model.query_groups * model.channels // model.tensor_model_parallel_size
        size = model.activation_bytes * tokens * cp * keys
        yield Traffic("keys and values, forward", "all-gather", "context", cp, size)
        yield Traffic("keys and values, backward", "reduce-scatter", "context", cp, size)
    yield from _row(settings, plans, f"{name}self_attention.linear_proj", layer)
    if not model.has_experts(layer):
        yield from _column(settings, plans, f"{name}mlp.linear_fc1", layer)
        yield from _row(settings, plans, f"{name}mlp.linear_fc2", layer)
        return
    yield from _to_experts(settings)
    if model.moe_shared_expert_intermediate_size:
        yield from _column(settings, plans, f"{name}mlp.shared_experts.linear_fc1", layer)
        yield from _row(settings, plans, f"{name}mlp.shared_experts.linear_fc2", layer)


def _to_experts(settings: Settings) -> Iterator[Traffic]:
    """Each rank's tokens go to the ranks of their experts, with the router's weights, and come back; the gradients go the
    other way. What a rank gets depends on the routing: these are the bytes that it has to send, and the mean of the rest.
    """
    model = settings.model
    sharded = settings.tokens // model.token_share
    ep, etp = model.expert_model_parallel_size, model.expert_tp
    routed = sharded * model.moe_router_topk
    there, back = (
        routed * (model.activation_bytes * model.hidden_size + weight)
        for weight in (probability_bytes(model), 0)
    )
    counts = 8 * (model.num_moe_experts or 0) * ep * etp
    yield Traffic("tokens of each expert, forward", "all-gather", "expert", ep * etp, counts)
    for when in ("forward", "backward"):
        yield Traffic(f"tokens to experts, {when}", "all-to-all", "expert", ep, there + back, 3)
    if etp > 1:  # experts that are cut: their ranks work on the tokens of all of them
        spread: tuple[Call, Call] = ("all-gather", "reduce-scatter")
        for when, (first, second) in (("forward", spread), ("backward", spread[::-1])):
            yield Traffic(f"tokens of cut experts, {when}", first, "expert tensor", etp, there * etp, 2)
            yield Traffic(f"tokens of cut experts, {when}", second, "expert tensor", etp, back * etp)


def _column(settings: Settings, plans: Plans, site: str, layer: int | None) -> Iterator[Traffic]:
    """A linear that is cut by output features: its input is gathered, twice, and its gradient summed."""
    model, tokens = settings.model, settings.tokens
    tp, hidden = model.tensor_model_parallel_size, model.hidden_size
    whole = model.activation_bytes * tokens * hidden
    if not model.sequence_parallel:
        yield Traffic("gradients of activations, backward", "all-reduce", "tensor", tp, whole)
        return
    plan = plans.of(site, layer)
    rowwise, columnwise = two_rules(plan, "input", "fprop", "wgrad")
    kept = kept_rule(settings, plans, site, layer, tokens // tp)
    if rowwise is not None and aligned(rowwise, tokens // tp):
        codes = tokens * hidden + gathered_scales(rowwise, tokens, hidden)
        yield Traffic("activations, forward", "all-gather", "tensor", tp, codes, _calls(rowwise, False))
    else:
        yield Traffic("activations, forward", "all-gather", "tensor", tp, whole)
    if kept is not None:
        codes = tokens * hidden + gathered_scales(kept, tokens, hidden, by_column=True)
        yield Traffic("activations, backward", "all-gather", "tensor", tp, codes, _calls(kept, True))
    else:
        yield Traffic("activations, backward", "all-gather", "tensor", tp, whole)
    for rule in dict.fromkeys((rowwise, columnwise)):
        if rule is not None and aligned(rule, tokens // tp):
            sides = (rule is rowwise or rule == rowwise, rule == columnwise)
            yield from _shared_amaxes(rule, tokens // tp, hidden, sides, tp, "forward")
    yield Traffic("gradients of activations, backward", "reduce-scatter", "tensor", tp, whole)


def _row(settings: Settings, plans: Plans, site: str, layer: int) -> Iterator[Traffic]:
    """A linear that is cut by input features: its output is summed, and the gradient of that gathered."""
    model, tokens = settings.model, settings.tokens
    tp, hidden = model.tensor_model_parallel_size, model.hidden_size
    whole = model.activation_bytes * tokens * hidden
    if not model.sequence_parallel:
        yield Traffic("activations, forward", "all-reduce", "tensor", tp, whole)
        return
    yield Traffic("activations, forward", "reduce-scatter", "tensor", tp, whole)
    plan, shard = plans.of(site, layer), tokens // tp
    rules = two_rules(plan, "grad_output", "dgrad", "wgrad")
    if any(rule is None or not aligned(rule, shard) for rule in rules):
        yield Traffic("gradients of activations, backward", "all-gather", "tensor", tp, whole)
    rowwise, columnwise = (rule if rule is not None and aligned(rule, shard) else None for rule in rules)
    if rowwise is not None:
        codes = tokens * hidden + gathered_scales(rowwise, tokens, hidden)
        yield Traffic(
            "gradients of activations, backward", "all-gather", "tensor", tp, codes, _calls(rowwise, False)
        )
    serves_both = rowwise == columnwise and rowwise is not None and rowwise.granularity.symmetric
    if columnwise is not None and not serves_both:
        codes = tokens * hidden + gathered_scales(columnwise, tokens, hidden, by_column=True)
        yield Traffic(
            "gradients of activations, backward", "all-gather", "tensor", tp, codes, _calls(columnwise, True)
        )
    for rule in dict.fromkeys((rowwise, columnwise)):
        if rule is not None:
            yield from _shared_amaxes(
                rule, shard, hidden, (rule == rowwise, rule == columnwise), tp, "backward"
            )


def aligned(rule: Rule, tokens: int) -> bool:
    """Whether a shard of so many tokens holds whole blocks, so that its codes may be gathered."""
    granularity: Granularity = rule.granularity
    block = max(granularity.rows, granularity.cols)
    return granularity.is_tensor or granularity.cols == 0 or tokens % block == 0


def gathered_scales(rule: Rule, tokens: int, width: int, *, by_column: bool = False) -> int:
    """Bytes of the scales that travel beside the codes of [tokens, width]; none where the ranks share them."""
    if rule.granularity.is_tensor or (by_column and rule.granularity.cols == 0):
        return 0
    return side_scales(rule, width, tokens) if by_column else side_scales(rule, tokens, width)


def _calls(rule: Rule, by_column: bool) -> int:
    return 1 if rule.granularity.is_tensor or (by_column and rule.granularity.cols == 0) else 2


def _shared_amaxes(
    rule: Rule, tokens: int, width: int, sides: tuple[bool, bool], tp: int, when: str
) -> Iterator[Traffic]:
    """Amaxes that shards of tokens share before a cast: one a tensor (delayed scaling has them already), or of the
    columnwise side one a column."""
    granularity = rule.granularity
    if granularity.is_tensor:
        if not rule.delayed:
            yield Traffic(f"amaxes of shards, {when}", "all-reduce", "tensor", tp, 4)
    elif granularity.cols == 0 and sides[1]:
        yield Traffic(f"amaxes of shards, {when}", "all-reduce", "tensor", tp, 4 * width)
