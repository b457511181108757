"""Bytes that attention keeps of one microbatch for its backward pass, plain and latent."""

from __future__ import annotations

from .kept import Bytes, Device, kept_rule, linear_input, norm
from .model import Layer
from .settings import Settings
from .sites import Plans


def of_attention(
    settings: Settings, layer: Layer, plans: Plans, recomputed: frozenset[str], device: Device
) -> Bytes:
    """Of a layer's attention, its norm before it left out."""
    if settings.model.multi_latent_attention:
        return _latent(settings, layer, plans, recomputed, device)
    return _plain(settings, layer, plans, recomputed, device)


def _plain(
    settings: Settings, layer: Layer, plans: Plans, recomputed: frozenset[str], device: Device
) -> Bytes:
    model, size = settings.model, settings.model.activation_bytes
    tp, cp, tokens = model.tensor_model_parallel_size, model.context_parallel_size, settings.tokens
    found = Bytes()
    if "layernorm" not in recomputed:  # whose results are made again, and linears keep no codes of them
        site, sharded = f"{layer.name}self_attention.linear_qkv", tokens // model.token_share
        found["linear inputs"] += linear_input(
            settings, plans, site, layer.number, model.hidden_size, sharded
        )
    width = model.heads * model.channels
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
        if again:  # latents are what is kept then
            found["layer inputs"] += size * sharded * width
        else:
            found["linear inputs"] += linear_input(settings, plans, name, layer.number, width, sharded)
        if model.qk_layernorm:
            # Rotary keys lie beside the latent of keys and values.
            found += norm(settings, sharded, width + (rotary if site == "linear_kv_up_proj" else 0))
    positions = tokens // settings.train.micro_batch_size
    if again:
        found["layer inputs"] += 4 * positions * rotary  # angles
        return found + _core(settings, layer, plans, recomputed, device)
    found["attention"] += 4 * size * positions * rotary  # cosines and sines
    return found + _heads(settings, device) + _core(settings, layer, plans, recomputed, device)


def _hidden_states(settings: Settings, layer: Layer, plans: Plans, recomputed: frozenset[str]) -> int:
    """Of the linears that project hidden states: codes of each, or values once for all that keep them."""
    model = settings.model
    sharded = settings.tokens // model.token_share
    if "layernorm" in recomputed:
        return 0
    queries = "linear_q_proj" if model.q_lora_rank is None else "linear_q_down_proj"
    found, values = 0, 0
    for site in (queries, "linear_kv_down_proj"):
        name = f"{layer.name}self_attention.{site}"
        kept = linear_input(settings, plans, name, layer.number, model.hidden_size, sharded)
        if kept_rule(settings, plans, name, layer.number, sharded) is None:
            values = kept
        else:
            found += kept
    return found + values


def _heads(settings: Settings, device: Device) -> Bytes:
    """Queries, keys and values of latent attention; keys and values of the whole sequence."""
    model, tokens = settings.model, settings.tokens
    keys, values = (tokens * model.heads * width for width in (model.key_width, model.value_width))
    cp = model.context_parallel_size
    size = 4 if _writes_scores(settings, device) else model.activation_bytes  # scores are of float32 there
    return Bytes({"attention": size * (keys + (keys + values) * cp)})


def _writes_scores(settings: Settings, device: Device) -> bool:
    model = settings.model
    return device.writes_out and model.key_width != model.value_width


def _masks(settings: Settings) -> int:
    """Values of the masks of a rank's two parts of a sequence, in the mean over the ranks that share it."""
    cp = settings.model.context_parallel_size
    part = settings.train.seq_length // (2 * cp)
    return part * part * (2 * cp + 1)


def _core(
    settings: Settings, layer: Layer, plans: Plans, recomputed: frozenset[str], device: Device
) -> Bytes:
    """Core attention's own, and its result as the projection keeps it."""
    model, size, tokens = settings.model, settings.model.activation_bytes, settings.tokens
    found, site = Bytes(), f"{layer.name}self_attention.linear_proj"
    width = model.heads * model.value_width
    batch = settings.train.micro_batch_size
    scores = model.heads * batch * (tokens // batch) ** 2
    if "core_attn" not in recomputed and _writes_scores(settings, device):
        found["attention"] += 4 * scores
    elif "core_attn" not in recomputed:
        found["attention"] += 4 * tokens * model.heads  # a row's log of the sum
        if device.writes_out and model.context_parallel_size > 1:
            found["attention"] += size * _masks(settings)
        plain = kept_rule(settings, plans, site, layer.number, tokens) is None
        if (
            not plain or model.context_parallel_size > 1
        ):  # a projection that keeps values keeps these very ones
            found["attention"] += size * tokens * width
        if model.attention_dropout:
            found["attention"] += scores * (2 * size + device.mask)
    found["linear inputs"] += linear_input(settings, plans, site, layer.number, width, tokens)
    return found
