"""Forward and backward of a linear, or of a layer's experts, without autograd.

    fprop  y [M, N]  = x  [M, K]   @ w  [N, K]^T        x, w    quantized rowwise
    dgrad  dx [M, K] = dy [M, N]   @ w  [N, K]          dy rowwise, w columnwise
    wgrad  dw [N, K] = dy [M, N]^T @ x  [M, K]          dy, x   columnwise

A linear is a group of one GEMM site. Experts are a group of several: the rows of x are their tokens, expert by expert.
Each site has its own plan, quantizers, slots and cached weight. So experts share no amax and no block of a scale, and
codes, histories, checkpoints and reports equal those of experts called one by one, to the bit. Grouping saves calls: the
emulated backend makes all casts in one call, and ``grouped_gemm`` all products. Experts without tokens are skipped.
Experts that a plan or an experiment treats differently (one in BF16, a gradient in high precision) are multiplied one by
one. Rejected: one site with a weight [experts, N, K]. Its quantizers, histories, FP8 parameter, main_grad and checkpoint
would each need a second form with one more dimension.

With tensor parallelism, which experts do not have here, the order is Megatron-Core's, so that communication overlaps with
GEMMs:

    column, sequence parallel:  gather x codes | dgrad | reduce-scatter dx | wgrad
    column:                                      dgrad | all-reduce dx     | wgrad
    row, sequence parallel:     gather dy codes (columnwise side) | dgrad | wgrad

Two callers add autograd: function.py in eager mode, compiled.py's operators in compiled code. They save operands
differently and run this same code, so their bits are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..plan.autocast_state import without_autocast
from ..state.observer_protocol import ProductEvent
from ..tensor import Operand, Sides
from .gemm_site import dummy_wgrad, main_grad_of
from .operands import Call, gather_input, quantize_backward, quantize_forward, requantize_input
from .tensor_parallel import Pending


class Forward(NamedTuple):
    """y [..., N]; each site's wgrad operand of this rank's tokens, or None; each weight, quantized or plain."""

    y: torch.Tensor
    x: list[Operand | None]
    weights: list[Sides]


class Backward(NamedTuple):
    """The needed gradients; a dummy for a weight whose gradient was added to main_grad."""

    dx: torch.Tensor | None
    dw: list[torch.Tensor | None]
    dbias: torch.Tensor | None


def forward(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    call: Call,
    needs_wgrad: Sequence[bool],
) -> Forward:
    """y [..., N] from x [..., K], weights [N, K] each and a linear's bias [N]; and operands for backward."""
    tp = call.tp
    with without_autocast(x.device):
        matrix = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])  # [M, K]
        operands, saved, sides = quantize_forward(call.split(matrix), weights, call, needs_wgrad)
        rowwise = [side.rowwise for side in sides]
        y = _multiply("fprop", call, operands, rowwise, matrix, len(weights[0]), bias)  # [M of all ranks, N]
        sequence = x.shape[0] * (tp.size if tp.gathers_input else 1)
        if tp.gathers_gradient:
            y = tp.reduce_scatter(y).wait()
            sequence //= tp.size
    shape = (sequence, *x.shape[1:-1], y.shape[-1]) if x.ndim > 1 else (y.shape[-1],)
    # Not y.view: what an autograd function returns as a view of its own tensor cannot be changed in place.
    y = y if y.shape == shape else torch.ops.aten._unsafe_view.default(y, shape)
    return Forward(y, saved, sides)


def backward(
    grad_output: torch.Tensor,
    saved_x: Sequence[Operand | None],
    saved_w: Sequence[Operand | None],
    weights: Sequence[torch.Tensor],
    call: Call,
    needs_dgrad: bool,
    needs_wgrad: Sequence[bool],
    bias_dtype: torch.dtype | None = None,
) -> Backward:
    """Gradients of x (as [tokens, K]), of the weights and of the bias.

    Args:
        grad_output: [..., N].
        saved_x, saved_w: each site's columnwise operands; None where no GEMM needs them.
        weights: the parameters [N, K], for their main_grad.
        bias_dtype: dtype of dbias; None if it is not needed.
    """
    tp, inputs = call.tp, [*saved_x]
    # In shapes below, M counts all ranks' tokens once shards are gathered.
    dy = grad_output if grad_output.ndim == 2 else grad_output.reshape(-1, grad_output.shape[-1])  # [M, N]
    dbias = None
    if bias_dtype is not None:  # summed in float32 and rounded once, as torch sums 16-bit numbers
        dbias = dy.sum(0) if dy.dtype == bias_dtype else dy.sum(0, dtype=torch.float32).to(bias_dtype)
    rowwise, columnwise = quantize_backward(call.split(dy), call, needs_dgrad, needs_wgrad)
    for e, site in enumerate(call.sites):
        if needs_wgrad[e] and isinstance(plain := inputs[e], torch.Tensor):
            inputs[e] = requantize_input(plain, site, call)
    pending_x = gather_input(inputs[0], call) if tp.gathers_input and needs_wgrad[0] else None
    dx, pending_dx = None, None
    if needs_dgrad:  # [M, N] @ [K, N]^T
        dx = _multiply("dgrad", call, rowwise, saved_w, dy, weights[0].shape[1])
    if isinstance(columnwise[0], Pending):
        columnwise = [columnwise[0].wait()]
    if pending_x is not None:
        inputs = [pending_x.wait()]
    if dx is not None and tp.gathers_input:
        pending_dx = tp.reduce_scatter(dx, async_op=True)
    elif dx is not None and tp.reduce_dgrad:
        pending_dx = tp.all_reduce(dx, async_op=True)
    dw = _weight_gradients(weights, call, columnwise, inputs, needs_wgrad)
    return Backward(dx if pending_dx is None else pending_dx.wait(), dw, dbias)


# ---------------------------------------------------------------------------------------------------------- products


def _multiply(
    gemm: str,
    call: Call,
    a: Sequence[Any],
    b: Sequence[Any],
    like: torch.Tensor,
    cols: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear: a @ b^T (+ bias). Experts: a[e] @ b[e]^T, concatenated. Returns [T, cols] for ``like`` [T, ...]."""
    record = call.record or gemm != "fprop"
    if len(call.sites) == 1:
        return call.sites[0].multiply(gemm, a[0], b[0], like.dtype, bias, record=record)
    y = torch.empty(len(like), cols, dtype=like.dtype, device=like.device)
    _multiply_each(gemm, call, range(len(a)), a, b, call.split(y), record=record)
    return y


def _multiply_each(
    gemm: str,
    call: Call,
    these: Iterable[int],
    a: Sequence[Any],
    b: Sequence[Any],
    outs: Sequence[Any],
    *,
    record: bool = True,
    add: bool = False,
) -> None:
    """outs[e] = a[e] @ b[e]^T (add: +=) for these experts, by each site's plan; FP8 products of one backend in one call.

    An expert without tokens is skipped: it has no rows, or, in wgrad, a gradient of zeros.
    """
    together: dict[ModuleType, list[int]] = {}
    for e in these:
        site = call.sites[e]
        in_fp8, observer = site.plan.gemms[gemm] == "fp8", site.state.observer
        if not call.tokens[e]:
            if gemm == "wgrad" and not add:
                outs[e].zero_()
        elif in_fp8 and site.backend is not None and not ((add and observer) or site.batch_invariant):
            together.setdefault(site.backend, []).append(e)
        elif add:
            site.accumulate(gemm, a[e], b[e], outs[e], record=record)
        else:
            outs[e].copy_(site.multiply(gemm, a[e], b[e], outs[e].dtype, record=record))
    for backend, group in together.items():
        operands = [[operand[e] for e in group] for operand in (a, b, outs)]
        fast = gemm in call.sites[group[0]].state.fast_gemms
        backend.grouped_gemm(*operands, add=add, fast_accumulation=fast)
        for e in group:
            site = call.sites[e]
            site.state.counter.current.fp8_gemms += 1
            if (observer := site.state.observer) is not None:
                observer.product(ProductEvent(site.plan.name, gemm, a[e], b[e], outs[e], record))


# ------------------------------------------------------------------------------------------------------------- wgrad


def _weight_gradients(
    weights: Sequence[torch.Tensor],
    call: Call,
    dy: Sequence[Any],
    x: Sequence[Any],
    needs_wgrad: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Each weight's gradient [N, K] = dy[e] [N, M] @ x[e] [K, M]^T: None where not needed, a dummy where it was added to
    main_grad."""
    gradients: list[Any] = [None] * len(weights)
    wanted = [e for e, needs in enumerate(needs_wgrad) if needs]
    main_grads: dict[int, Any] = {
        e: main_grad for e in wanted if (main_grad := main_grad_of(weights[e])) is not None
    }
    plain = [e for e in wanted if e not in main_grads]
    if len(weights) == 1:
        site = call.sites[0]
        for e, main_grad in main_grads.items():
            site.accumulate("wgrad", dy[0], x[0], main_grad, zeros=site.may_overwrite(weights[e]))
        for e in plain:
            dtype = weights[e].dtype
            gradients[e] = site.multiply("wgrad", dy[0], x[0], site.wgrad_dtype(dtype)).to(dtype)
    else:
        buffers = [main_grads.get(e) for e in range(len(weights))]
        for group in _groups_by_buffer(main_grads):
            overwritten = [
                e for e in group if call.tokens[e] and call.sites[e].may_overwrite(weights[e], by_fp8=True)
            ]
            _multiply_each("wgrad", call, overwritten, dy, x, buffers)
            _multiply_each(
                "wgrad", call, [e for e in group if e not in overwritten], dy, x, buffers, add=True
            )
        for e in plain:
            dtype = call.sites[e].wgrad_dtype(weights[e].dtype)
            gradients[e] = torch.empty(weights[e].shape, dtype=dtype, device=weights[e].device)
        _multiply_each("wgrad", call, plain, dy, x, gradients)
        for e in plain:
            gradients[e] = gradients[e].to(weights[e].dtype)
    for e in main_grads:
        gradients[e] = dummy_wgrad(weights[e])
    return gradients


def _groups_by_buffer(main_grads: Mapping[int, torch.Tensor]) -> list[list[int]]:
    """Splits experts into groups in which no two share a main_grad (float32 [N, K]). Experts with one weight share it."""
    groups: list[dict[int, int]] = []
    for e, main_grad in main_grads.items():
        at = main_grad.data_ptr()
        group = next((group for group in groups if at not in group), None)
        if group is None:
            groups.append(group := {})
        group[at] = e
    return [list(group.values()) for group in groups]


def for_gradient(weight: torch.Tensor) -> torch.Tensor:
    """Returns what backward needs of a weight [N, K]: the parameter itself, which may have a main_grad.

    For a view or a computed weight: an uninitialised tensor of its shape, dtype and device. torch cannot swap a
    parameter that has views.
    """
    if weight.is_leaf and not weight._is_view():
        return weight
    return torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
