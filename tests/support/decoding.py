"""What tests of decoding share: a GPTModel's forward over whole sequences, and attention that hides its order of sums."""

from __future__ import annotations

from typing import Any

import torch


def forward(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits [b, s, V] of tokens int64 [b, s], the same on all tensor-parallel ranks."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return model(ids, positions, None, runtime_gather_output=True)


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, **mask: Any
) -> torch.Tensor:
    """Attention summed in float64, so that one rounding hides the order of the sums."""
    q64, k64, v64 = (x.permute(1, 2, 0, 3).double() for x in (q, k, v))
    found = torch.nn.functional.scaled_dot_product_attention(
        q64, k64, v64, scale=scale, enable_gqa=True, **mask
    )
    return found.to(q.dtype).permute(2, 0, 1, 3).contiguous()


def unwrap(model: Any) -> Any:
    """The model inside Float16Module."""
    while hasattr(model, "module"):
        model = model.module
    return model
