"""Operands of a linear's GEMMs: casts of input, weight and grad_output, and gathers.

Per-tensor and square-block codes are the same in both directions; per-row and 1-wide blocks are quantized twice from
high precision, and only the columnwise side of the input outlives the forward. All casts of a forward or a backward
are made in one call.

Tokens that were dispatched to experts in FP8 are fprop's or dgrad's operand as they are. wgrad's is derived: they are
decoded exactly in float32 and quantized by wgrad's rule (docs/numerics.md, Derived codes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..backends.base import Region
from ..quantizer import CastJob, Casts, Quantizer, cast_each
from ..tensor import Operand, QuantizedSide, Sides
from .amax_recorder import DeferredRecord
from .gemm_site import GemmSite
from .quantized_tokens import QuantizedTokens
from .tensor_parallel import ALONE, Pending, TensorParallel


class Call(NamedTuple):
    """Arguments of one forward.

    Attributes:
        sites: a linear's one, or each expert's.
        training: whether the layer is in training mode.
        fresh_weights: of each site: quantize the weight again even if this iteration has done so.
        save_original_input: keep x itself for wgrad, and quantize it again there.
        tp: the communication of a linear.
        tokens: of each expert; unused for a linear.
        record: whether its forward records now (state/iteration.py); a backward always does.
        as_operator: whether it runs as an operator (compiled.py), which returns plain codes for backward.
        with_gradients: whether a backward may follow.
        deferred: an evaluation forward's record, which its backward makes.
    """

    sites: Sequence[GemmSite]
    training: bool
    fresh_weights: Sequence[bool]
    save_original_input: bool = False
    tp: TensorParallel = ALONE
    tokens: Sequence[int] = ()
    record: bool = False
    as_operator: bool = False
    with_gradients: bool = True
    deferred: DeferredRecord | None = None

    def split(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each site's rows of a matrix [T, features]."""
        return (rows,) if len(self.sites) == 1 else rows.split(list(self.tokens))


# -------------------------------------------------------------------------------------------------------------- casts

# An operand whose GEMM reads all ranks' tokens is gathered in codes if a shard's tokens are whole blocks, otherwise in
# high precision and then quantized; the site's notes, and so the report, say so.
LOCAL, GATHER_CODES, GATHER_VALUES = "local", "gather codes", "gather values"


def _gather_route(quantizer: Quantizer, tokens: int) -> str:
    """GATHER_CODES or GATHER_VALUES for shards of so many tokens."""
    granularity = quantizer.rule.granularity
    whole = granularity.is_tensor or granularity.cols == 0
    return GATHER_CODES if whole or tokens % max(granularity.rows, granularity.cols) == 0 else GATHER_VALUES


def keeps_codes(tokens: int, site: GemmSite, call: Call) -> bool:
    """Whether codes of this rank's tokens are saved for wgrad, rather than the input itself."""
    quantizer = site.casts["input"].columnwise
    if quantizer is None or call.save_original_input:
        return False
    return not call.tp.gathers_input or _gather_route(quantizer, tokens) == GATHER_CODES


def _casts_of(
    role: str, x: torch.Tensor, site: GemmSite, call: Call, needs_row: bool, needs_column: bool
) -> tuple[torch.Tensor, list[tuple[str, CastJob]]]:
    """The casts of this rank's tokens x [M, features], 'input' or 'grad_output', to the needed sides.

    Returns all ranks' tokens if any cast or GEMM reads them in high precision, else x; the casts, each with its route.
    """
    tp, casts, of_input = call.tp, site.casts[role], role == "input"
    row, column = casts.rowwise if needs_row else None, casts.columnwise if needs_column else None
    parts, record, region = Casts(row, column).parts(), call.record or not of_input, None
    if not of_input and site.stochastic and parts:
        region = _region(x, site, call)
    if not (tp.gathers_input if of_input else tp.gathers_gradient):
        for_product = not (of_input and call.as_operator and column is not None)
        return x, [(LOCAL, CastJob(*part, x, record, None, region, for_product)) for part in parts]
    routes = [_gather_route(quantizer, len(x)) for quantizer, _ in parts]
    plain = (needs_row and row is None) or (needs_column and column is None)
    whole: torch.Tensor = tp.all_gather(x).wait() if plain or GATHER_VALUES in routes else x
    jobs = []
    for route, part in zip(routes, parts, strict=True):
        if route == GATHER_CODES:
            of_shard = region and replace(region, row_offset=tp.rank * len(x))
            reduce_amax = tp.amax_reduction(site.state.counts)
            jobs.append((route, CastJob(*part, x, record, reduce_amax, of_shard, for_product=False)))
        else:
            site.notes.add(_misaligned_note(role, len(x), part[0]))
            jobs.append((route, CastJob(*part, whole, record, None, region)))
    return whole, jobs


def _derived_casts(role: str, tokens: QuantizedSide, site: GemmSite, call: Call) -> list[tuple[str, CastJob]]:
    """The cast of wgrad's operand from codes of tokens [M, features] that were dispatched to an expert."""
    assert call.tp.kind == "none", "tokens are dispatched to experts, which gather none"
    assert site.casts[role].columnwise is not None, (
        "a wgrad in high precision would read values that were quantized"
    )
    return _casts_of(role, tokens.dequantize(), site, call, False, True)[1]


def _misaligned_note(role: str, tokens: int, quantizer: Quantizer) -> str:
    return (
        f"sequence-parallel {role} gathered in high precision: shards of {tokens} tokens are not whole"
        f" {quantizer.rule.granularity} blocks"
    )


def _region(dy: torch.Tensor, site: GemmSite, call: Call) -> Region:
    """Position of dy [M, N] in the whole group's matrix, by which each element's random bits are chosen. dy has all rows;
    a column-parallel rank has some of the columns."""
    tp, cols = call.tp, dy.shape[1]
    if tp.kind == "column":
        return site.next_region(0, tp.rank * cols, cols * tp.size)
    return site.next_region(0, 0, cols)


# ------------------------------------------------------------------------------------------------------------- forward


def quantize_forward(
    parts: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], call: Call, needs_wgrad: Sequence[bool]
) -> tuple[list[Operand], list[Operand | None], list[Sides]]:
    """Casts inputs and weights for fprop, and inputs for wgrad.

    Returns lists by site: fprop's operand of all ranks' tokens; wgrad's operand of this rank's tokens, columnwise, or
    None; both sides of the weight. For an expert without tokens it casts the weight alone: a history may need its amax.

    Args:
        parts: each site's tokens [M, K].
        weights: [N, K] each.
    """
    operands: list[Operand] = [*parts]
    saved: list[Operand | None] = [None] * len(parts)
    sides: dict[int, Sides] = {}
    inputs: list[tuple[int, str, CastJob]] = []
    of_weights: dict[int, list[CastJob]] = {}
    for e, (part, weight, site) in enumerate(zip(parts, weights, call.sites, strict=True)):
        site.has_run = True
        if site.uncast and call.record:
            observe_uncast(site, "input", part)
            observe_uncast(site, "weight", weight)
        if len(parts) == 1 or len(part):
            if isinstance(part, QuantizedTokens):
                operands[e] = side = part.side
                of_part = _derived_casts("input", side, site, call) if needs_wgrad[e] else []
            else:
                keeps = needs_wgrad[e] and keeps_codes(len(part), site, call)
                operands[e], of_part = _casts_of("input", part, site, call, True, keeps)
                if not keeps:
                    # Only if needed: the transpose of a LazyTensor computes its values and writes them.
                    saved[e] = part.t() if needs_wgrad[e] else None
                    _record_deferred_cast(part, site, call)
            inputs += [(e, *job) for job in of_part]
        ready = site.weights.prepare(
            weight, fresh=call.fresh_weights[e], training=call.training, record=call.record
        )
        if isinstance(ready, Sides):
            sides[e] = ready
        else:
            of_weights[e] = ready
    with torch.inference_mode(False), torch.no_grad():  # codes that a later backward can save
        jobs = [job for *_, job in inputs]
        made = iter(cast_each(jobs + [job for of_weight in of_weights.values() for job in of_weight]))
        for e, route, _ in inputs:
            done = next(made)
            if (row := done.rowwise) is not None:
                gathers = route == GATHER_CODES
                operands[e] = call.tp.gather_side(row, by_column=False).wait() if gathers else row
            saved[e] = done.columnwise or saved[e]
        for e, of_weight in of_weights.items():
            tensors = [next(made) for _ in of_weight]
            take = call.sites[e].weights.take
            sides[e] = take(
                weights[e], tensors, training=call.training, record=call.record, keep=call.as_operator
            )
    return operands, saved, [sides[e] for e in range(len(parts))]


def observe_uncast(site: GemmSite, role: str, x: torch.Tensor) -> None:
    """Records the amax of an operand [rows, cols] for delayed scales that this call's GEMMs do not use."""
    for quantizer in site.uncast.get(role, ()):
        quantizer.observe(x)


def _record_deferred_cast(tokens: torch.Tensor, site: GemmSite, call: Call) -> None:
    """Records the amax of wgrad's own cast, which runs in backward or in a recomputation. Casts there do not record
    the input."""
    casts = site.casts["input"]
    column = casts.columnwise
    if call.record and column is not None and column.rule.delayed and column is not casts.rowwise:
        column.observe(tokens)


# ------------------------------------------------------------------------------------------------------------ backward


def requantize_input(saved: torch.Tensor, site: GemmSite, call: Call) -> Operand | None:
    """Quantizes a saved plain input [K, M] for wgrad.

    Returns it unchanged if wgrad reads high precision, or if the cast has to follow the gather.
    """
    quantizer, gathers = site.casts["input"].columnwise, call.tp.gathers_input
    if quantizer is None or (gathers and _gather_route(quantizer, saved.shape[1]) == GATHER_VALUES):
        return saved
    reduce_amax = call.tp.amax_reduction(site.state.counts) if gathers else None
    job = CastJob(quantizer, "columnwise", saved.t(), False, reduce_amax, for_product=not gathers)
    return cast_each([job])[0].columnwise


def gather_input(saved: Operand | None, call: Call) -> Pending:
    """Starts gathering all ranks' tokens of the saved columnwise input [K, M]. The result is wgrad's operand."""
    assert saved is not None
    if isinstance(saved, QuantizedSide):
        return call.tp.gather_side(saved, by_column=True, async_op=True)
    tokens = call.tp.all_gather(saved.t(), async_op=True)
    quantizer = call.sites[0].casts["input"].columnwise
    if quantizer is None:
        return Pending([], lambda: tokens.wait().t())
    cast = lambda: cast_each([CastJob(quantizer, "columnwise", tokens.wait(), False)])  # noqa: E731
    return Pending([], lambda: cast()[0].columnwise)


def quantize_backward(
    parts: Sequence[torch.Tensor], call: Call, needs_dgrad: bool, needs_wgrad: Sequence[bool]
) -> tuple[list[Operand | None], list[Any]]:
    """Casts grad_output for dgrad and wgrad. ``parts``: each site's [M, N].

    Returns lists by site, of all ranks' tokens: dgrad's operand [M, N]; wgrad's [N, M], or its pending gather.
    """
    rowwise: list[Operand | None] = [None] * len(parts)
    columnwise: list[Any] = [None] * len(parts)
    jobs: list[tuple[int, str, CastJob]] = []
    for e, (dy, site) in enumerate(zip(parts, call.sites, strict=True)):
        idle = len(parts) > 1 and not len(dy)
        if site.uncast and not idle:
            observe_uncast(site, "grad_output", dy)
        if idle and not site.stochastic:  # an expert without tokens uses up its random bits, too
            continue
        if isinstance(dy, QuantizedTokens):
            side = dy.side
            rowwise[e] = side if needs_dgrad else None
            of_dy = _derived_casts("grad_output", side, site, call) if needs_wgrad[e] else []
        else:
            whole, of_dy = _casts_of("grad_output", dy, site, call, needs_dgrad, needs_wgrad[e])
            rowwise[e] = whole if needs_dgrad else None
            if needs_wgrad[e] and site.casts["grad_output"].columnwise is None:
                columnwise[e] = whole.t()
        jobs += [(e, *job) for job in of_dy]
    for (e, route, _), done in zip(jobs, cast_each([job for *_, job in jobs]), strict=True):
        row: Any = done.rowwise
        column: Any = done.columnwise
        if route == GATHER_CODES:
            row, column = _gather_gradient(row, column, call.tp)
        rowwise[e], columnwise[e] = row or rowwise[e], column or columnwise[e]
    return rowwise, columnwise


def _gather_gradient(
    row: QuantizedSide | None, column: QuantizedSide | None, tp: TensorParallel
) -> tuple[QuantizedSide | None, QuantizedSide | Pending | None]:
    """Gathers both sides of all ranks' tokens. Waits for the rowwise side, since dgrad comes next; the columnwise side
    arrives while dgrad runs."""
    gathered_row = None if row is None else tp.gather_side(row, by_column=False).wait()
    if column is None:
        return gathered_row, None
    if gathered_row is not None and column.granularity.symmetric:
        return gathered_row, gathered_row.transposed()
    return gathered_row, tp.gather_side(column, by_column=True, async_op=True)
