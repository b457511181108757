"""Bytes that attention saves per microbatch for backward, plain and latent."""

from __future__ import annotations

from .model import Layer
from .saved_tensors import Bytes, Device, kept_rule, linear_input, norm
from .settings import Settings
from .sites import Plans


def of_attention(
    settings: Settings, layer: Layer, plans: Plans, recomputed: frozenset[str], device: Device
) -> Bytes:
    """A layer's attention, without the norm before it."""
    if settings.model.multi_latent_attention:
        return _latent(settings, layer, plans, recomputed, device)
    return _plain(settings, layer, plans, recomputed, device)


def _plain(
    settings: Settings, layer: Layer, plans: Plans, recomputed: frozenset[str], device: Device
) -> Bytes:
    model, size = settings.model, settings.model.activation_bytes
    tp, cp, tokens = model.tensor_model_parallel_size, model.context_parallel_size, settings.tokens
    found = Bytes()
    if "layernorm" not in recomputed:  # otherwise results are recomputed, and linears save no codes
        site, sharded = f"{layer.name}self_attention.linear_qkv", tokens // model.token_share
        found["linear inputs"] += linear_input(
            settings, plans, site, layer.number, model.hidden_size, sharded
        )
    width = model.heads * model.channels
    groups = model.query_groups * model.channels // tp
    rope = model.position_embedding_type == "rope"
    mixed, query, keys = tokens * (width + 2 * groups), tokens * width, tokens * groups
    # With several query groups, queries are interleaved with keys and values, and reshaping copies them.
    copied = tokens * width * (1 < model.query_groups // tp < model.num_attention_heads // tp)
    if model.qk_layernorm:
        found["norms"] += size * copied
        heads = (model.num_attention_heads + model.query_groups) // tp
        found["norms"] += tokens * heads * (4 if model.normalization == "RMSNorm" else 8)
    if rope:
        # Rotated queries and keys, values as a slice of all three; cosines and sines of both, in each layer.
        positions = tokens // settings.train.micro_batch_size
        found["attention"] += size * (query + 4 * positions * model.channels)
        found["attention"] += size * (mixed + keys if cp == 1 else 0)
    else:
        found["attention"] += size * (mixed + (query + keys if model.qk_layernorm else copied))
    if cp > 1:
        found["attention"] += size * 2 * keys * cp  # keys and values for the whole sequence
    return found + _core(settings, layer, plans, recomputed, device)


def _latent(
    settings: Settings, layer: Layer, plans: Plans, recomputed: frozenset[str], device: Device
) -> Bytes:
    model, size, tokens = settings.model, settings.model.activation_bytes, settings.tokens
    sharded = tokens // model.token_share
    rotary = model.qk_pos_emb_head_dim
    found = Bytes({"linear inputs": _hidden_states(settings, layer, plans, recomputed)})
    latents = {"linear_kv_up_proj": model.kv_lora_rank}
    if model.q_lora_rank is not None:
        latents["linear_q_up_proj"] = model.q_lora_rank
    again = "mla_up_proj" in recomputed
    for site, width in latents.items():
        name = f"{layer.name}self_attention.{site}"
        if again:  # saves the latents
            found["layer inputs"] += size * sharded * width
        else:
            found["linear inputs"] += linear_input(settings, plans, name, layer.number, width, sharded)
        if model.qk_layernorm:
            # Rotary keys are stored next to the latent of keys and values.
            found += norm(settings, sharded, width + (rotary if site == "linear_kv_up_proj" else 0))
    positions = tokens // settings.train.micro_batch_size
    if again:
        found["layer inputs"] += 4 * positions * rotary  # angles
        return found + _core(settings, layer, plans, recomputed, device)
    found["attention"] += 4 * size * positions * rotary  # cosines and sines
    return found + _heads(settings, device) + _core(settings, layer, plans, recomputed, device)


def _hidden_states(settings: Settings, layer: Layer, plans: Plans, recomputed: frozenset[str]) -> int:
    """Inputs of the linears that project hidden states: codes for each, or values once for all."""
    model = settings.model
    sharded = settings.tokens // model.token_share
    if "layernorm" in recomputed:
        return 0
    queries = "linear_q_proj" if model.q_lora_rank is None else "linear_q_down_proj"
    found, values = 0, 0
    for site in (queries, "linear_kv_down_proj"):
        name = f"{layer.name}self_attention.{site}"
        saved = linear_input(settings, plans, name, layer.number, model.hidden_size, sharded)
        if kept_rule(settings, plans, name, layer.number, sharded) is None:
            values = saved
        else:
            found += saved
    return found + values


def _heads(settings: Settings, device: Device) -> Bytes:
    """Queries, keys and values of latent attention; keys and values for the whole sequence."""
    model, tokens = settings.model, settings.tokens
    keys, values = (tokens * model.heads * width for width in (model.key_width, model.value_width))
    cp = model.context_parallel_size
    size = 4 if _writes_scores(settings, device) else model.activation_bytes  # those scores are float32
    return Bytes({"attention": size * (keys + (keys + values) * cp)})


def _writes_scores(settings: Settings, device: Device) -> bool:
    model = settings.model
    return device.writes_out and model.key_width != model.value_width


def _masks(settings: Settings) -> int:
    """Values of the masks of a rank's two parts of a sequence, averaged over the context-parallel ranks."""
    cp = settings.model.context_parallel_size
    part = settings.train.seq_length // (2 * cp)
    return part * part * (2 * cp + 1)


def _core(
    settings: Settings, layer: Layer, plans: Plans, recomputed: frozenset[str], device: Device
) -> Bytes:
    """Core attention's own tensors, and its result as saved by the output projection."""
    model, size, tokens = settings.model, settings.model.activation_bytes, settings.tokens
    found, site = Bytes(), f"{layer.name}self_attention.linear_proj"
    width = model.heads * model.value_width
    batch = settings.train.micro_batch_size
    scores = model.heads * batch * (tokens // batch) ** 2
    if "core_attn" not in recomputed and _writes_scores(settings, device):
        found["attention"] += 4 * scores
    elif "core_attn" not in recomputed:
        found["attention"] += 4 * tokens * model.heads  # log-sum-exp per row
        if device.writes_out and model.context_parallel_size > 1:
            found["attention"] += size * _masks(settings)
        plain = kept_rule(settings, plans, site, layer.number, tokens) is None
        if not plain or model.context_parallel_size > 1:  # a projection that saves values shares this tensor
            found["attention"] += size * tokens * width
        if model.attention_dropout:
            found["attention"] += scores * (2 * size + device.mask)
    found["linear inputs"] += linear_input(settings, plans, site, layer.number, width, tokens)
    return found
