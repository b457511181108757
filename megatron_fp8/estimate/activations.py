"""Bytes that one microbatch leaves on a rank for its backward pass, by kind and layer.

Each line here is a tensor that autograd keeps, found by looking at what a GPT of this package saves; where a tensor is a
view of a larger one, the larger one is what stays. tests/functional/test_estimate.py holds the sums to 2 % of what is
counted. Weights and their codes are no activations (state.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..numerics.rule import BLOCK_1X128, Rule
from .model import Chunk, Model
from .settings import Settings
from .sites import OUTPUT, Plans, side_scales

Bytes = Counter[str]
"""Kind -> bytes: 'norms', 'linear inputs', 'attention', 'activation function', 'dropout', 'layer inputs', 'routing' (of
experts), 'ends'."""

RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe_act", "moe", "shared_experts")
"""recompute_modules that an estimate is known for; the last three for experts."""


@dataclass(frozen=True)
class Device:
    """What differs between devices in what is saved: bytes of one value of a dropout mask."""

    mask: int = 1


CPU = Device(mask=2)
GPU = Device()


def of_chunk(settings: Settings, chunk: Chunk, plans: Plans, device: Device = GPU) -> Bytes:
    """What one microbatch leaves of a whole chunk until its backward pass."""
    model, found = settings.model, Bytes()
    layers = [of_layer(settings, layer, plans, device) for layer in chunk.layers]
    for layer in _kept_after_recompute(settings, layers):
        found += layer
    tokens, tp = settings.tokens, model.tensor_model_parallel_size
    if chunk.first:
        ids = 8 * tokens * (2 if model.position_embedding_type == "learned_absolute" else 1)
        found["ends"] += ids + (tokens if tp > 1 else 0)
        found["dropout"] += _dropout(settings, device)
    if chunk.last:
        found += _norm(settings, tokens // model.token_share)
        found["ends"] += _input(settings, plans, OUTPUT, None, model.hidden_size, tokens // model.token_share)
        # Of the cross entropy: float32 exponentials, the mask and the ids of the targets.
        found["ends"] += 4 * tokens * (model.padded_vocabulary // tp) + 9 * tokens
    return found


def _kept_after_recompute(settings: Settings, layers: list[Bytes]) -> list[Bytes]:
    model = settings.model
    if model.recompute_granularity != "full" or not layers:
        return layers
    share = model.token_share
    if model.distribute_saved_activations:
        share = model.tensor_model_parallel_size
    hidden = Bytes({"layer inputs": model.activation_bytes * settings.tokens // share * model.hidden_size})
    positions = Bytes()
    if (
        model.position_embedding_type == "rope"
    ):  # angles, float32: one tensor, which every recomputation keeps
        positions["layer inputs"] = 4 * settings.tokens // settings.train.micro_batch_size * model.channels
    count = model.recompute_num_layers or 1
    if model.recompute_method == "block":
        return [*(hidden for _ in layers[:count]), *layers[count:], positions]
    return [*(hidden for _ in layers[::count]), positions]


def working_set(settings: Settings, chunk: Chunk, plans: Plans, device: Device = GPU) -> int:
    """Bytes that recomputation brings back at once: the layers between two kept inputs."""
    model = settings.model
    if model.recompute_granularity != "full" or not len(chunk.layers):
        return 0
    sizes = [of_layer(settings, layer, plans, device).total() for layer in chunk.layers]
    count = 1 if model.recompute_method == "block" else model.recompute_num_layers or 1
    return max(sum(sizes[at : at + count]) for at in range(0, len(sizes), count))


def of_layer(settings: Settings, layer: int, plans: Plans, device: Device = GPU) -> Bytes:
    """What one microbatch leaves of a layer that is not recomputed as a whole."""
    model = settings.model
    recomputed = _recomputed(model)
    sharded = settings.tokens // model.token_share
    found = Bytes()
    name = f"decoder.layers.{layer}."
    found += _norm(settings, sharded)
    found += _attention(settings, layer, plans, recomputed, device)
    found["dropout"] += 2 * _dropout(settings, device)
    found += _norm(settings, sharded)
    if model.has_experts(layer):
        return found + _experts(settings, layer, plans, recomputed)
    found += _mlp(
        settings,
        f"{name}mlp.",
        layer,
        plans,
        tokens_in=sharded,
        tokens=settings.tokens,
        ffn=model.ffn // model.tensor_model_parallel_size,
        recomputed="mlp" in recomputed,
    )
    if "layernorm" in recomputed:
        # The norms' results are made again, and the linears keep no codes of them (save_original_input).
        norms = {"self_attention.linear_qkv": model.hidden_size}
        if "mlp" not in recomputed:
            norms["mlp.linear_fc1"] = model.hidden_size
        for site, width in norms.items():
            found["linear inputs"] -= _input(settings, plans, f"{name}{site}", layer, width, sharded)
    return found


def _recomputed(model: Model) -> frozenset[str]:
    if model.recompute_granularity != "selective":
        return frozenset()
    modules = frozenset(model.recompute_modules or ["core_attn"])
    for module in modules - set(RECOMPUTED):
        raise ValueError(
            f"model.recompute_modules: no estimate is known for {module!r}; it is for {', '.join(RECOMPUTED)}."
        )
    return modules


def _norm(settings: Settings, tokens: int) -> Bytes:
    """Its input, and one number a row in float32 (RMSNorm), or two (LayerNorm; on CPUs in 16 bits)."""
    model = settings.model
    each = 4 if model.normalization == "RMSNorm" else 8
    return Bytes({"norms": tokens * (model.activation_bytes * model.hidden_size + each)})


def _dropout(settings: Settings, device: Device) -> int:
    model = settings.model
    if not model.hidden_dropout:
        return 0
    return device.mask * settings.tokens // model.token_share * model.hidden_size


def _input(settings: Settings, plans: Plans, site: str, layer: int | None, k: int, tokens: int) -> int:
    """wgrad's operand [k, tokens]: codes and scales, or values."""
    rule = kept_rule(settings, plans, site, layer, tokens)
    if rule is None:
        return settings.model.activation_bytes * k * tokens
    return k * tokens + side_scales(rule, k, tokens)


def kept_rule(settings: Settings, plans: Plans, site: str, layer: int | None, tokens: int) -> Rule | None:
    """How a linear's input is quantised that it keeps for wgrad; None where it keeps the values."""
    model = settings.model
    plan = plans.of(site, layer)
    cast = plan.operands["wgrad"]["input"]
    if plan.precision == "bf16" or cast is None:
        return None
    gathers = model.sequence_parallel and gathers_input(site)
    block = max(cast.rule.granularity.rows, cast.rule.granularity.cols)
    whole = cast.rule.granularity.is_tensor or not cast.rule.granularity.cols or tokens % block == 0
    return cast.rule if whole or not gathers else None


def gathers_input(site: str) -> bool:
    """Whether sequence parallelism gathers this linear's input."""
    return site.endswith(("linear_qkv", "linear_fc1", OUTPUT)) and ".experts." not in site


def _attention(
    settings: Settings, layer: int, plans: Plans, recomputed: frozenset[str], device: Device
) -> Bytes:
    model, size = settings.model, settings.model.activation_bytes
    tp, cp, tokens = model.tensor_model_parallel_size, model.context_parallel_size, settings.tokens
    sharded = tokens // model.token_share
    prefix = f"decoder.layers.{layer}.self_attention."
    found = Bytes()
    found["linear inputs"] += _input(
        settings, plans, f"{prefix}linear_qkv", layer, model.hidden_size, sharded
    )
    width = model.num_attention_heads * model.channels // tp
    groups = model.query_groups * model.channels // tp
    rope = model.position_embedding_type == "rope"
    mixed, query, keys = tokens * (width + 2 * groups), tokens * width, tokens * groups
    # Several groups of queries lie between their keys and values: heads of one size are a copy.
    copied = tokens * width * (1 < model.query_groups // tp < model.num_attention_heads // tp)
    if model.qk_layernorm:
        found["norms"] += size * copied
        heads = (model.num_attention_heads + model.query_groups) // tp
        found["norms"] += tokens * heads * (4 if model.normalization == "RMSNorm" else 8)
    if rope:
        # Queries and keys turned, values as a part of all three; cosines and sines, of each in each layer.
        positions = tokens // settings.train.micro_batch_size
        found["attention"] += size * (query + 4 * positions * model.channels)
        found["attention"] += size * (mixed + keys if cp == 1 else 0)
    else:
        found["attention"] += size * (mixed + (query + keys if model.qk_layernorm else copied))
    if cp > 1:
        found["attention"] += size * 2 * keys * cp  # keys and values of the whole sequence
    if "core_attn" not in recomputed:
        found["attention"] += 4 * tokens * model.num_attention_heads // tp  # a row's log of the sum
        plain = kept_rule(settings, plans, f"{prefix}linear_proj", layer, tokens) is None
        if not plain or cp > 1:  # a projection that keeps values keeps these very ones
            found["attention"] += size * query
        if model.attention_dropout:
            heads, batch = model.num_attention_heads // tp, settings.train.micro_batch_size
            scores = heads * batch * (tokens // batch) ** 2
            found["attention"] += scores * (2 * size + device.mask)
    found["linear inputs"] += _input(settings, plans, f"{prefix}linear_proj", layer, width, tokens)
    return found


def _mlp(
    settings: Settings,
    prefix: str,
    layer: int,
    plans: Plans,
    *,
    tokens_in: int,
    tokens: int,
    ffn: int,
    recomputed: bool = False,
    act_recomputed: bool = False,
    expert: bool = False,
) -> Bytes:
    """Of an MLP with ``ffn`` columns on this rank; ``tokens_in`` are those of its input."""
    model, size = settings.model, settings.model.activation_bytes
    found = Bytes()
    if recomputed:
        found["layer inputs"] += size * tokens_in * model.hidden_size
        return found
    found["linear inputs"] += _input(
        settings, plans, f"{prefix}linear_fc1", layer, model.hidden_size, tokens_in
    )
    found["activation function"] += size * tokens * ffn * model.gate
    if not act_recomputed:
        found["linear inputs"] += _input(settings, plans, f"{prefix}linear_fc2", layer, ffn, tokens)
        if model.gated_linear_unit:
            found["activation function"] += _gated_extra(model, tokens, ffn)
    return found


def _gated_extra(model: Model, tokens: int, ffn: int) -> int:
    """What a gated activation keeps beside its input, or in its place: unfused, both of its factors."""
    size = model.activation_bytes
    if not model.bias_activation_fusion:
        return 2 * size * tokens * ffn
    if model.activation_func_fp8_input_store:
        wide = 2 * ffn
        return tokens * wide + 4 * tokens * -(-wide // BLOCK_1X128.cols) - size * tokens * wide
    return 0


def probability_bytes(model: Model) -> int:
    """Of a router's weight: as activations are, unless moe_router_dtype says otherwise."""
    return {"fp32": 4, "fp64": 8}.get(model.moe_router_dtype or "", model.activation_bytes)


def _padded(model: Model, tokens: int) -> int:
    """Rows of an expert, which Megatron-Core fills up with zeros where FP8 is on and experts run one by one."""
    multiple = (32 if model.fp8_recipe == "mxfp8" else 16) if model.fp8 and not model.moe_grouped_gemm else 1
    return -(-tokens // multiple) * multiple


def _routing(settings: Settings, tokens: int) -> Bytes:
    """What choosing and permuting ``tokens`` keeps: the router's input, probabilities, and int64 indices."""
    model = settings.model
    experts, each = model.num_moe_experts or 0, probability_bytes(model)
    # top-k: its indices and a float32 softmax; a mask and probabilities of all experts; the order of the tokens sent.
    chosen = model.moe_router_topk * (8 + 4 + 8)
    return Bytes(
        {
            "linear inputs": model.activation_bytes * tokens * model.hidden_size,
            "routing": tokens * (chosen + experts * (1 + each)),
        }
    )


def _experts(settings: Settings, layer: int, plans: Plans, recomputed: frozenset[str]) -> Bytes:
    """Of a mixture of experts under balanced routing: copies of tokens at their experts, and what those keep."""
    model, size = settings.model, settings.model.activation_bytes
    found = Bytes()
    sharded = settings.tokens // model.token_share
    name = f"decoder.layers.{layer}.mlp."
    if "moe" in recomputed:
        found["layer inputs"] += size * sharded * model.hidden_size
        return found
    found += _routing(settings, sharded)
    shared = f"{name}shared_experts."
    keeps = model.moe_shared_expert_intermediate_size and "shared_experts" not in recomputed
    if keeps and kept_rule(settings, plans, f"{shared}linear_fc1", layer, sharded) is None:
        found["linear inputs"] -= (
            size * sharded * model.hidden_size
        )  # values, which are the router's input too
    ffn = model.expert_ffn // model.expert_tp
    each = _padded(model, sharded * model.moe_router_topk * model.expert_model_parallel_size * model.expert_tp
                   // (model.num_moe_experts or 1))  # fmt: skip
    for expert in range(model.local_experts):
        found += _mlp(
            settings,
            f"{name}experts.local_experts.{expert}.",
            layer,
            plans,
            tokens_in=each,
            tokens=each,
            ffn=ffn,
            act_recomputed="moe_act" in recomputed,
        )
        # Each token's result is multiplied by the router's weight before the second linear.
        found["routing"] += probability_bytes(model) * each
        if not model.bias_activation_fusion and "moe_act" not in recomputed:
            found["activation function"] += size * each * ffn
    if model.moe_shared_expert_intermediate_size:
        found += _mlp(
            settings,
            shared,
            layer,
            plans,
            tokens_in=sharded,
            tokens=settings.tokens,
            ffn=model.moe_shared_expert_intermediate_size // model.tensor_model_parallel_size,
            recomputed="shared_experts" in recomputed,
        )
    return found
