"""Operators for torch.compile that record a linear's amaxes while FP8 is off.

Delayed scaling needs them. The operators return a copy of the result, so that no compiler drops the recording.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..quantizer import measure
from .amax_recorder import observe_backward as record_gradient
from .amax_recorder import observe_forward
from .compiled import TAGS, beside, next_call
from .gemm_site import GemmSite, site_by_handle


def traced_observation(x: Tensor, weight: Tensor, y: Tensor, site: GemmSite, *, training: bool) -> Tensor:
    """observe_high_precision while traced: records x [..., K], weight [N, K]; returns a copy of y [..., N]."""
    handle = beside(site.traced.handle, x, weight)
    return torch.ops.megatron_fp8.observe(x, weight, y, handle, training, next_call())[0]


@torch.library.custom_op("megatron_fp8::observe", mutates_args=(), tags=TAGS)
def observe(
    x: Tensor, weight: Tensor, y: Tensor, site: Tensor, training: bool, number: int
) -> tuple[Tensor, Tensor]:
    """Returns a copy of y [..., N], and the amax of x [..., K] (float32 []).

    In training it records the amaxes of x and weight [N, K].
    """
    amax = measure(x)[0].clone()
    if training:
        observe_forward(site_by_handle(site), amax, weight)
    return y.clone(), amax


@observe.register_fake
def _(x, weight, y, site, training, number):
    return y.clone(), x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("megatron_fp8::observe_backward", mutates_args=(), tags=TAGS)
def observe_backward(
    dy: Tensor, weight: Tensor, amax: Tensor, site: Tensor, training: bool, number: int
) -> Tensor:
    """Returns a copy of dy [..., N] and records its amax; in evaluation also ``amax`` (float32 [], x's) and weight's."""
    found = site_by_handle(site)
    found.state.activity.backwards += 1
    if not training:
        observe_forward(found, amax, weight)
    record_gradient(found, dy)
    return dy.clone()


@observe_backward.register_fake
def _(dy, weight, amax, site, training, number):
    return dy.clone()


def _save_site(ctx: Any, inputs: Any, output: Any) -> None:
    _, weight, _, site, ctx.training, ctx.number = inputs
    ctx.save_for_backward(weight, output[1], site)
    ctx.mark_non_differentiable(output[1])


def _pass_observed(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    passed = torch.ops.megatron_fp8.observe_backward(dy, *ctx.saved_tensors, ctx.training, ctx.number)
    return None, None, passed, None, None, None


torch.library.register_autograd("megatron_fp8::observe", _pass_observed, setup_context=_save_site)
