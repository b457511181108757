"""The size filter under Megatron-Core: GEMM shapes of a config on this rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..files.terminal import print_rank_0
from ..linear.tensor_parallel import weight_of
from ..plan.gemm_size_table import Gemm, load_table
from ..plan.site_plan import SitePlan, bf16_site
from ..plan.timing import device_label


def apply_size_table(config: Any, plan: SitePlan, linear: Any) -> SitePlan:
    """Applies the config's size table to a site's plan: returns it with the table's reason, or a BF16 plan. Without a
    table: the plan unchanged.

    Args:
        linear: a parallel linear of Megatron-Core; its weight [N, K] is this rank's part.

    Raises:
        ValueError: the file is no size table, was measured on another device or with another backend or recipe, or
            FP8 is slower at all of its sizes.
    """
    path = getattr(config, "fp8_size_filter", None)
    if path is None or plan.precision == "bf16":
        return plan
    assert plan.backend is not None and plan.recipe is not None
    table = load_table(path)
    table.check(device_label(weight_of(linear).device), plan.backend, plan.recipe)
    tokens = table.tokens(getattr(config, "fp8_size_filter_tokens", None))
    n, k = weight_of(linear).shape
    share = ""
    if linear.is_expert:
        tokens, share = expert_tokens(config, tokens), " (an expert's share of the tokens if all get as many)"
    verdict = table.verdict(Gemm(k, n, tokens))
    reason = f"fp8_size_filter: {verdict.reason}{share}"
    if not verdict.pays:
        return bf16_site(plan.name, plan.layer, reason, "size")
    return replace(plan, reason=f"{plan.reason}; {reason}")


def expert_tokens(config: Any, tokens: int) -> int:
    """Returns the tokens per expert of a microbatch of ``tokens``, under balanced routing; at least 1."""
    expert_ranks = config.expert_model_parallel_size * (config.expert_tensor_parallel_size or 1)
    routed = tokens * config.moe_router_topk * expert_ranks
    return max(1, routed // (config.tensor_model_parallel_size * config.num_moe_experts))


def gemm_shapes(config: Any, tokens: int) -> dict[str, Gemm]:
    """Returns the linears of one layer of a dense or MoE GPT, with this rank's GEMM shapes."""
    tp, hidden = config.tensor_model_parallel_size, config.hidden_size
    gate = 2 if config.gated_linear_unit else 1
    found = _attention_shapes(config, tokens)

    def mlp(prefix: str, ffn: int, parts: int, tokens: int) -> None:
        found[f"{prefix}linear_fc1"] = Gemm(hidden, gate * ffn // parts, tokens)
        found[f"{prefix}linear_fc2"] = Gemm(ffn // parts, hidden, tokens)

    dense = config.num_moe_experts is None or not _all_layers_have_experts(config)
    if dense:
        mlp("", config.ffn_hidden_size, tp, tokens)
    if config.num_moe_experts is not None:
        etp = config.expert_tensor_parallel_size or 1
        mlp("experts.", config.moe_ffn_hidden_size, etp, expert_tokens(config, tokens))
        if config.moe_shared_expert_intermediate_size is not None:
            mlp("shared_experts.", config.moe_shared_expert_intermediate_size, tp, tokens)
    return found


def _attention_shapes(config: Any, tokens: int) -> dict[str, Gemm]:
    tp, hidden, heads = config.tensor_model_parallel_size, config.hidden_size, config.num_attention_heads
    if not config.multi_latent_attention:
        qkv = (heads + 2 * config.num_query_groups) * config.kv_channels
        return {
            "linear_qkv": Gemm(hidden, qkv // tp, tokens),
            "linear_proj": Gemm(heads * config.kv_channels // tp, hidden, tokens),
        }
    rotary, q_rank, kv_rank = config.qk_pos_emb_head_dim, config.q_lora_rank, config.kv_lora_rank
    queries = heads * (config.qk_head_dim + rotary) // tp
    keys_and_values = heads * (config.qk_head_dim + config.v_head_dim) // tp
    found = {"linear_q_proj": Gemm(hidden, queries, tokens)}
    if q_rank is not None:
        found = {
            "linear_q_down_proj": Gemm(hidden, q_rank // tp, tokens),
            "linear_q_up_proj": Gemm(q_rank, queries, tokens),
        }
    return found | {
        "linear_kv_down_proj": Gemm(hidden, (kv_rank + rotary) // tp, tokens),
        "linear_kv_up_proj": Gemm(kv_rank, keys_and_values, tokens),
        "linear_proj": Gemm(heads * config.v_head_dim // tp, hidden, tokens),
    }


def _all_layers_have_experts(config: Any) -> bool:
    every = config.moe_layer_freq
    return every == 1 if isinstance(every, int) else all(every)


def announce(plans: Iterable[SitePlan]) -> None:
    """Prints a line on the first rank if the filter left sites in BF16. The report has the reasons."""
    plans = list(plans)
    small = [plan.name for plan in plans if plan.cause == "size"]
    if small:
        print_rank_0(
            f"megatron_fp8: fp8_size_filter leaves {len(small)} of this rank's {len(plans)} GEMM sites in BF16, where FP8"
            f" does not pay; the report says why: {', '.join(small[:4])}{', ...' if len(small) > 4 else ''}"
        )
