"""Forward and backward of the linear layer, without autograd.

    fprop  y [M, N]  = x  [M, K]   @ w  [N, K]^T        x, w    quantised rowwise
    dgrad  dx [M, K] = dy [M, N]   @ w  [N, K]          dy rowwise, w columnwise
    wgrad  dw [N, K] = dy [M, N]^T @ x  [M, K]          dy, x   columnwise

Per-tensor and square-block codes are the same in both directions; per-row and 1-wide blocks are quantised twice from high
precision, and only the columnwise side of the input outlives the forward.

With tensor parallelism the order is Megatron-Core's own, so that the network works while the cores do:

    column, sequence parallel:  gather x codes | dgrad | reduce-scatter dx | wgrad
    column:                                      dgrad | all-reduce dx     | wgrad
    row, sequence parallel:     gather dy codes (columnwise side) | dgrad | wgrad

Under sequence parallelism codes are gathered, never BF16, as long as a shard's tokens are whole blocks; otherwise the
quantisation waits until after a gather in high precision, and the site's notes (hence the report) say so.

Two callers put autograd around it: function.py's in eager mode, compiled.py's operators in compiled code. Neither
knows the other's way of saving, and both run these very lines, so their bits are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..backends.base import Region
from ..numerics.rule import Granularity
from ..plan.autocast_state import without_autocast
from ..quantizer import Casts, Quantizer, Wanted
from ..tensor import Float8Tensor, Operand, QuantizedSide, Sides
from .gemm_site import GemmSite
from .quantized_activation import QuantizedActivation
from .tensor_parallel import Pending, TensorParallel


class Call(NamedTuple):
    """What one forward was called with.

    Attributes:
        training: whether the layer is in training mode.
        record: whether its forward records at once (state/iteration.py); a backward always does.
        traced: what it keeps for backward crosses an operator, as plain codes and scales.
    """

    site: GemmSite
    tp: TensorParallel
    training: bool
    record: bool
    fresh_weight: bool
    save_original_input: bool
    traced: bool = False

    @property
    def gathers(self) -> bool:
        """Whether the input arrives as shards of tokens."""
        return self.tp.kind == "column" and self.tp.sequence_parallel


class Forward(NamedTuple):
    """What a forward gives: y; wgrad's operand, of this rank's tokens, or None; the weight, quantised or as it is."""

    y: torch.Tensor
    x: Operand | None
    weight: Sides


class Backward(NamedTuple):
    """The gradients that were asked for; of the weight, once its own was added to main_grad, a dummy."""

    dx: torch.Tensor | None
    dw: torch.Tensor | None
    dbias: torch.Tensor | None


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call, needs_wgrad: bool
) -> Forward:
    """y [..., N] of x [..., K], with what backward needs of it (``x`` only if there will be a wgrad)."""
    with without_autocast(x.device):
        return _forward(x, weight, bias, call, needs_wgrad)


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call, needs_wgrad: bool
) -> Forward:
    site, tp = call.site, call.tp
    site.note_forward()
    tokens = as_matrix(x)  # [M, K]
    operand, saved = quantize_input(tokens, call, needs_wgrad)  # [M of all ranks, K], [K, M]
    quantized_weight = site.weights.quantized(
        weight, fresh=call.fresh_weight, record=call.record, training=call.training
    )
    assert quantized_weight.rowwise is not None
    # [tokens, N]
    y = site.multiply("fprop", operand, quantized_weight.rowwise, x.dtype, bias, record=call.record)
    sequence = x.shape[0] * (tp.size if call.gathers else 1)
    if tp.kind == "row" and tp.sequence_parallel:
        y = tp.reduce_scatter(y).wait()
        sequence //= tp.size
    shape = (sequence, *x.shape[1:-1], y.shape[-1]) if x.ndim > 1 else (y.shape[-1],)
    return Forward(owned(y, shape), saved, quantized_weight)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as [tokens, K]; itself if it is."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def owned(y: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """y in another shape, over the same memory, and not a view: what an autograd function returns as a view of
    something that only it knows cannot be changed in place."""
    return y if y.shape == shape else torch.ops.aten._unsafe_view.default(y, shape)


def backward(
    grad_output: torch.Tensor,
    saved_x: Operand | None,
    saved_w: Operand | None,
    weight: torch.Tensor,
    call: Call,
    needs: tuple[bool, bool],
    bias_dtype: torch.dtype | None,
) -> Backward:
    """Gradients of x (as [tokens, K]), weight and bias.

    Args:
        grad_output: [..., N].
        saved_x, saved_w: the columnwise operands; None where no GEMM needs them.
        weight: the parameter, for its main_grad.
        needs: whether dx and dw are wanted.
        bias_dtype: dtype of dbias; None if it is not wanted.
    """
    site, tp = call.site, call.tp
    needs_dgrad, needs_wgrad = needs
    # Shapes below: M is the tokens of all ranks, once shards of them are gathered.
    dy = as_matrix(grad_output)  # [M, N]
    dbias = None if bias_dtype is None else bias_gradient(grad_output, bias_dtype)
    rowwise, pending_columnwise = quantize_grad_output(dy, call, needs_dgrad, needs_wgrad)
    if needs_wgrad and isinstance(saved_x, torch.Tensor):
        saved_x = requantize_input(saved_x, call)
    pending_x = _gather_input(saved_x, call) if needs_wgrad and call.gathers else None
    dx, pending_dx = None, None
    if needs_dgrad:
        assert rowwise is not None and saved_w is not None
        dx = site.multiply("dgrad", rowwise, saved_w, grad_output.dtype)  # [M, N] @ [K, N]^T
    columnwise = None
    if needs_wgrad:
        columnwise = (
            pending_columnwise.wait() if isinstance(pending_columnwise, Pending) else pending_columnwise
        )
        x_side = _columnwise_input(pending_x.wait(), call) if pending_x is not None else saved_x
    if dx is not None and call.gathers:
        pending_dx = tp.reduce_scatter(dx, async_op=True)
    elif dx is not None and tp.reduce_dgrad:
        pending_dx = tp.all_reduce(dx, async_op=True)
    dw = None
    if needs_wgrad:
        assert columnwise is not None and x_side is not None
        # [N, M] @ [K, M]^T
        if (main_grad := main_grad_of(weight)) is not None:
            site.accumulate("wgrad", columnwise, x_side, main_grad)
            dw = added_to_main_grad(weight)
        else:
            dw = site.multiply("wgrad", columnwise, x_side, site.wgrad_dtype(weight.dtype)).to(weight.dtype)
    if pending_dx is not None:
        dx = pending_dx.wait()
    return Backward(dx, dw, dbias)


def bias_gradient(grad_output: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sums [N] of grad_output [..., N] in float32, rounded once: one launch, but where float32 is to become 16 bits."""
    dy = as_matrix(grad_output)
    # Of 16-bit numbers torch sums in float32 and rounds the result itself.
    return dy.sum(0) if dy.dtype == dtype else dy.sum(0, dtype=torch.float32).to(dtype)


# ---------------------------------------------------------------------------------------------------- input, forward


def quantize_input(tokens: torch.Tensor, call: Call, needs_wgrad: bool) -> tuple[Operand, Operand | None]:
    """(operand of fprop, what wgrad will need: this rank's tokens, columnwise; None if there will be no wgrad)."""
    if isinstance(tokens, QuantizedActivation):
        side = tokens.side
        return side, derived(side, call, "input", record=call.record) if needs_wgrad else None
    site, tp, casts = call.site, call.tp, call.site.casts["input"]
    row = casts.rowwise
    wanted, plain = input_cast(tokens, call, needs_wgrad)
    keeps = wanted.direction == "both"
    if not call.gathers:
        done = casts(tokens, wanted.direction, record=call.record, for_product=not call.traced)
        return input_operands(tokens, call, done, plain)
    operand: Operand | None
    reduce_amax = tp.amax_reduction(site.state.counts)
    if row is not None and _shards_aligned(tokens.shape[0], row.rule.granularity):
        done = casts(tokens, wanted.direction, record=call.record, reduce_amax=reduce_amax)
        assert done.rowwise is not None
        return tp.gather_side(done.rowwise, by_column=False).wait(), done.columnwise if keeps else plain
    whole = operand = tp.all_gather(tokens).wait()
    if row is not None:
        site.notes.add(_misaligned_note("input", tokens.shape[0], row.rule.granularity))
        operand = casts(whole, "rowwise", record=call.record, for_product=True).rowwise
    assert operand is not None
    if not keeps:
        return operand, plain
    done = casts(tokens, "columnwise", record=call.record, reduce_amax=reduce_amax)
    return operand, done.columnwise


def derived(tokens: QuantizedSide, call: Call, role: str, *, record: bool) -> Operand | None:
    """wgrad's operand [features, M] of tokens [M, features] that came as codes: their values, exact in float32, quantised
    by wgrad's rule (docs/numerics.md, Derived codes)."""
    assert call.tp.kind == "none", "tokens are dispatched to experts, which gather none"
    quantizer = call.site.casts[role].columnwise
    assert quantizer is not None, "a wgrad in high precision would read values that were quantised"
    values = tokens.dequantize(torch.float32)
    region = _region(values, call) if role == "grad_output" and call.site.gradients.stochastic else None
    return quantizer(
        values, "columnwise", record=record, region=region, for_product=not call.traced
    ).columnwise


def input_cast(tokens: torch.Tensor, call: Call, needs_wgrad: bool) -> tuple[Wanted, torch.Tensor | None]:
    """(the cast of tokens [M, K] that are not gathered; [K, M], what wgrad will need, where that is no codes)"""
    casts = call.site.casts["input"]
    keeps = needs_wgrad and keeps_codes(tokens.shape[0], call)
    # Only where it is needed: asked for its transpose, a LazyTensor computes its values and writes them out.
    plain = tokens.t() if needs_wgrad and not keeps else None
    if call.record and not keeps:
        _record_late_cast(tokens, casts)
    return Wanted(casts, tokens, "both" if keeps else "rowwise", call.record), plain


def input_operands(
    tokens: torch.Tensor, call: Call, done: Float8Tensor, plain: torch.Tensor | None
) -> tuple[Operand, Operand | None]:
    """``quantize_input`` of tokens that are not gathered, from what ``input_cast`` wanted."""
    operand = tokens if call.site.casts["input"].rowwise is None else done.rowwise
    assert operand is not None
    return operand, done.columnwise if plain is None else plain


def keeps_codes(tokens: int, call: Call) -> bool:
    """Whether wgrad's operand is kept as codes of this rank's tokens, and not as the input itself."""
    quantizer = call.site.casts["input"].columnwise
    if quantizer is None or call.save_original_input:
        return False
    return not call.gathers or _shards_aligned(tokens, quantizer.rule.granularity)


def _shards_aligned(tokens: int, granularity: Granularity) -> bool:
    """Whether a shard of this many tokens holds whole blocks in both directions."""
    block = max(granularity.rows, granularity.cols)
    return granularity.is_tensor or granularity.cols == 0 or tokens % block == 0


def _misaligned_note(role: str, tokens: int, granularity: Granularity) -> str:
    return (
        f"sequence-parallel {role} gathered in high precision: shards of {tokens} tokens are not whole"
        f" {granularity} blocks"
    )


def _record_late_cast(tokens: torch.Tensor, casts: Casts) -> None:
    """Record now what wgrad's own cast would record. That cast comes in the backward or in a recomputation, and those
    record no amax of the input: the forward has done so."""
    column = casts.columnwise
    if column is not None and column.rule.delayed and column is not casts.rowwise:
        column.observe(tokens)


def requantize_input(saved: torch.Tensor, call: Call) -> Operand | None:
    """A saved plain input [K, M], quantised now if wgrad reads codes, and if codes made of a shard of the tokens are
    those that the gathered tokens would get; else as it is."""
    quantizer = call.site.casts["input"].columnwise
    if quantizer is None or (
        call.gathers and not _shards_aligned(saved.shape[1], quantizer.rule.granularity)
    ):
        return saved
    reduce_amax = call.tp.amax_reduction(call.site.state.counts) if call.gathers else None
    return quantizer(
        saved.t(), "columnwise", record=False, reduce_amax=reduce_amax, for_product=not call.gathers
    ).columnwise


def _gather_input(saved: Operand | None, call: Call) -> Pending:
    """Start collecting all ranks' tokens of the saved columnwise input [K, M]."""
    assert saved is not None
    if isinstance(saved, QuantizedSide):
        return call.tp.gather_side(saved, by_column=True, async_op=True)
    return call.tp.all_gather(saved.t(), async_op=True)


def _columnwise_input(gathered: Operand, call: Call) -> Operand | None:
    """wgrad's operand [K, M of all ranks] from what was gathered: codes [K, M] as they are; tokens [M, K] in high
    precision transposed, and quantised if wgrad reads codes."""
    if isinstance(gathered, QuantizedSide):
        return gathered
    quantizer = call.site.casts["input"].columnwise
    if quantizer is None:
        return gathered.t()
    return quantizer(gathered, "columnwise", record=False, for_product=True).columnwise


# -------------------------------------------------------------------------------------------- grad_output, backward


def quantize_grad_output(
    dy: torch.Tensor, call: Call, needs_dgrad: bool, needs_wgrad: bool
) -> tuple[Operand | None, Operand | Pending | None]:
    """(dgrad's operand [M, N], wgrad's operand [N, M] or its gather under way), over all ranks' tokens, of dy [M, N]."""
    if isinstance(dy, QuantizedActivation):
        side = dy.side
        made = derived(side, call, "grad_output", record=True) if needs_wgrad else None
        return side if needs_dgrad else None, made
    site, tp = call.site, call.tp
    gathers = tp.kind == "row" and tp.sequence_parallel
    if not gathers and not site.gradients.stochastic:
        wanted = gradient_cast(dy, call, needs_dgrad, needs_wgrad)
        done = wanted.casts(dy, "both", record=True, for_product=True)
        return gradient_operands(wanted, done, needs_dgrad, needs_wgrad)
    casts = site.casts["grad_output"]
    row, column = casts.rowwise if needs_dgrad else None, casts.columnwise if needs_wgrad else None
    late = [q for q in (row, column) if gathers and q and not _shards_aligned(len(dy), q.rule.granularity)]
    plain_row, plain_column = needs_dgrad and row is None, needs_wgrad and column is None
    plain = tp.all_gather(dy).wait() if gathers and (late or plain_row or plain_column) else dy
    rowwise: Operand | None = plain if plain_row else None
    columnwise: Operand | Pending | None = plain.t() if plain_column else None
    if row is None and column is None:
        return rowwise, columnwise
    region = _region(dy, call) if site.gradients.stochastic else None
    once = row is not None and row is column
    work: list[tuple[Quantizer | None, Any]] = (
        [(row, "both")] if once else [(row, "rowwise"), (column, "columnwise")]
    )
    for quantizer, direction in work:
        if quantizer is None:
            continue
        shards = gathers and quantizer not in late
        if quantizer in late:
            site.notes.add(_misaligned_note("grad_output", len(dy), quantizer.rule.granularity))
        done = quantizer(
            dy if shards else plain,
            direction,
            record=True,
            reduce_amax=tp.amax_reduction(site.state.counts) if shards else None,
            region=region and replace(region, row_offset=tp.rank * len(dy) if shards else 0),
            for_product=not shards,
        )
        sides = _gather_grad_output(done, tp) if shards else (done.rowwise, done.columnwise)
        rowwise, columnwise = sides[0] or rowwise, sides[1] or columnwise
    return rowwise, columnwise


def gradient_cast(dy: torch.Tensor, call: Call, needs_dgrad: bool, needs_wgrad: bool) -> Wanted:
    """The cast of dy [M, N] that is not gathered, and not rounded stochastically."""
    casts = call.site.casts["grad_output"]
    if not (needs_dgrad and needs_wgrad):
        casts = Casts(casts.rowwise if needs_dgrad else None, casts.columnwise if needs_wgrad else None)
    return Wanted(casts, dy, "both", True)


def gradient_operands(
    wanted: Wanted, done: Float8Tensor, needs_dgrad: bool, needs_wgrad: bool
) -> tuple[Operand | None, Operand | None]:
    """``quantize_grad_output`` from what ``gradient_cast`` wanted."""
    plain_row, plain_column = (
        needs_dgrad and wanted.casts.rowwise is None,
        needs_wgrad and wanted.casts.columnwise is None,
    )
    return wanted.x if plain_row else done.rowwise, wanted.x.t() if plain_column else done.columnwise


def _gather_grad_output(
    quantized: Float8Tensor, tp: TensorParallel
) -> tuple[QuantizedSide | None, QuantizedSide | Pending | None]:
    """Both sides of all ranks' tokens: the rowwise one is waited for, since dgrad comes next; the columnwise one arrives
    while dgrad runs."""
    row, column = quantized.rowwise, quantized.columnwise
    gathered_row = None if row is None else tp.gather_side(row, by_column=False).wait()
    if column is None:
        return gathered_row, None
    if gathered_row is not None and column.granularity.symmetric:
        return gathered_row, gathered_row.transposed()
    return gathered_row, tp.gather_side(column, by_column=True, async_op=True)


def _region(dy: torch.Tensor, call: Call) -> Region:
    """Where dy [M, N] lies in the matrix of the whole group, which names the random bits of each element. It has all
    rows; a column-parallel rank has some of the columns."""
    tp, cols = call.tp, dy.shape[1]
    by_column = tp.kind == "column"
    return call.site.gradients.next_region(
        0,
        tp.rank * cols if by_column else 0,
        cols * (tp.size if by_column else 1),
    )


# ------------------------------------------------------------------------------------------------------ wgrad


def main_grad_of(weight: torch.Tensor) -> torch.Tensor | None:
    """The buffer [N, K] that the weight's gradient is added to, if it has one (Megatron-Core's fused wgrad); ValueError
    if it has another shape."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is not None and main_grad.shape != weight.shape:
        raise ValueError(
            f"a main_grad of shape {tuple(main_grad.shape)} is no sum of gradients of a weight {tuple(weight.shape)}:"
            " give it the weight's shape"
        )
    return main_grad


def for_gradient(weight: torch.Tensor) -> torch.Tensor:
    """Returns what a backward needs of a weight [N, K]: the parameter itself, which may have a main_grad.

    Of a view or a computed weight it needs shape, dtype and device alone: torch cannot swap a parameter that has views.
    """
    if weight.is_leaf and not weight._is_view():
        return weight
    return torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape)


def added_to_main_grad(weight: Any) -> torch.Tensor:
    """What autograd gets where dw was added to main_grad: a dummy that DDP will drop."""
    weight.grad_added_to_main_grad = True
    # Not None: with overlapped reduction DDP needs the gradient hook to run, and looks at a gradient's presence.
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)
