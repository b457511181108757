"""Counts linears that run in high precision, and records their amaxes.

Delayed scaling needs the amaxes: its histories fill during warm-up, so that scales exist when FP8 begins. Other recipes
have no history, and record nothing here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..quantizer import measure
from ..state.fp8_state import Fp8State
from ..state.iteration import NEVER, in_backward, recorded
from ..state.observer_protocol import SeenLinear
from .amax_recorder import came_back
from .gemm_site import GemmSite


def record_high_precision(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    site: GemmSite,
    *,
    training: bool,
    observe: bool,
    shard: bool = False,
) -> torch.Tensor:
    """Count a linear that ran in high precision, tell the observer, and record amaxes.

    Args:
        x, weight, y: y [..., N] = x [..., K] @ weight [N, K]^T.
        training: the layer's mode.
        observe: record amaxes; False where FP8 was switched off around the call.
        shard: x is this rank's tokens of a matrix that its tensor-parallel group gathers.

    Returns:
        y. Use this one: traced code drops the recording of a y that nobody uses.
    """
    count_linear(site.state, x, weight, y, training=training)
    watch_high_precision(x, weight, y, site, training=training, shard=shard)
    return observe_high_precision(x, weight, y, site, training=training) if observe else y


def count_linear(
    state: Fp8State,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    y: torch.Tensor,
    *,
    training: bool,
    kind: str = "hp_gemms",
) -> None:
    """Count a linear whose GEMMs no site multiplies: y [..., N] = x [..., K] @ weight^T, as 'hp_gemms' or 'fp8_gemms'.

    Traced code counts nothing, since torch.compile would guard on the numbers; it only sets ``activity.traced``.
    """
    if torch.compiler.is_compiling():
        if torch.is_grad_enabled():
            state.activity.traced = True
        return
    gradients = int(x.requires_grad) + int(weight is not None and weight.requires_grad)

    def count(number: int) -> None:
        setattr(state.counts, kind, getattr(state.counts, kind) + number)

    if training:
        count(1)
    if y.requires_grad:

        def count_backward(_: torch.Tensor) -> Any:
            came_back(state)
            count(gradients + (not training))

        y.register_hook(count_backward)


def observe_high_precision(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, site: GemmSite, *, training: bool
) -> torch.Tensor:
    """Record the amaxes of a linear that ran in high precision, for delayed scaling. Returns y [..., N], unchanged."""
    if not site.has_histories or recorded(training, y) == NEVER:
        return y
    if torch.compiler.is_compiling() or site.forwards.as_operator(x, weight):
        from .compiled_amax import traced_observation

        return traced_observation(x, weight, y, site, training=training)
    observe(site, x, weight, y, training=training)
    return y


def watch_high_precision(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    site: GemmSite,
    *,
    training: bool,
    shard: bool = False,
) -> None:
    """Tell the observer, if there is one, of a linear that ran in high precision in training.

    It does not hear of what is traced or transformed, or has no memory.
    """
    if torch.compiler.is_compiling() or (observer := site.state.observer) is None:
        return
    if not training:
        return
    if x.is_meta or isinstance(x, FakeTensor) or torch._C._functorch.peek_interpreter_stack() is not None:
        return
    with _disable_current_modes():  # what keeps or counts operations has no business with an observer's
        observer.high_precision(SeenLinear(site.plan.name, x, weight, y, not in_backward(), shard))


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
