"""Delayed scaling's histories filled from linears that run in high precision: during warm-up, so that scales are there
when FP8 begins. The other recipes have no history: for them nothing is done."""

from __future__ import annotations

import torch

from ..quantizer import measure
from .site import GemmSite


def observe(
    site: GemmSite, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, training: bool
) -> None:
    """Record the amaxes of a linear that ran in high precision: y [..., N] = x [..., K] @ weight^T. No value changes.

    Those of x and, once an iteration, of the weight are recorded now, in evaluation mode once the backward comes; that of
    y's gradient when it comes.
    """
    amax = measure(x)[0]
    if training:
        observe_forward(site, amax, weight)
    if y.requires_grad:

        def arrived(dy: torch.Tensor) -> None:
            if not training:
                observe_forward(site, amax, weight)
            observe_backward(site, dy)

        y.register_hook(arrived)


def observe_forward(site: GemmSite, amax: torch.Tensor, weight: torch.Tensor) -> None:
    """Record the amax of the input, float32 [], and, once an iteration, that of the weight."""
    for quantizer in site.casts["input"].quantizers:
        if quantizer.slot.delayed is not None:
            quantizer.record(amax, None)
    site.weights.observe(weight)


def observe_backward(site: GemmSite, dy: torch.Tensor) -> None:
    """Record the amax of y's gradient."""
    site.casts["grad_output"].observe(dy.reshape(-1, dy.shape[-1]))
