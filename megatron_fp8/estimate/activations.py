"""Activation memory of one microbatch, by kind and layer.

Each term is a tensor that autograd saves, found by inspecting a GPT of this package. If a tensor is a view,
the larger base tensor counts. tests/functional/test_estimate.py checks the sums to within 2 % of measured
values. Weights and their codes are not activations (model_state_bytes.py).
"""

from __future__ import annotations

from ..fp8_utils import get_fp8_align_size
from ..numerics.rule import BLOCK_1X128
from .model import Chunk, Layer, Model
from .saved_attention import of_attention
from .saved_tensors import GPU, Bytes, Device, dropout, kept_rule, linear_input, norm, recomputed_modules
from .settings import Settings
from .sites import OUTPUT, Plans


def of_chunk(settings: Settings, chunk: Chunk, plans: Plans, device: Device = GPU) -> Bytes:
    """Bytes that one microbatch saves in a chunk until its backward pass."""
    model, found = settings.model, Bytes()
    layers = [of_layer(settings, layer, plans, device) for layer in chunk.layers]
    found += sum(_after_recompute(settings, layers), Bytes())
    tokens, tp = settings.tokens, model.tensor_model_parallel_size
    if chunk.first:
        found += _embedding(settings, device)
    if chunk.last:
        sharded = tokens // model.token_share
        found += norm(settings, sharded)
        for layer in chunk.predicting:
            found += _prediction(settings, layer, plans, device)
        for _ in range(model.predictions):
            found["ends"] += linear_input(settings, plans, OUTPUT, None, model.hidden_size, sharded)
            # Cross entropy: float32 exponentials, the mask and the ids of the targets.
            found["ends"] += 4 * tokens * (model.padded_vocabulary // tp) + 9 * tokens
    return found


def _embedding(settings: Settings, device: Device) -> Bytes:
    model, tokens = settings.model, settings.tokens
    ids = 8 * tokens * (2 if model.position_embedding_type == "learned_absolute" else 1)
    masked = tokens if model.tensor_model_parallel_size > 1 else 0
    return Bytes({"ends": ids + masked, "dropout": dropout(settings, device)})


def _prediction(settings: Settings, layer: Layer, plans: Plans, device: Device) -> Bytes:
    """One depth of multi-token prediction: two norms and their projection, a layer, a norm."""
    model = settings.model
    sharded, hidden = settings.tokens // model.token_share, model.hidden_size
    found = _embedding(settings, device)
    found["ends"] += (4 + 8) * settings.tokens  # its loss and loss mask
    if model.recompute_granularity == "full" and model.recompute_method == "uniform":
        found["layer inputs"] += 2 * model.activation_bytes * sharded * hidden
        return found
    found += norm(settings, sharded) + norm(settings, sharded) + norm(settings, sharded)
    site = f"{layer.name.removesuffix('transformer_layer.')}eh_proj"
    found["linear inputs"] += linear_input(settings, plans, site, None, 2 * hidden, sharded)
    # The layer's first norm saves a slice of the gathered tensor, and so the whole tensor.
    found["norms"] += model.activation_bytes * (settings.tokens - sharded) * hidden
    return found + of_layer(settings, layer, plans, device)


def _after_recompute(settings: Settings, layers: list[Bytes]) -> list[Bytes]:
    model = settings.model
    if model.recompute_granularity != "full" or not layers:
        return layers
    share = model.token_share
    if model.distribute_saved_activations:
        share = model.tensor_model_parallel_size
    hidden = Bytes({"layer inputs": model.activation_bytes * settings.tokens // share * model.hidden_size})
    positions = Bytes()
    if model.position_embedding_type == "rope" and not model.multi_latent_attention:
        # angles, float32: one tensor, shared by all recomputations
        positions["layer inputs"] = 4 * settings.tokens // settings.train.micro_batch_size * model.channels
    count = model.recompute_num_layers or 1
    if model.recompute_method == "block":
        return [*(hidden for _ in layers[:count]), *layers[count:], positions]
    return [*(hidden for _ in layers[::count]), positions]


def working_set(settings: Settings, chunk: Chunk, plans: Plans, device: Device = GPU) -> int:
    """Bytes that recomputation needs at once: the layers between two saved inputs."""
    model = settings.model
    if model.recompute_granularity != "full" or not chunk.layers:
        return 0
    sizes = [of_layer(settings, layer, plans, device).total() for layer in chunk.layers]
    count = 1 if model.recompute_method == "block" else model.recompute_num_layers or 1
    return max(sum(sizes[at : at + count]) for at in range(0, len(sizes), count))


def of_layer(settings: Settings, layer: Layer, plans: Plans, device: Device = GPU) -> Bytes:
    """Bytes that one microbatch saves in a layer that is not fully recomputed."""
    model = settings.model
    recomputed = recomputed_modules(model)
    sharded = settings.tokens // model.token_share
    found = norm(settings, sharded) + of_attention(settings, layer, plans, recomputed, device)
    found["dropout"] += 2 * dropout(settings, device)
    found += norm(settings, sharded)
    if layer.experts:
        return found + _experts(settings, layer, plans, recomputed)
    found += _mlp(
        settings,
        f"{layer.name}mlp.",
        layer.number,
        plans,
        tokens_in=sharded,
        tokens=settings.tokens,
        ffn=model.ffn // model.tensor_model_parallel_size,
        recomputed="mlp" in recomputed,
    )
    if "layernorm" in recomputed and "mlp" not in recomputed:
        # The norm's result is recomputed, and the linear saves no codes of it (save_original_input).
        site = f"{layer.name}mlp.linear_fc1"
        found["linear inputs"] -= linear_input(
            settings, plans, site, layer.number, model.hidden_size, sharded
        )
    return found


def _mlp(
    settings: Settings,
    prefix: str,
    layer: int | None,
    plans: Plans,
    *,
    tokens_in: int,
    tokens: int,
    ffn: int,
    recomputed: bool = False,
    act_recomputed: bool = False,
    expert: bool = False,
) -> Bytes:
    """An MLP with ``ffn`` columns on this rank; ``tokens_in``: tokens of its input."""
    model, size = settings.model, settings.model.activation_bytes
    found = Bytes()
    if recomputed:
        found["layer inputs"] += size * tokens_in * model.hidden_size
        return found
    found["linear inputs"] += linear_input(
        settings, plans, f"{prefix}linear_fc1", layer, model.hidden_size, tokens_in
    )
    found["activation function"] += size * tokens * ffn * model.gate
    if not act_recomputed:
        found["linear inputs"] += linear_input(settings, plans, f"{prefix}linear_fc2", layer, ffn, tokens)
        if model.gated_linear_unit:
            found["activation function"] += _gated_extra(model, tokens, ffn)
    return found


def _gated_extra(model: Model, tokens: int, ffn: int) -> int:
    """Additional bytes of a gated activation besides its input: unfused, it saves both factors."""
    size = model.activation_bytes
    if not model.bias_activation_fusion:
        return 2 * size * tokens * ffn
    if model.activation_func_fp8_input_store:
        wide = 2 * ffn
        return tokens * wide + 4 * tokens * -(-wide // BLOCK_1X128.cols) - size * tokens * wide
    return 0


def probability_bytes(model: Model) -> int:
    """Bytes of a router weight: those of activations, unless moe_router_dtype is set."""
    return {"fp32": 4, "fp64": 8}.get(model.moe_router_dtype or "", model.activation_bytes)


def _padded_rows(model: Model, tokens: int) -> int:
    """Rows of an expert; Megatron-Core pads them with zeros if FP8 is on and experts run one by one."""
    multiple = get_fp8_align_size(model.fp8_recipe) if model.fp8 and not model.moe_grouped_gemm else 1
    return -(-tokens // multiple) * multiple


def _routing(settings: Settings, tokens: int) -> Bytes:
    """Bytes saved by routing and permuting ``tokens``: the router's input, scores and probabilities, and int64
    indices."""
    model = settings.model
    experts, topk, each = model.num_moe_experts or 0, model.moe_router_topk, probability_bytes(model)
    # top-k: indices, chosen scores in float32, order of the sent tokens; mask and probabilities over all experts.
    saved = topk * (8 + 4 + 8) + experts * (1 + each)
    sigmoid = model.moe_router_score_function == "sigmoid"
    if sigmoid or model.moe_router_pre_softmax:
        saved += 4 * experts
    if sigmoid:
        saved += 4  # sum of scores per token
    if model.moe_router_group_topk and model.moe_router_num_groups:
        chosen = topk // model.moe_router_group_topk  # per group
        saved += 8 * (model.moe_router_num_groups * chosen + model.moe_router_group_topk) + experts
    if model.balancing_losses:  # their own scores and choices
        saved += (each * experts + 4 if sigmoid else 4 * experts) + 8 * topk
    if model.moe_z_loss_coeff is not None:
        saved += each * experts + 8
    return Bytes(
        {"linear inputs": model.activation_bytes * tokens * model.hidden_size, "routing": tokens * saved}
    )


def _experts(settings: Settings, layer: Layer, plans: Plans, recomputed: frozenset[str]) -> Bytes:
    """A mixture of experts with balanced routing: the experts' copies of tokens, and what the experts save."""
    model, size = settings.model, settings.model.activation_bytes
    found = Bytes()
    sharded = settings.tokens // model.token_share
    name = f"{layer.name}mlp."
    if "moe" in recomputed:
        found["layer inputs"] += size * sharded * model.hidden_size
        return found
    found += _routing(settings, sharded)
    shared = f"{name}shared_experts."
    keeps = model.moe_shared_expert_intermediate_size and "shared_experts" not in recomputed
    if keeps and kept_rule(settings, plans, f"{shared}linear_fc1", layer.number, sharded) is None:
        found["linear inputs"] -= size * sharded * model.hidden_size  # values shared with the router's input
    ffn = model.expert_ffn // model.expert_tp
    each = _padded_rows(model, sharded * model.moe_router_topk * model.expert_model_parallel_size * model.expert_tp
                   // (model.num_moe_experts or 1))  # fmt: skip
    for expert in range(model.local_experts):
        found += _mlp(
            settings,
            f"{name}experts.local_experts.{expert}.",
            layer.number,
            plans,
            tokens_in=each,
            tokens=each,
            ffn=ffn,
            act_recomputed="moe_act" in recomputed,
        )
        # The router's weight multiplies each token's result before the second linear.
        found["routing"] += probability_bytes(model) * each
        if not model.bias_activation_fusion and "moe_act" not in recomputed:
            found["activation function"] += size * each * ffn
    if model.moe_shared_expert_intermediate_size:
        found += _mlp(
            settings,
            shared,
            layer.number,
            plans,
            tokens_in=sharded,
            tokens=settings.tokens,
            ffn=model.moe_shared_expert_intermediate_size // model.tensor_model_parallel_size,
            recomputed="shared_experts" in recomputed,
        )
    return found
