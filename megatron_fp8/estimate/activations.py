"""Activation memory of one microbatch, by kind and layer.

Each term is a tensor that autograd saves, found by inspecting a GPT of this package. If a tensor is a view,
the larger base tensor counts. tests/functional/test_estimate.py checks the sums to within 2 % of measured
values. Weights and their codes are not activations (model_state.py).
"""

from __future__ import annotations

from collections import Counter

from ..fp8_utils import get_fp8_align_size, quantizes, recipe_name_of
from ..numerics.rule import BLOCK_1X128, Rule
from .config_reader import Settings
from .fp8_weights import side_bytes
from .model import OUTPUT, Chunk, Layer, Model
from .parameter_counts import gathers_input

Bytes = Counter[str]
"""Kind -> bytes: 'norms', 'linear inputs', 'attention', 'activation function', 'dropout', 'layer inputs', 'routing' (of
experts), 'ends'."""


def saved_by_chunk(settings: Settings, chunk: Chunk) -> Bytes:
    """Bytes that one microbatch saves in a chunk until its backward pass."""
    model, tokens, found = settings.model, settings.tokens, Bytes()
    layers = [saved_by_layer(settings, layer) for layer in chunk.layers]
    found += sum(_after_recompute(settings, layers), Bytes())
    if chunk.first:
        found += _embedding(settings)
    if chunk.last:
        found += _norm(settings)
        for layer in chunk.predicting:
            found += _prediction(settings, layer)
        rows = model.padded_vocabulary // model.tensor_model_parallel_size
        # Cross entropy: float32 exponentials, the mask and the ids of the targets.
        each = 4 * tokens * rows + 9 * tokens
        each += linear_input(settings, OUTPUT, model.hidden_size, settings.local_tokens)
        found["ends"] += model.predictions * each
    return found


def working_set(settings: Settings, chunk: Chunk) -> int:
    """Bytes that recomputation needs at once: the layers between two saved inputs."""
    model = settings.model
    if model.recompute_granularity != "full" or not chunk.layers:
        return 0
    sizes = [saved_by_layer(settings, layer).total() for layer in chunk.layers]
    count = 1 if model.recompute_method == "block" else model.recompute_num_layers or 1
    return max(sum(sizes[at : at + count]) for at in range(0, len(sizes), count))


def saved_by_layer(settings: Settings, layer: Layer) -> Bytes:
    """Bytes that one microbatch saves in a layer that is not fully recomputed."""
    model, sharded = settings.model, settings.local_tokens
    found = _norm(settings) + _norm(settings)
    found += (
        _latent_attention(settings, layer) if model.multi_latent_attention else _attention(settings, layer)
    )
    found += _core_attention(settings, layer)
    found["dropout"] += 2 * _dropout(settings)
    if layer.experts:
        return found + _experts(settings, layer)
    found += _mlp(settings, f"{layer.name}mlp.", sharded, settings.tokens, model.ffn_hidden_size, "mlp")
    if "layernorm" in model.recomputed and "mlp" not in model.recomputed:
        # The norm's result is recomputed, and the linear saves no codes of it (save_original_input).
        found["linear inputs"] -= linear_input(
            settings, f"{layer.name}mlp.linear_fc1", model.hidden_size, sharded
        )
    return found


def _embedding(settings: Settings) -> Bytes:
    model, tokens = settings.model, settings.tokens
    ids = 8 * tokens * (2 if model.position_embedding_type == "learned_absolute" else 1)
    masked = tokens if model.tensor_model_parallel_size > 1 else 0
    return Bytes({"ends": ids + masked, "dropout": _dropout(settings)})


def _prediction(settings: Settings, layer: Layer) -> Bytes:
    """One depth of multi-token prediction: two norms and their projection, a layer, a norm."""
    model, sharded = settings.model, settings.local_tokens
    found = _embedding(settings)
    found["ends"] += (4 + 8) * settings.tokens  # its loss and loss mask
    if model.recompute_granularity == "full" and model.recompute_method == "uniform":
        found["layer inputs"] += 2 * model.activation_bytes * sharded * model.hidden_size
        return found
    found += _norm(settings) + _norm(settings) + _norm(settings)
    found["linear inputs"] += linear_input(settings, layer.projection, 2 * model.hidden_size, sharded)
    # The layer's first norm saves a slice of the gathered tensor, and so the whole tensor.
    found["norms"] += model.activation_bytes * (settings.tokens - sharded) * model.hidden_size
    return found + saved_by_layer(settings, layer)


def _after_recompute(settings: Settings, layers: list[Bytes]) -> list[Bytes]:
    model = settings.model
    if model.recompute_granularity != "full" or not layers:
        return layers
    share = model.tensor_model_parallel_size if model.distribute_saved_activations else model.token_share
    hidden = Bytes({"layer inputs": model.activation_bytes * settings.tokens // share * model.hidden_size})
    positions = Bytes()
    if model.position_embedding_type == "rope" and not model.multi_latent_attention:
        # angles, float32: one tensor, shared by all recomputations
        positions["layer inputs"] = 4 * settings.positions * model.kv_channels
    count = model.recompute_num_layers or 1
    if model.recompute_method == "block":
        return [*(hidden for _ in layers[:count]), *layers[count:], positions]
    return [*(hidden for _ in layers[::count]), positions]


# ----------------------------------------------------------------------------------------------------- single operations


def _norm(settings: Settings, width: int | None = None) -> Bytes:
    """A norm's input [tokens, width], plus one float32 per row (RMSNorm) or two (LayerNorm; on CPUs in 16 bits).

    ``width``: hidden_size if None.
    """
    model = settings.model
    each = 4 if model.normalization == "RMSNorm" else 8
    return Bytes(
        {"norms": settings.local_tokens * (model.activation_bytes * (width or model.hidden_size) + each)}
    )


def _mask(settings: Settings) -> int:
    """Bytes per value of a dropout mask."""
    return 1 if settings.on_gpu else 2


def _dropout(settings: Settings) -> int:
    """The mask of a layer's hidden states."""
    model = settings.model
    return _mask(settings) * settings.local_tokens * model.hidden_size if model.hidden_dropout else 0


def linear_input(settings: Settings, site: str, k: int, tokens: int) -> int:
    """wgrad's operand [k, tokens]: codes and scales, or values."""
    rule = saved_rule(settings, site, tokens)
    if rule is None:
        return settings.model.activation_bytes * k * tokens
    return side_bytes(rule, k, tokens)


def saved_rule(settings: Settings, site: str, tokens: int) -> Rule | None:
    """The rule by which a linear's saved input is quantized for wgrad; None if it saves high-precision values."""
    plan = settings.plan(site)
    cast = plan.operands["wgrad"]["input"]
    if plan.precision == "bf16" or cast is None:
        return None
    gathers = settings.model.sequence_parallel and gathers_input(site)
    return cast.rule if not gathers or is_aligned(cast.rule, tokens) else None


def is_aligned(rule: Rule, tokens: int) -> bool:
    """Whether a shard of ``tokens`` tokens contains whole blocks, so that its codes can be gathered."""
    granularity = rule.granularity
    block = max(granularity.rows, granularity.cols)
    return granularity.is_tensor or granularity.cols == 0 or tokens % block == 0


# ------------------------------------------------------------------------------------------------------------- attention


def _attention(settings: Settings, layer: Layer) -> Bytes:
    """Plain attention up to the scores, without the norm before it."""
    model, size, tokens = settings.model, settings.model.activation_bytes, settings.tokens
    tp, exchange = model.tensor_model_parallel_size, model.context_exchange
    found = Bytes()
    if "layernorm" not in model.recomputed:  # otherwise results are recomputed, and linears save no codes
        site = f"{layer.name}self_attention.linear_qkv"
        found["linear inputs"] += linear_input(settings, site, model.hidden_size, settings.local_tokens)
    query = tokens * model.heads * model.kv_channels
    keys = tokens * (model.num_query_groups * model.kv_channels // tp)
    mixed = query + 2 * keys
    # With several query groups, queries are interleaved with keys and values, and reshaping copies them.
    copied = query * (1 < model.num_query_groups // tp < model.num_attention_heads // tp)
    if model.qk_layernorm:
        heads = (model.num_attention_heads + model.num_query_groups) // tp
        found["norms"] += size * copied + tokens * heads * (4 if model.normalization == "RMSNorm" else 8)
    if model.position_embedding_type == "rope":
        # Rotated queries and keys, values as a slice of all three; cosines and sines of both, in each layer.
        found["attention"] += size * (query + 4 * settings.positions * model.kv_channels)
        found["attention"] += size * {"all_gather": 0, "a2a": 2 * keys}.get(exchange or "", mixed + keys)
    else:
        found["attention"] += size * (mixed + (query + keys if model.qk_layernorm else copied))
    if exchange == "all_gather":
        found["attention"] += (
            size * 2 * keys * model.context_parallel_size
        )  # keys and values for the whole sequence
    return found


def _latent_attention(settings: Settings, layer: Layer) -> Bytes:
    """Latent attention up to the scores, without the norm before it."""
    model, size, sharded = settings.model, settings.model.activation_bytes, settings.local_tokens
    rotary = model.qk_pos_emb_head_dim
    found = Bytes({"linear inputs": _hidden_states(settings, layer)})
    latents = {"linear_kv_up_proj": model.kv_lora_rank}
    if model.q_lora_rank is not None:
        latents["linear_q_up_proj"] = model.q_lora_rank
    again = "mla_up_proj" in model.recomputed
    for site, width in latents.items():
        if again:  # saves the latents
            found["layer inputs"] += size * sharded * width
        else:
            name = f"{layer.name}self_attention.{site}"
            found["linear inputs"] += linear_input(settings, name, width, sharded)
        if model.qk_layernorm:
            # Rotary keys are stored next to the latent of keys and values.
            found += _norm(settings, width + (rotary if site == "linear_kv_up_proj" else 0))
    if again:
        found["layer inputs"] += 4 * settings.positions * rotary  # angles
        return found
    # Cosines and sines; then queries, keys and values of the heads, keys and values for the whole sequence.
    keys, values = (settings.tokens * model.heads * width for width in (model.key_width, model.value_width))
    each = 4 if _writes_scores(settings) else size  # those scores are float32
    found["attention"] += 4 * size * settings.positions * rotary
    gathered = model.context_parallel_size if model.context_exchange == "all_gather" else 1
    found["attention"] += each * (keys + (keys + values) * gathered)
    return found


def _hidden_states(settings: Settings, layer: Layer) -> int:
    """Inputs of the linears that project hidden states: codes for each, or values once for all."""
    model, sharded = settings.model, settings.local_tokens
    if "layernorm" in model.recomputed:
        return 0
    queries = "linear_q_proj" if model.q_lora_rank is None else "linear_q_down_proj"
    found, values = 0, 0
    for site in (queries, "linear_kv_down_proj"):
        name = f"{layer.name}self_attention.{site}"
        saved = linear_input(settings, name, model.hidden_size, sharded)
        if saved_rule(settings, name, sharded) is None:
            values = saved
        else:
            found += saved
    return found + values


def _writes_scores(settings: Settings) -> bool:
    """Whether attention stores its scores: on CPUs, if values and keys differ in width, but not in a ring."""
    model = settings.model
    return not settings.on_gpu and model.key_width != model.value_width and model.context_exchange != "p2p"


def _core_attention(settings: Settings, layer: Layer) -> Bytes:
    """Core attention's own tensors, and its result as saved by the output projection."""
    model, size, tokens = settings.model, settings.model.activation_bytes, settings.tokens
    found, site = Bytes(), f"{layer.name}self_attention.linear_proj"
    width, cp = model.heads * model.value_width, model.context_parallel_size
    scores = model.heads * settings.train.micro_batch_size * settings.positions**2
    if "core_attn" in model.recomputed:
        pass
    elif _writes_scores(settings):
        found["attention"] += 4 * scores
    else:
        found["attention"] += 4 * tokens * model.heads  # log-sum-exp per row
        if not settings.on_gpu and model.context_exchange == "all_gather":
            # Masks of a rank's two parts of a sequence, averaged over the context-parallel ranks.
            part = settings.train.seq_length // (2 * cp)
            found["attention"] += size * part * part * (2 * cp + 1)
        if saved_rule(settings, site, tokens) is not None or model.context_exchange in (
            "all_gather",
            "a2a",
        ):  # a projection that saves values shares it
            found["attention"] += size * tokens * width
        if model.attention_dropout:
            found["attention"] += scores * (2 * size + _mask(settings))
    found["linear inputs"] += linear_input(settings, site, width, tokens)
    return found


# ------------------------------------------------------------------------------------------------------ MLPs and experts


def _mlp(
    settings: Settings,
    prefix: str,
    tokens_in: int,
    tokens: int,
    ffn: int,
    recompute: str,
    cut: int | None = None,
) -> Bytes:
    """An MLP of ``ffn`` columns over ``cut`` ranks; ``tokens_in``: tokens of its input; ``recompute``: the module that
    recomputes all of it, or moe_act: its activation function."""
    model, size = settings.model, settings.model.activation_bytes
    ffn //= cut or model.tensor_model_parallel_size
    recomputed = recompute in model.recomputed
    if recomputed and recompute != "moe_act":
        return Bytes({"layer inputs": size * tokens_in * model.hidden_size})
    found = Bytes({"activation function": size * tokens * ffn * model.gate})
    found["linear inputs"] += linear_input(settings, f"{prefix}linear_fc1", model.hidden_size, tokens_in)
    if not recomputed:
        found["linear inputs"] += linear_input(settings, f"{prefix}linear_fc2", ffn, tokens)
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
    inputs = model.activation_bytes * tokens * model.hidden_size
    return Bytes({"linear inputs": inputs, "routing": tokens * saved})


def _experts(settings: Settings, layer: Layer) -> Bytes:
    """A mixture of experts with balanced routing: the experts' copies of tokens, and what the experts save."""
    model, size, sharded = settings.model, settings.model.activation_bytes, settings.local_tokens
    if "moe" in model.recomputed:
        return Bytes({"layer inputs": size * sharded * model.hidden_size})
    found = _routing(settings, sharded)
    shared, shared_ffn = f"{layer.name}mlp.shared_experts.", model.moe_shared_expert_intermediate_size
    if shared_ffn:
        keeps = "shared_experts" not in model.recomputed
        if keeps and saved_rule(settings, f"{shared}linear_fc1", sharded) is None:
            found["linear inputs"] -= (
                size * sharded * model.hidden_size
            )  # values shared with the router's input
        found += _mlp(settings, shared, sharded, settings.tokens, shared_ffn, "shared_experts")
    ranks = model.expert_model_parallel_size * model.expert_tp
    each = sharded * model.moe_router_topk * ranks // (model.num_moe_experts or 1)
    # Megatron-Core pads rows with zeros if FP8 or FP4 is on and experts run one by one.
    multiple = (
        get_fp8_align_size(recipe_name_of(model)) if quantizes(model) and not model.moe_grouped_gemm else 1
    )
    each = -(-each // multiple) * multiple
    for expert in range(model.local_experts):
        prefix = f"{layer.name}mlp.experts.local_experts.{expert}."
        found += _mlp(settings, prefix, each, each, model.moe_ffn_hidden_size, "moe_act", model.expert_tp)
        # The router's weight multiplies each token's result before the second linear.
        found["routing"] += probability_bytes(model) * each
        if not model.bias_activation_fusion and "moe_act" not in model.recomputed:
            found["activation function"] += size * each * (model.moe_ffn_hidden_size // model.expert_tp)
    return found
