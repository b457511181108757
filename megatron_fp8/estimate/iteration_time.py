"""Iteration time at the device's peaks: a roofline estimate.

Each operation takes its FLOPs at the peak rate or its bytes at the peak bandwidth, whichever is longer.
Inefficiencies (kernels, launches, waiting) are ignored, so the result is a lower bound. The ratio of FP8 to
BF16 is a quotient of two bounds: with a CPU's own bench results it had the wrong sign (docs/estimates.md).
Collectives inside a layer are assumed not to overlap with computation; those of gradients and parameters
overlap with backward and forward if the settings say so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .attention import projections
from .communication import of_stage, recomputed_layers
from .communication_linear import Traffic
from .model import Chunk, Layer
from .peaks import Device
from .pipeline import bubble
from .saved_tensors import recomputed_modules, runs_again
from .settings import Settings
from .sites import OUTPUT, Plans, reads, two_rules

_GEMMS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Linear:
    """A GEMM site on one rank: y [tokens, n] = x [tokens, k] w^T, ``count`` times in its layer (experts).

    ``calls``: calls of each of its GEMMs per microbatch; with moe_grouped_gemm one for all experts.
    """

    site: str
    layer: int | None
    k: int
    n: int
    tokens: int
    count: int = 1
    calls: int = 1

    @property
    def flops(self) -> int:
        """FLOPs of one of its three GEMMs."""
        return 2 * self.k * self.n * self.tokens * self.count


def linears(settings: Settings, layer: Layer) -> list[Linear]:
    """The GEMM sites of a layer; one entry stands for all experts of a rank."""
    model, tokens, tp = settings.model, settings.tokens, settings.model.tensor_model_parallel_size
    hidden, number, found = model.hidden_size, layer.number, []
    if number is None:
        site = f"{layer.name.removesuffix('transformer_layer.')}eh_proj"
        found.append(Linear(site, None, 2 * hidden, hidden // tp, tokens))
    for one in projections(model):
        n, k = one.part(tp)
        found.append(Linear(f"{layer.name}{one.name}", number, k, n, tokens))

    def mlp(prefix: str, ffn: int, rows: int, count: int = 1) -> None:
        site, calls = f"{layer.name}mlp.{prefix}", 1 if model.moe_grouped_gemm else count
        found.append(Linear(f"{site}linear_fc1", number, hidden, model.gate * ffn, rows, count, calls))
        found.append(Linear(f"{site}linear_fc2", number, ffn, hidden, rows, count, calls))

    if not layer.experts:
        mlp("", model.ffn // tp, tokens)
        return found
    routed = tokens // model.token_share * model.moe_router_topk * model.expert_tp
    each = max(1, routed // model.local_experts)
    mlp("experts.local_experts.0.", model.expert_ffn // model.expert_tp, each, model.local_experts)
    if model.moe_shared_expert_intermediate_size:
        mlp("shared_experts.", model.moe_shared_expert_intermediate_size // tp, tokens)
    return found


def output_linear(settings: Settings) -> Linear:
    """The output projection, which belongs to no layer."""
    model = settings.model
    rows = model.padded_vocabulary // model.tensor_model_parallel_size
    return Linear(OUTPUT, None, model.hidden_size, rows, settings.tokens)


def attention_flops(settings: Settings) -> int:
    """FLOPs of the two causal core-attention GEMMs of a layer, forward, for one microbatch on a rank."""
    model = settings.model
    width = model.heads * (model.key_width + model.value_width)
    return settings.tokens * settings.train.seq_length * width  # 2 s^2 each, half of it masked


def _output_time(settings: Settings, plans: Plans, device: Device) -> float:
    """Seconds of the output projection's GEMMs and casts for one microbatch."""
    linear, gemms = output_linear(settings), plans.output.gemms
    seconds = sum(linear.flops / (device.fp8 if gemms[gemm] == "fp8" else device.bf16) for gemm in _GEMMS)
    return seconds + sum(_quantisation(settings, linear, plans).values()) / device.casts


def model_flops(settings: Settings) -> int:
    """FLOPs of an iteration over all ranks, forward and backward without recomputation: the basis of MFU."""
    model = settings.model
    layers = sum(
        3 * sum(linear.flops for linear in linears(settings, layer)) + 3 * attention_flops(settings)
        for layer in (*model.layers, *model.predicting)
    )
    tp, cp = model.tensor_model_parallel_size, model.context_parallel_size
    replicas = settings.data_parallel * settings.microbatches
    output = 3 * output_linear(settings).flops * model.predictions
    return (layers + output) * tp * cp * replicas


@dataclass(frozen=True)
class GemmTime:
    """Roofline of one GEMM of a linear, in seconds.

    Attributes:
        gemm: 'fprop', 'dgrad' or 'wgrad'.
        fp8: whether it is planned in FP8.
        seconds: as planned, including quantisation of operands it reads first.
        bf16: in BF16.
    """

    gemm: str
    fp8: bool
    seconds: float
    bf16: float


def gemm_times(settings: Settings, linear: Linear, plans: Plans, device: Device) -> list[GemmTime]:
    """The three GEMMs of a linear for one microbatch; all microbatches share the weight's quantisation."""
    plan, size = plans.of(linear.site, linear.layer), settings.model.activation_bytes
    k, n, m = linear.k, linear.n, linear.tokens
    sizes = {"fprop": (m * k, n * k, m * n), "dgrad": (m * n, n * k, m * k), "wgrad": (m * n, m * k, n * k)}
    casts = _quantisation(settings, linear, plans)
    found = []
    for gemm in _GEMMS:
        first, second, out = (values * linear.count for values in sizes[gemm])
        result = out * (8 if gemm == "wgrad" else size)  # weight gradients are read and written in float32
        plain = max(linear.flops / device.bf16, (size * (first + second) + result) / device.bandwidth)
        fp8 = plan.gemms[gemm] == "fp8"
        seconds = plain
        if fp8:
            seconds = max(linear.flops / device.fp8, (first + second + result) / device.bandwidth)
        seconds += casts[gemm] * linear.count / device.casts
        found.append(GemmTime(gemm, fp8, seconds, plain))
    return found


def _quantisation(settings: Settings, linear: Linear, plans: Plans) -> Counter[str]:
    """Bytes that casts read and write, by the GEMM that first reads their codes."""
    plan, size = plans.of(linear.site, linear.layer), settings.model.activation_bytes
    values = {
        "input": linear.tokens * linear.k,
        "weight": linear.n * linear.k,
        "grad_output": linear.tokens * linear.n,
    }
    readers = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
    found: Counter[str] = Counter()
    for role, (one, other) in readers.items():
        rules = two_rules(plan, role, one, other)
        share = settings.microbatches if role == "weight" else 1
        same_rule = rules[0] is not None and rules[0] == rules[1]
        for gemm, rule in zip((one, other), rules, strict=True):
            if rule is None or (gemm == other and same_rule):
                continue
            directions = 2 if same_rule else 1
            found[gemm] += values[role] * (size * reads(rule) + directions) // share
    return found


def elementwise_bytes(settings: Settings, layer: Layer) -> int:
    """Bytes moved by norms, residuals, rotary positions and the activation function, forward and backward."""
    model, size = settings.model, settings.model.activation_bytes
    sharded = settings.tokens // model.token_share
    norms = 2 * (2 + 3) * sharded * model.hidden_size  # x, y; x, dy, dx
    residuals = 2 * (3 + 2) * sharded * model.hidden_size
    attention = _latent_bytes(settings) if model.multi_latent_attention else _rotary_bytes(settings)
    joined = (
        (3 * (2 + 3) + 2 * 4) * sharded * model.hidden_size if layer.number is None else 0
    )  # three norms and a concatenation
    ffn = sum(linear.k * linear.tokens * linear.count for linear in linears(settings, layer)
              if linear.site.endswith("linear_fc2"))  # fmt: skip
    activation = ffn * (model.gate + 1 + 2 * model.gate + 1)
    return size * (norms + residuals + attention + joined + activation)


def _rotary_bytes(settings: Settings) -> int:
    """Values moved by rotating queries and keys."""
    model = settings.model
    if model.position_embedding_type != "rope":
        return 0
    heads = model.num_attention_heads + model.query_groups
    return 4 * settings.tokens * heads * model.channels // model.tensor_model_parallel_size


def _latent_bytes(settings: Settings) -> int:
    """Values moved by norms of latents, rotation and assembly of heads."""
    model = settings.model
    latents = (model.q_lora_rank or 0) + model.kv_lora_rank if model.qk_layernorm else 0
    turned = (model.heads + 1) * model.qk_pos_emb_head_dim
    heads = model.heads * (2 * model.key_width + model.value_width)
    return (2 + 3) * settings.tokens // model.token_share * latents + 4 * settings.tokens * (turned + heads)


@dataclass(frozen=True)
class StageTime:
    """Seconds of a pipeline stage: per microbatch by type, and per iteration.

    Attributes:
        gemms, attention, elementwise, output, exchange: per microbatch, for forward, backward and
            recomputation.
        reduced: gradient and parameter collectives of an iteration that are not overlapped.
        optimizer: the optimizer's step.
    """

    gemms: float
    attention: float
    elementwise: float
    output: float
    exchange: float
    reduced: float
    optimizer: float

    @property
    def microbatch(self) -> float:
        """Seconds of one microbatch."""
        return self.gemms + self.attention + self.elementwise + self.output + self.exchange


def of_stage_time(
    settings: Settings, chunks: list[Chunk], plans: Plans, device: Device, optimizer_bytes: int
) -> StageTime:
    """The roofline of one stage.

    Args:
        optimizer_bytes: bytes that the optimizer's step reads and writes.
    """
    model = settings.model
    gemms = attention = elementwise = output = 0.0
    for chunk in chunks:
        again = recomputed_layers(model, chunk)
        for layer in chunk.every:
            forwards = 1 + (layer in again)
            for linear in linears(settings, layer):
                runs = forwards + runs_again(model, linear.site)
                for one in gemm_times(settings, linear, plans, device):
                    gemms += one.seconds * (runs if one.gemm == "fprop" else 1)
            # Forward has two GEMMs, backward five, since it recomputes the scores.
            core = forwards + 2.5 + ("core_attn" in recomputed_modules(model))
            attention += core * attention_flops(settings) / device.bf16
            elementwise += elementwise_bytes(settings, layer) / device.bandwidth
        if chunk.last:
            rows = model.padded_vocabulary // model.tensor_model_parallel_size
            logits = 16 * settings.tokens * rows  # in 16 and 32 bits, and their gradients
            output += model.predictions * (_output_time(settings, plans, device) + logits / device.bandwidth)
    traffic = of_stage(settings, chunks, plans)
    inside = sum(exchange_time(settings, one, device) for one in traffic if _stops_work(one))
    outside = sum(exchange_time(settings, one, device) for one in traffic if not _stops_work(one))
    exchange = inside / settings.microbatches
    last = gemms + attention + elementwise + output + exchange
    if settings.optimizer.overlap_grad_reduce:
        outside = max(0.0, outside - last * 2 / 3)  # overlaps with the last microbatch's backward
    return StageTime(
        gemms, attention, elementwise, output, exchange, outside, optimizer_bytes / device.bandwidth
    )


_INSIDE = ("tensor", "context", "tensor and context", "expert", "expert tensor", "pipeline")


def _stops_work(traffic: Traffic) -> bool:
    return traffic.axis in _INSIDE and traffic.what != "gradients of norms"


def exchange_time(settings: Settings, traffic: Traffic, device: Device) -> float:
    """Seconds of one kind of exchange: bytes sent per rank over the rate of its group's links."""
    model = settings.model
    tp = model.tensor_model_parallel_size
    # Megatron-Core's rank order: tensor, context, (expert,) data, pipeline.
    apart = {"tensor": 1, "expert tensor": 1, "context": tp, "expert": model.expert_tp, "data": tp,
             "expert data": model.expert_tp * model.expert_model_parallel_size, "amax": 1,
             "tensor and context": 1, "tensor and data": 1}  # fmt: skip
    distance = apart.get(traffic.axis, settings.gpus // model.pipeline_model_parallel_size)
    return traffic.sent / device.between(traffic.ranks, distance)


@dataclass(frozen=True)
class StepTime:
    """Roofline of an iteration.

    Attributes:
        seconds: the whole iteration.
        slowest: the slowest stage, whose parts are in ``stage``.
        bubble: seconds in which stages wait for each other.
        flops: FLOPs of the model, over all ranks.
        mfu: flops relative to all ranks' BF16 peak over that time.
        tokens_per_second: over all ranks.
    """

    seconds: float
    slowest: int
    stage: StageTime
    bubble: float
    flops: int
    mfu: float
    tokens_per_second: float


def step_time(settings: Settings, plans: Plans, device: Device, optimizer_bytes: dict[int, int]) -> StepTime:
    """The iteration's time; ``optimizer_bytes``: by stage."""
    chunks = settings.model.chunks()
    stages = {
        stage: of_stage_time(
            settings, [c for c in chunks if c.stage == stage], plans, device, optimizer_bytes[stage]
        )
        for stage in range(settings.model.pipeline_model_parallel_size)
    }
    slowest = max(stages, key=lambda stage: stages[stage].microbatch)
    stage = stages[slowest]
    busy = settings.microbatches * stage.microbatch
    idle = busy * bubble(settings.model, settings.microbatches)
    rest = max(one.reduced + one.optimizer for one in stages.values())
    seconds = busy + idle + rest
    flops = model_flops(settings)
    tokens = settings.train.global_batch_size * settings.train.seq_length
    return StepTime(
        seconds,
        slowest,
        stage,
        idle,
        flops,
        flops / (seconds * settings.gpus * device.bf16),
        tokens / seconds,
    )
