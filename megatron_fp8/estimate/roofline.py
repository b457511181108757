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
from importlib import resources
from typing import Any

from ..files.strict_yaml import load_yaml
from ..numerics.formats import E2M1
from ..numerics.rule import Rule
from .communication import recomputed_layers, stage_traffic
from .config_reader import Settings
from .device import Device
from .fp8_weights import reads, two_rules
from .linear_communication import Traffic, runs_again
from .model import OUTPUT, Chunk, Layer
from .parameter_counts import projections

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
        found.append(Linear(layer.projection, None, 2 * hidden, hidden // tp, tokens))
    for one in projections(model):
        n, k = one.part(tp)
        found.append(Linear(f"{layer.name}{one.name}", number, k, n, tokens))

    def mlp(prefix: str, ffn: int, rows: int, count: int = 1) -> None:
        site, calls = f"{layer.name}mlp.{prefix}", 1 if model.moe_grouped_gemm else count
        found.append(Linear(f"{site}linear_fc1", number, hidden, model.gate * ffn, rows, count, calls))
        found.append(Linear(f"{site}linear_fc2", number, ffn, hidden, rows, count, calls))

    if not layer.experts:
        mlp("", model.ffn_hidden_size // tp, tokens)
        return found
    routed = tokens // model.token_share * model.moe_router_topk * model.expert_tp
    each = max(1, routed // model.local_experts)
    mlp("experts.local_experts.0.", model.moe_ffn_hidden_size // model.expert_tp, each, model.local_experts)
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


def _output_time(settings: Settings, device: Device) -> float:
    """Seconds of the output projection's GEMMs and casts for one microbatch."""
    linear, gemms = output_linear(settings), settings.plan(OUTPUT).reported_gemms
    seconds = sum(linear.flops / device.rate(gemms[gemm]) for gemm in _GEMMS)
    return seconds + sum(_quantization(settings, linear).values()) / device.casts


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
        fp8: whether it is planned in FP8 or FP4.
        precision: 'bf16', 'fp8' or 'fp4'.
        seconds: as planned, including quantization of operands it reads first.
        bf16: in BF16.
    """

    gemm: str
    fp8: bool
    precision: str
    seconds: float
    bf16: float


def gemm_times(settings: Settings, linear: Linear, device: Device) -> list[GemmTime]:
    """The three GEMMs of a linear for one microbatch; all microbatches share the weight's quantization."""
    plan, size = settings.plan(linear.site), settings.model.activation_bytes
    k, n, m = linear.k, linear.n, linear.tokens
    sizes = {"fprop": (m * k, n * k, m * n), "dgrad": (m * n, n * k, m * k), "wgrad": (m * n, m * k, n * k)}
    casts = _quantization(settings, linear)
    precisions, products = plan.reported_gemms, plan.products
    found = []
    for gemm in _GEMMS:
        first, second, out = (values * linear.count for values in sizes[gemm])
        result = out * (8 if gemm == "wgrad" else size)  # weight gradients are read and written in float32
        plain = max(linear.flops / device.bf16, (size * (first + second) + result) / device.bandwidth)
        precision, seconds = precisions[gemm], plain
        if precision != "bf16":
            codes = sum(
                values * _code_bytes(rule)
                for values, rule in zip((first, second), products[gemm], strict=True)
            )
            seconds = max(linear.flops / device.rate(precision), (codes + result) / device.bandwidth)
        seconds += casts[gemm] * linear.count / device.casts
        found.append(GemmTime(gemm, precision != "bf16", precision, seconds, plain))
    return found


def _code_bytes(rule: Rule | None) -> float:
    """Bytes of an element's code; scales are left out."""
    return 0.5 if rule is not None and rule.fmt is E2M1 else 1


def _quantization(settings: Settings, linear: Linear) -> Counter[str]:
    """Bytes that casts read and write, by the GEMM that first reads their codes."""
    plan, size = settings.plan(linear.site), settings.model.activation_bytes
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
            found[gemm] += int(values[role] * (size * reads(rule) + directions * _code_bytes(rule)) // share)
    return found


def elementwise_bytes(settings: Settings, layer: Layer) -> int:
    """Bytes moved by norms, residuals, rotary positions and the activation function, forward and backward."""
    model, size = settings.model, settings.model.activation_bytes
    sharded = settings.local_tokens
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
    heads = model.num_attention_heads + model.num_query_groups
    return 4 * settings.tokens * heads * model.kv_channels // model.tensor_model_parallel_size


def _latent_bytes(settings: Settings) -> int:
    """Values moved by norms of latents, rotation and assembly of heads."""
    model = settings.model
    latents = (model.q_lora_rank or 0) + model.kv_lora_rank if model.qk_layernorm else 0
    turned = (model.heads + 1) * model.qk_pos_emb_head_dim
    heads = model.heads * (2 * model.key_width + model.value_width)
    return (2 + 3) * settings.local_tokens * latents + 4 * settings.tokens * (turned + heads)


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


def of_stage_time(settings: Settings, chunks: list[Chunk], device: Device, optimizer_bytes: int) -> StageTime:
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
                for one in gemm_times(settings, linear, device):
                    gemms += one.seconds * (runs if one.gemm == "fprop" else 1)
            # Forward has two GEMMs, backward five, since it recomputes the scores.
            core = forwards + 2.5 + ("core_attn" in model.recomputed)
            attention += core * attention_flops(settings) / device.bf16
            elementwise += elementwise_bytes(settings, layer) / device.bandwidth
        if chunk.last:
            rows = model.padded_vocabulary // model.tensor_model_parallel_size
            logits = 16 * settings.tokens * rows  # in 16 and 32 bits, and their gradients
            output += model.predictions * (_output_time(settings, device) + logits / device.bandwidth)
    traffic = stage_traffic(settings, chunks)
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


def step_time(settings: Settings, device: Device, optimizer_bytes: dict[int, int]) -> StepTime:
    """The iteration's time; ``optimizer_bytes``: by stage."""
    chunks = settings.model.chunks()
    stages = {
        stage: of_stage_time(
            settings, [c for c in chunks if c.stage == stage], device, optimizer_bytes[stage]
        )
        for stage in range(settings.model.pipeline_model_parallel_size)
    }
    slowest = max(stages, key=lambda stage: stages[stage].microbatch)
    stage = stages[slowest]
    busy = settings.microbatches * stage.microbatch
    idle = busy * bubble(settings)
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


def bubble(settings: Settings) -> float:
    """Idle time of a pipeline stage relative to its busy time."""
    parts = settings.model.virtual_pipeline_model_parallel_size or 1
    return (settings.model.pipeline_model_parallel_size - 1) / (parts * settings.microbatches)


def calibration() -> dict[str, Any]:
    """Measured step times over estimates, by machine: date, machine, model, and the ratios by precision.

    `python -m benchmarks.roofline --write` measures and writes calibration.yaml. That roofline used the machine's own
    `megatron-fp8 bench` results, not a data sheet.
    """
    found: dict[str, Any] = load_yaml(resources.files(__package__).joinpath("calibration.yaml").read_bytes())
    return found
