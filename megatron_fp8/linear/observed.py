"""Delayed scaling's histories filled from linears that run in high precision: during warm-up, so that scales are there
when FP8 begins. The other recipes have no history: for them nothing is done."""

from __future__ import annotations

from functools import partial

import torch

from .site import GemmSite


def observe(site: GemmSite, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, record: bool) -> None:
    """Record the amaxes of a linear that ran in high precision: y [..., N] = x [..., K] @ weight^T.

    Those of x and, once an iteration, of the weight are recorded now (``record`` False: they were already), that of y's
    gradient when it comes. No value changes.
    """
    if not site.has_histories:
        return
    if record:
        observe_forward(site, x, weight)
    if y.requires_grad:
        y.register_hook(partial(observe_backward, site))


def observe_forward(site: GemmSite, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Record the amaxes of x and, once an iteration, of the weight."""
    _observe(site, "input", x)
    site.weights.observe(weight)


def observe_backward(site: GemmSite, dy: torch.Tensor) -> None:
    """Record the amax of y's gradient."""
    _observe(site, "grad_output", dy)


def _observe(site: GemmSite, role: str, x: torch.Tensor) -> None:
    site.casts[role].observe(x.reshape(-1, x.shape[-1]))
