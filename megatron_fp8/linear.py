"""The linear layer's autograd function: three GEMMs, what is saved between them, and when the network is used.

    fprop  y [M, N]  = x  [M, K]   @ w  [N, K]^T        x, w    quantised rowwise
    dgrad  dx [M, K] = dy [M, N]   @ w  [N, K]          dy rowwise, w columnwise
    wgrad  dw [N, K] = dy [M, N]^T @ x  [M, K]          dy, x   columnwise

Saved for backward: the input's columnwise codes (one byte a value, and scales) and the weight's, not BF16. Per-tensor and
square-block codes are the same in both directions; per-row and 1-wide blocks are quantised twice from high precision,
and only the columnwise side of the input outlives the forward.

With tensor parallelism the order is Megatron-Core's own, so that the network works while the cores do:

    column, sequence parallel:  gather x codes | dgrad | reduce-scatter dx | wgrad
    column:                                      dgrad | all-reduce dx     | wgrad
    row, sequence parallel:     gather dy codes (columnwise side) | dgrad | wgrad

Under sequence parallelism codes are gathered, never BF16, as long as a shard's tokens are whole blocks; otherwise the
quantisation waits until after a gather in high precision, and the site's notes (hence the report) say so.

The function is told its GEMMs (a GemmSite) and its communication (a TensorParallel); it chooses neither. Rejected: the
forty loose arguments and the flags for every kernel that such functions grow elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .context import in_recompute
from .recipe import Granularity
from .site import GemmSite, Operand, side_of
from .tensor import Float8Tensor, QuantizedSide
from .tp import Pending, TensorParallel

_ALONE = TensorParallel()


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    site: GemmSite,
    tp: TensorParallel = _ALONE,
    *,
    training: bool = True,
    fresh_weight: bool = False,
    save_original_input: bool = False,
) -> torch.Tensor:
    """y = x @ weight^T + bias with the GEMMs of ``site``.

    Args:
        x: [..., K]; leading dimensions are tokens. With column and sequence parallelism: this rank's tokens.
        weight: [N, K], this rank's part. If it has ``main_grad``, wgrad (float32) is added to it and the autograd
            gradient is an uninitialised dummy, as Megatron-Core's DistributedDataParallel expects of a fused wgrad.
        bias: [N], added in float32 before the one rounding; its gradient is the float32 sum of dy, unquantised. None
            with row parallelism, where it belongs after the sum over ranks.
        site, tp: the GEMMs and the communication.
        training: amaxes and health are recorded (a recomputed forward records nothing).
        fresh_weight: quantise the weight again even if this iteration has done so.
        save_original_input: keep x itself for wgrad and quantise it again there, for callers that recompute x anyway.

    Returns:
        [..., N] in x's dtype. NaN in x or weight gives NaN where it is multiplied; Inf saturates and is
        counted (under MX's largest scale the saturated value itself is beyond bfloat16).

    Raises:
        ValueError: x's last dimension is not the weight's.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{site.plan.name}: input {tuple(x.shape)} does not fit weight {tuple(weight.shape)};"
            f" its last dimension must be {weight.shape[1]}"
        )
    assert bias is None or tp.kind != "row", (
        "each rank would add a row-parallel bias, and their sum would count it again"
    )
    record = training and not in_recompute()
    call = _Call(site, tp, record, fresh_weight, save_original_input, torch.is_grad_enabled())
    return _LinearFunction.apply(x, weight, bias, call)


@dataclass(frozen=True)
class _Call:
    """What one forward was called with."""

    site: GemmSite
    tp: TensorParallel
    record: bool
    fresh_weight: bool
    save_original_input: bool
    grad_enabled: bool


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: _Call
    ) -> torch.Tensor:
        site, tp = call.site, call.tp
        needs_dgrad, needs_wgrad, _, _ = (need and call.grad_enabled for need in ctx.needs_input_grad)
        tokens = x.reshape(-1, x.shape[-1])
        gathers = tp.kind == "column" and tp.sequence_parallel
        operand, saved = _quantize_input(tokens, call, gathers, needs_wgrad)
        quantized_weight = site.quantized_weight(weight, fresh=call.fresh_weight, record=call.record)
        y = site.multiply("fprop", operand, side_of(quantized_weight, "rowwise"), x.dtype, bias)

        ctx.call, ctx.x_shape, ctx.weight, ctx.use_bias = call, x.shape, weight, bias is not None
        ctx.bias_dtype = None if bias is None else bias.dtype
        weight_side = side_of(quantized_weight, "columnwise") if needs_dgrad else None
        kept_x = _Kept.of(saved if needs_wgrad else None)
        kept_w = _Kept.of(weight_side)
        ctx.kept = (kept_x.spec, kept_w.spec)
        ctx.save_for_backward(*kept_x.tensors, *kept_w.tensors)
        sequence = x.shape[0] * (tp.size if gathers else 1)
        if tp.kind == "row" and tp.sequence_parallel:
            y = tp.reduce_scatter(y).wait()
            sequence //= tp.size
        return y.view(sequence, *x.shape[1:-1], y.shape[-1]) if x.ndim > 1 else y.view(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        site, tp = call.site, call.tp
        needs_dgrad, needs_wgrad, needs_dbias, _ = ctx.needs_input_grad
        tensors = list(ctx.saved_tensors)
        saved_x, saved_w = (_Kept.restore(spec, tensors) for spec in ctx.kept)

        dy = grad_output.reshape(-1, grad_output.shape[-1])
        dbias = dy.to(torch.float32).sum(0).to(ctx.bias_dtype) if ctx.use_bias and needs_dbias else None
        rowwise, pending_columnwise = _quantize_grad_output(dy, call, needs_dgrad, needs_wgrad)

        gathers = tp.kind == "column" and tp.sequence_parallel
        if needs_wgrad and isinstance(saved_x, torch.Tensor):
            saved_x = _requantize_input(saved_x, call, gathers)
        pending_x = _gather_input(saved_x, call) if needs_wgrad and gathers else None
        dx, pending_dx = None, None
        if needs_dgrad:
            assert rowwise is not None and saved_w is not None
            dx = site.multiply("dgrad", rowwise, saved_w, grad_output.dtype)
        columnwise = None
        if needs_wgrad:
            columnwise = (
                pending_columnwise.wait() if isinstance(pending_columnwise, Pending) else pending_columnwise
            )
            x_side = _columnwise_input(pending_x.wait(), call) if pending_x is not None else saved_x
        if dx is not None and gathers:
            pending_dx = tp.reduce_scatter(dx, async_op=True)
        elif dx is not None and tp.reduce_dgrad:
            pending_dx = tp.all_reduce(dx, async_op=True)
        dw = None
        if needs_wgrad:
            assert columnwise is not None and x_side is not None
            dw = _accumulate(ctx.weight, site.multiply("wgrad", columnwise, x_side, torch.float32))
        if pending_dx is not None:
            dx = pending_dx.wait()
        return None if dx is None else dx.view(ctx.x_shape), dw, dbias, None


# ---------------------------------------------------------------------------------------------------- input, forward


def _quantize_input(
    tokens: torch.Tensor, call: _Call, gathers: bool, needs_wgrad: bool
) -> tuple[Operand, Operand]:
    """(operand of fprop, what wgrad will need: this rank's tokens, columnwise)."""
    site, tp = call.site, call.tp
    quantizer = site.quantizers["input"]
    if quantizer is None:
        operand = tp.all_gather(tokens).wait() if gathers else tokens
        return operand, tokens.t()
    direction = (
        "both" if needs_wgrad and _wgrad_takes_codes(call) and not call.save_original_input else "rowwise"
    )
    if not gathers:
        quantized = quantizer(tokens, direction, record=call.record)  # type: ignore[arg-type]
        return side_of(quantized, "rowwise"), side_of(
            quantized, "columnwise"
        ) if direction == "both" else tokens.t()
    if not _shards_aligned(tokens.shape[0], quantizer.rule.granularity):
        site.notes.add(_misaligned_note("input", tokens.shape[0], quantizer.rule.granularity))
        gathered = tp.all_gather(tokens).wait()
        return side_of(quantizer(gathered, "rowwise", record=call.record), "rowwise"), tokens.t()
    reduce_amax = tp.amax_reduction(site.state.counts)
    quantized = quantizer(tokens, direction, record=call.record, reduce_amax=reduce_amax)  # type: ignore[arg-type]
    assert quantized.rowwise is not None
    operand = tp.gather_side(quantized.rowwise, by_column=False).wait()
    return operand, side_of(quantized, "columnwise") if direction == "both" else tokens.t()


def _shards_aligned(tokens: int, granularity: Granularity) -> bool:
    """Whether a shard of this many tokens holds whole blocks in both directions."""
    block = max(granularity.rows, granularity.cols)
    return granularity.is_tensor or granularity.cols == 0 or tokens % block == 0


def _misaligned_note(role: str, tokens: int, granularity: Granularity) -> str:
    return (
        f"sequence-parallel {role} gathered in high precision: shards of {tokens} tokens are not whole"
        f" {granularity} blocks"
    )


def _requantize_input(saved: torch.Tensor, call: _Call, gathers: bool) -> Operand:
    """A saved plain input [K, M], quantised now if wgrad is FP8 and shards' codes are those of the whole."""
    quantizer = call.site.quantizers["input"]
    if quantizer is None or not _wgrad_takes_codes(call):
        return saved
    if gathers and not _shards_aligned(saved.shape[1], quantizer.rule.granularity):
        return saved
    reduce_amax = call.tp.amax_reduction(call.site.state.counts) if gathers else None
    return side_of(quantizer(saved.t(), "columnwise", record=False, reduce_amax=reduce_amax), "columnwise")


def _wgrad_takes_codes(call: _Call) -> bool:
    """Whether wgrad reads the quantised input (also where only grad_output stays in high precision)."""
    return call.site.plan.gemms["wgrad"] == "fp8" or call.site.quantizers["grad_output"] is None


def _gather_input(saved: Operand | None, call: _Call) -> Pending:
    """Start collecting all tokens of the saved columnwise input."""
    assert saved is not None
    if isinstance(saved, QuantizedSide):
        return call.tp.gather_side(saved, by_column=True, async_op=True)
    return call.tp.all_gather(saved.t(), async_op=True)


def _columnwise_input(gathered: Operand, call: _Call) -> Operand:
    """wgrad's operand from what was gathered: codes as they are; high precision quantised now if wgrad is FP8."""
    if isinstance(gathered, QuantizedSide):
        return gathered
    quantizer = call.site.quantizers["input"]
    if quantizer is None or not _wgrad_takes_codes(call):
        return gathered.t()
    return side_of(quantizer(gathered, "columnwise", record=False), "columnwise")


# -------------------------------------------------------------------------------------------- grad_output, backward


def _quantize_grad_output(
    dy: torch.Tensor, call: _Call, needs_dgrad: bool, needs_wgrad: bool
) -> tuple[Operand | None, Operand | Pending | None]:
    """(dgrad's operand, wgrad's operand or its gather under way), over all tokens."""
    site, tp = call.site, call.tp
    quantizer = site.quantizers["grad_output"]
    gathers = tp.kind == "row" and tp.sequence_parallel
    if quantizer is None:
        dy = tp.all_gather(dy).wait() if gathers else dy
        return dy, dy.t()
    fp8_wgrad = site.plan.gemms["wgrad"] == "fp8" or site.quantizers["input"] is None
    wants_row, wants_column = needs_dgrad, needs_wgrad and fp8_wgrad
    plain_wgrad = needs_wgrad and not fp8_wgrad
    if not (wants_row or wants_column):
        dy = tp.all_gather(dy).wait() if gathers else dy
        return None, dy.t() if plain_wgrad else None
    direction: Any = "both" if wants_row and wants_column else "rowwise" if wants_row else "columnwise"
    misaligned = gathers and not _shards_aligned(dy.shape[0], quantizer.rule.granularity)
    plain = dy
    if gathers and (misaligned or plain_wgrad):
        plain = tp.all_gather(dy).wait()
    if misaligned:
        site.notes.add(_misaligned_note("grad_output", dy.shape[0], quantizer.rule.granularity))
    whole = plain if misaligned else dy
    shards = gathers and not misaligned
    quantized = quantizer(
        whole,
        direction,
        record=True,
        reduce_amax=tp.amax_reduction(site.state.counts) if shards else None,
        region=_region(whole, call, shards),
    )
    columnwise: Operand | Pending | None = plain.t() if plain_wgrad else None
    if not shards:
        row = quantized.rowwise if wants_row else None
        return row, quantized.columnwise if wants_column else columnwise
    return _gather_grad_output(quantized, call, columnwise)


def _gather_grad_output(
    quantized: Float8Tensor, call: _Call, columnwise: Operand | Pending | None
) -> tuple[Operand | None, Operand | Pending | None]:
    """All tokens' sides: the rowwise one now, since dgrad waits for it; the columnwise one while dgrad runs."""
    tp = call.tp
    row, column = quantized.rowwise, quantized.columnwise
    gathered_row = None if row is None else tp.gather_side(row, by_column=False).wait()
    if column is None:
        return gathered_row, columnwise
    if gathered_row is not None and column.granularity.symmetric:
        return gathered_row, gathered_row.transposed()
    return gathered_row, tp.gather_side(column, by_column=True, async_op=True)


def _region(dy: torch.Tensor, call: _Call, shards: bool) -> Any:
    """Where dy lies in the matrix that all ranks share: column-parallel ranks hold columns of it, token shards rows."""
    tp, (rows, cols) = call.tp, dy.shape
    by_column = tp.kind == "column"
    return call.site.next_region(
        tp.rank * rows if shards else 0,
        tp.rank * cols if by_column else 0,
        cols * (tp.size if by_column else 1),
    )


# ------------------------------------------------------------------------------------------------- saving, wgrad


@dataclass(frozen=True)
class _Kept:
    """An operand taken apart into tensors for save_for_backward and the facts that put it together again."""

    tensors: tuple[torch.Tensor, ...]
    spec: tuple[Granularity, bool, bool] | str | None

    @staticmethod
    def of(operand: Operand | None) -> _Kept:
        if operand is None:
            return _Kept((), None)
        if isinstance(operand, QuantizedSide):
            return _Kept(
                (operand.codes, operand.scale_inv), (operand.granularity, operand.pow2, operand.finite)
            )
        return _Kept((operand,), "plain")

    @staticmethod
    def restore(
        spec: tuple[Granularity, bool, bool] | str | None, tensors: list[torch.Tensor]
    ) -> Operand | None:
        """The operand again; takes its tensors off the front of the list."""
        if spec is None:
            return None
        if isinstance(spec, str):
            return tensors.pop(0)
        codes, scale_inv = tensors.pop(0), tensors.pop(0)
        return QuantizedSide(codes, scale_inv, *spec)


def _accumulate(weight: torch.Tensor, dw: torch.Tensor) -> torch.Tensor:
    """The gradient autograd gets: dw itself, or, once dw was added to main_grad, a dummy that DDP will drop."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or not hasattr(weight, "grad_added_to_main_grad"):
        return dw.to(weight.dtype)
    main_grad.add_(dw)
    weight.grad_added_to_main_grad = True
    # Not None: with overlapped reduction DDP needs the gradient hook to run, and looks at a gradient's presence.
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)
