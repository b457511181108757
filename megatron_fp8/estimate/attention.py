"""Linears of attention, plain and latent, with sizes and tensor-parallel layout.

Plain attention computes queries, keys and values with one linear. Multi-latent attention projects hidden
states down to latents and latents up to heads; tensor parallelism splits the down projections by output
features too, and each rank gathers the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from .model import Model


@dataclass(frozen=True)
class Projection:
    """A linear [n, k] of attention, over all ranks.

    Attributes:
        name: site name without the layer's prefix.
        k, n: sizes.
        bias: whether it has a bias.
        row: whether tensor parallelism splits it by input features (row-parallel); otherwise by output
            features.
        latent: whether every rank gathers its whole output, as a latent.
        rotary: for a latent, columns that go into the heads of every rank unchanged except for positions.
    """

    name: str
    k: int
    n: int
    bias: bool = False
    row: bool = False
    latent: bool = False
    rotary: int = 0

    def part(self, tp: int) -> tuple[int, int]:
        """(n, k) on one of ``tp`` ranks."""
        return (self.n, self.k // tp) if self.row else (self.n // tp, self.k)


def projections(model: Model) -> tuple[Projection, ...]:
    """Attention's linears in execution order."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    last = Projection(
        "self_attention.linear_proj", heads * model.value_width, hidden, bias=model.add_bias_linear, row=True
    )
    if not model.multi_latent_attention:
        width = (heads + 2 * model.query_groups) * model.channels
        bias = model.add_bias_linear or model.add_qkv_bias
        return Projection("self_attention.linear_qkv", hidden, width, bias=bias), last
    queries = heads * model.key_width
    first: tuple[Projection, ...] = (Projection("self_attention.linear_q_proj", hidden, queries),)
    if model.q_lora_rank is not None:
        first = (
            Projection("self_attention.linear_q_down_proj", hidden, model.q_lora_rank, latent=True),
            Projection("self_attention.linear_q_up_proj", model.q_lora_rank, queries),
        )
    rank, rotary = model.kv_lora_rank, model.qk_pos_emb_head_dim
    return (
        *first,
        Projection("self_attention.linear_kv_down_proj", hidden, rank + rotary, latent=True, rotary=rotary),
        Projection("self_attention.linear_kv_up_proj", rank, heads * (model.qk_head_dim + model.v_head_dim)),
        last,
    )


def norms(model: Model) -> tuple[tuple[str, int], ...]:
    """(name, channels) of the norms inside attention: of heads, or of latents."""
    if not model.qk_layernorm:
        return ()
    if not model.multi_latent_attention:
        return ("self_attention.q_layernorm", model.channels), ("self_attention.k_layernorm", model.channels)
    queries = () if model.q_lora_rank is None else (("self_attention.q_layernorm", model.q_lora_rank),)
    return (*queries, ("self_attention.kv_layernorm", model.kv_lora_rank))


def gathers_input(site: str) -> bool:
    """Whether sequence parallelism gathers this linear's input (it is column-parallel)."""
    return not site.endswith(("linear_proj", "linear_fc2")) and ".experts." not in site
