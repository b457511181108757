"""The gradients of experts' weights: returned to autograd, or added to main_grad."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .gemm_site import GemmSite
from .linear_ops import Call, added_to_main_grad, main_grad_of


def each_weight_gradient(
    weights: Sequence[torch.Tensor],
    calls: Sequence[Call],
    wanted: list[int],
    multiply: Callable[[list[int], list[Any], bool], None],
) -> list[torch.Tensor | None]:
    """Each weight's gradient [N, K]: None where not ``wanted``, a dummy where it was added to main_grad.

    Args:
        weights: [N, K] each.
        wanted: the experts whose gradients are needed.
        multiply: writes these experts' wgrad products to tensors [N, K], or adds them there.
    """
    found: list[torch.Tensor | None] = [None] * len(weights)
    sums = {e: total for e in wanted if (total := main_grad_of(weights[e])) is not None}
    for these in _apart(sums):
        multiply(these, [sums[e] for e in these], True)
        for e in these:
            found[e] = added_to_main_grad(weights[e])
    these = [e for e in wanted if e not in sums]
    outs = [_empty_gradient(weights[e], calls[e].site) for e in these]
    multiply(these, outs, False)
    for e, out in zip(these, outs, strict=True):
        found[e] = out.to(weights[e].dtype)
    return found


def _apart(sums: Mapping[int, torch.Tensor]) -> list[list[int]]:
    """Splits experts into groups in which no two share a main_grad (float32 [N, K]), as experts with one weight do."""
    turns: list[dict[int, int]] = []
    for e, total in sums.items():
        at = total.data_ptr()
        turn = next((turn for turn in turns if at not in turn), None)
        if turn is None:
            turns.append(turn := {})
        turn[at] = e
    return [list(turn.values()) for turn in turns]


def _empty_gradient(weight: torch.Tensor, site: GemmSite) -> torch.Tensor:
    return torch.empty(weight.shape, dtype=site.wgrad_dtype(weight.dtype), device=weight.device)
