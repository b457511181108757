"""Core attention written out, its inputs, and CoreAttention built for a layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.support.gpt import gpt_config
from benchmarks.support.ranks import Layout

HEADS, SIZE = 4, 16


def reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, hidden: Tensor | None = None
) -> Tensor:
    """softmax(q k^T * scale) v written out, [s, b, heads, d] -> [s, b, heads * dv]; hidden: bool [b or 1, 1, s, s]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(len(q), len(k)).triu(1).bool(), float("-inf"))
    if hidden is not None:
        scores = scores.masked_fill(hidden, -10000.0)  # as Megatron-Core
    return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), v).flatten(2)


def inputs(sequence: int, groups: int, dtype: torch.dtype, values: int = SIZE) -> list[Tensor]:
    """q, k, v and the output's gradient for the whole sequence, batch 2; a value has `values` channels."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(HEADS, SIZE), (groups, SIZE), (groups, values)]
    qkv = [torch.randn(sequence, 2, *shape, generator=generator).to(dtype) for shape in shapes]
    return [*qkv, torch.randn(sequence, 2, HEADS * values, generator=generator).to(dtype)]


def forward_backward(attend: Any, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def build(
    cls: Any,
    groups: int,
    layout: Layout,
    causal: bool | str = True,
    scale: float | None = None,
    values: int = SIZE,
    **fields: Any,
) -> Any:
    """An attention module; `causal` may name another AttnMaskType than causal (True) or no_mask (False)."""
    from megatron.core.transformer.enums import AttnMaskType

    config = gpt_config(
        layout,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        hidden_size=HEADS * SIZE,
        **{"bf16": False, "params_dtype": torch.float32, **fields},
    )
    mask = AttnMaskType[causal if isinstance(causal, str) else "causal" if causal else "no_mask"]
    widths = {} if values == SIZE else {"k_channels": SIZE, "v_channels": values}
    return cls(config, 1, mask, "self", softmax_scale=scale, **widths)


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True)]
