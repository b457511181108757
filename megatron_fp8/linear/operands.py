"""Operands of a linear's GEMMs: casts of input, weight and grad_output, and gathers.

Per-tensor and square-block codes are the same in both directions; per-row and 1-wide blocks are quantized twice from
high precision, and only the columnwise side of the input outlives the forward. All casts of a forward or a backward
are made in one call, except gathered ones and those with stochastic rounding.

Under sequence parallelism codes are gathered if a shard's tokens are whole blocks. Otherwise tokens are gathered in high
precision and then quantized; the site's notes, and so the report, say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..backends.base import Region
from ..numerics.rule import Granularity
from ..quantizer import CastJob, Casts, Quantizer, cast_each
from ..tensor import Float8Tensor, Operand, QuantizedSide, Sides
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
    """

    sites: Sequence[GemmSite]
    training: bool
    fresh_weights: Sequence[bool]
    save_original_input: bool = False
    tp: TensorParallel = ALONE
    tokens: Sequence[int] = ()
    record: bool = False
    as_operator: bool = False

    def split(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each site's rows of a matrix [T, features]."""
        return (rows,) if len(self.sites) == 1 else rows.split(list(self.tokens))


# ------------------------------------------------------------------------------------------------------------ forward


def quantize_forward(
    parts: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], call: Call, needs_wgrad: Sequence[bool]
) -> tuple[list[Operand], list[Operand | None], list[Sides]]:
    """Returns for each site fprop's operand; wgrad's columnwise operand of this rank's tokens; the weight.

    For an expert without tokens only the weight is cast, because a history may need its amax.

    Args:
        parts: each site's tokens [M, K].
        weights: [N, K] each.
    """
    operands: list[Operand] = [*parts]
    saved: list[Operand | None] = [None] * len(parts)
    sides: list[Sides | None] = [None] * len(parts)
    jobs: list[tuple[CastJob, int, bool]] = []  # a cast, its site, and whether it is of the weight
    for e, (part, weight, site) in enumerate(zip(parts, weights, call.sites, strict=True)):
        site.has_run = True
        if site.uncast and call.record:
            observe_uncast(site, "input", part)
            observe_uncast(site, "weight", weight)
        if len(parts) == 1 or len(part):
            if isinstance(part, QuantizedTokens):
                operands[e] = side = part.side
                saved[e] = derived(side, site, call, "input", record=call.record) if needs_wgrad[e] else None
            elif call.tp.gathers_input:
                operands[e], saved[e] = _gathered_input(part, site, call, needs_wgrad[e])
            else:
                job, saved[e] = _input_job(part, site, call, needs_wgrad[e])
                jobs.append((job, e, False))
        ready = site.weights.prepare(
            weight, fresh=call.fresh_weights[e], training=call.training, record=call.record
        )
        if isinstance(ready, CastJob):
            jobs.append((ready, e, True))
        else:
            sides[e] = ready
    with torch.inference_mode(False), torch.no_grad():  # codes that a later backward can save
        for (job, e, of_weight), done in zip(jobs, cast_each([job for job, *_ in jobs]), strict=True):
            if of_weight:
                sides[e] = call.sites[e].weights.take(job, done, keep=call.as_operator)
            else:
                operands[e] = operands[e] if done.rowwise is None else done.rowwise
                saved[e] = done.columnwise if saved[e] is None else saved[e]
    return operands, saved, [side for side in sides if side is not None]


def observe_uncast(site: GemmSite, role: str, x: torch.Tensor) -> None:
    """Records the amax of an operand [rows, cols] for delayed scales that this call's GEMMs do not use."""
    for quantizer in site.uncast.get(role, ()):
        quantizer.observe(x)


def _input_job(
    tokens: torch.Tensor, site: GemmSite, call: Call, needs_wgrad: bool
) -> tuple[CastJob, torch.Tensor | None]:
    """(cast of this rank's tokens [M, K]; wgrad's operand [K, M] if it is in high precision)"""
    casts = site.casts["input"]
    keeps = needs_wgrad and keeps_codes(tokens.shape[0], site, call)
    # Only if needed: the transpose of a LazyTensor computes its values and writes them.
    plain = tokens.t() if needs_wgrad and not keeps else None
    if call.record and not keeps:
        _record_late_cast(tokens, casts)
    return CastJob(
        casts, tokens, "both" if keeps else "rowwise", call.record, not (keeps and call.as_operator)
    ), plain


def _gathered_input(
    tokens: torch.Tensor, site: GemmSite, call: Call, needs_wgrad: bool
) -> tuple[Operand, Operand | None]:
    """(fprop's operand of all ranks' tokens, wgrad's of this rank's) from this rank's tokens [M, K]."""
    tp, casts = call.tp, site.casts["input"]
    row, count = casts.rowwise, tokens.shape[0]
    job, plain = _input_job(tokens, site, call, needs_wgrad)
    reduce_amax = tp.amax_reduction(site.state.counts)
    if row is not None and _shards_aligned(count, row.rule.granularity):
        done = casts(tokens, job.direction, record=call.record, reduce_amax=reduce_amax)
        assert done.rowwise is not None
        saved = done.columnwise if job.direction == "both" else plain
        return tp.gather_side(done.rowwise, by_column=False).wait(), saved
    whole: torch.Tensor = tp.all_gather(tokens).wait()
    operand: Operand | None = whole
    if row is not None:
        site.notes.add(_misaligned_note("input", count, row.rule.granularity))
        operand = casts(whole, "rowwise", record=call.record, for_product=True).rowwise
    assert operand is not None
    if job.direction == "rowwise":
        return operand, plain
    return operand, casts(tokens, "columnwise", record=call.record, reduce_amax=reduce_amax).columnwise


def derived(tokens: QuantizedSide, site: GemmSite, call: Call, role: str, *, record: bool) -> Operand | None:
    """wgrad's operand [features, M] from codes of tokens [M, features]: decoded exactly in float32, then quantized by
    wgrad's rule (docs/numerics.md, Derived codes)."""
    assert call.tp.kind == "none", "tokens are dispatched to experts, which gather none"
    quantizer = site.casts[role].columnwise
    assert quantizer is not None, "a wgrad in high precision would read values that were quantized"
    values = tokens.dequantize(torch.float32)
    region = _region(values, site, call) if role == "grad_output" and site.gradients.stochastic else None
    return quantizer(
        values, "columnwise", record=record, region=region, for_product=not call.as_operator
    ).columnwise


def keeps_codes(tokens: int, site: GemmSite, call: Call) -> bool:
    """Whether codes of this rank's tokens are saved for wgrad, rather than the input itself."""
    quantizer = site.casts["input"].columnwise
    if quantizer is None or call.save_original_input:
        return False
    return not call.tp.gathers_input or _shards_aligned(tokens, quantizer.rule.granularity)


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
    """Records the amax of wgrad's own cast, which runs in backward or in a recomputation. Casts there do not record
    the input."""
    column = casts.columnwise
    if column is not None and column.rule.delayed and column is not casts.rowwise:
        column.observe(tokens)


# ----------------------------------------------------------------------------------------------------------- backward


def requantize_input(saved: torch.Tensor, site: GemmSite, call: Call) -> Operand | None:
    """Quantizes a saved plain input [K, M] if wgrad reads codes and a shard's codes equal those of the gathered tokens;
    otherwise returns it unchanged."""
    quantizer = site.casts["input"].columnwise
    if quantizer is None or (
        call.tp.gathers_input and not _shards_aligned(saved.shape[1], quantizer.rule.granularity)
    ):
        return saved
    reduce_amax = call.tp.amax_reduction(site.state.counts) if call.tp.gathers_input else None
    return quantizer(
        saved.t(), "columnwise", record=False, reduce_amax=reduce_amax, for_product=not call.tp.gathers_input
    ).columnwise


def gather_input(saved: Operand | None, call: Call) -> Pending:
    """Starts gathering all ranks' tokens of the saved columnwise input [K, M]."""
    assert saved is not None
    if isinstance(saved, QuantizedSide):
        return call.tp.gather_side(saved, by_column=True, async_op=True)
    return call.tp.all_gather(saved.t(), async_op=True)


def columnwise_input(gathered: Operand, call: Call) -> Operand | None:
    """wgrad's operand [K, M of all ranks] from the gathered input: codes [K, M] unchanged; high-precision tokens [M, K]
    transposed, and quantized if wgrad reads codes."""
    if isinstance(gathered, QuantizedSide):
        return gathered
    quantizer = call.sites[0].casts["input"].columnwise
    if quantizer is None:
        return gathered.t()
    return quantizer(gathered, "columnwise", record=False, for_product=True).columnwise


def quantize_backward(
    parts: Sequence[torch.Tensor], call: Call, needs_dgrad: bool, needs_wgrad: Sequence[bool]
) -> tuple[list[Operand | None], list[Any]]:
    """Returns for each site dgrad's operand [M, N], and wgrad's [N, M] or its pending gather, of all ranks' tokens.

    ``parts``: each site's grad_output [M, N].
    """
    rowwise: list[Operand | None] = [None] * len(parts)
    columnwise: list[Any] = [None] * len(parts)
    jobs: dict[int, CastJob] = {}
    for e, (dy, site) in enumerate(zip(parts, call.sites, strict=True)):
        idle = len(parts) > 1 and not len(dy)
        if site.uncast and not idle:
            observe_uncast(site, "grad_output", dy)
        if isinstance(dy, QuantizedTokens) and not idle:
            side = dy.side
            rowwise[e] = side if needs_dgrad else None
            if needs_wgrad[e]:
                columnwise[e] = derived(side, site, call, "grad_output", record=True)
        elif (
            call.tp.gathers_gradient or site.gradients.stochastic
        ):  # an expert without tokens uses up its random bits, too
            rowwise[e], columnwise[e] = _gathered_gradient(dy, site, call, needs_dgrad, needs_wgrad[e])
        elif not idle:
            casts = site.casts["grad_output"]
            if not (needs_dgrad and needs_wgrad[e]):
                casts = Casts(
                    casts.rowwise if needs_dgrad else None, casts.columnwise if needs_wgrad[e] else None
                )
            jobs[e] = CastJob(casts, dy, "both", True)
    for (e, (casts, dy, *_)), done in zip(jobs.items(), cast_each([*jobs.values()]), strict=True):
        rowwise[e] = dy if needs_dgrad and casts.rowwise is None else done.rowwise
        columnwise[e] = dy.t() if needs_wgrad[e] and casts.columnwise is None else done.columnwise
    return rowwise, columnwise


def _gathered_gradient(
    dy: torch.Tensor, site: GemmSite, call: Call, needs_dgrad: bool, needs_wgrad: bool
) -> tuple[Operand | None, Operand | Pending | None]:
    """Operands of dgrad and wgrad from dy [M, N], if it is gathered or rounded stochastically."""
    tp, gathers, casts = call.tp, call.tp.gathers_gradient, site.casts["grad_output"]
    row, column = casts.rowwise if needs_dgrad else None, casts.columnwise if needs_wgrad else None
    late = [q for q in (row, column) if gathers and q and not _shards_aligned(len(dy), q.rule.granularity)]
    plain_row, plain_column = needs_dgrad and row is None, needs_wgrad and column is None
    plain = tp.all_gather(dy).wait() if gathers and (late or plain_row or plain_column) else dy
    rowwise: Operand | None = plain if plain_row else None
    columnwise: Operand | Pending | None = plain.t() if plain_column else None
    if row is None and column is None:
        return rowwise, columnwise
    region = _region(dy, site, call) if site.gradients.stochastic else None
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
        sides = _gather_gradient(done, tp) if shards else (done.rowwise, done.columnwise)
        rowwise, columnwise = sides[0] or rowwise, sides[1] or columnwise
    return rowwise, columnwise


def _gather_gradient(
    quantized: Float8Tensor, tp: TensorParallel
) -> tuple[QuantizedSide | None, QuantizedSide | Pending | None]:
    """Gathers both sides of all ranks' tokens. Waits for the rowwise side, since dgrad comes next; the columnwise side
    arrives while dgrad runs."""
    row, column = quantized.rowwise, quantized.columnwise
    gathered_row = None if row is None else tp.gather_side(row, by_column=False).wait()
    if column is None:
        return gathered_row, None
    if gathered_row is not None and column.granularity.symmetric:
        return gathered_row, gathered_row.transposed()
    return gathered_row, tp.gather_side(column, by_column=True, async_op=True)


def _region(dy: torch.Tensor, site: GemmSite, call: Call) -> Region:
    """Position of dy [M, N] in the whole group's matrix, by which each element's random bits are chosen. dy has all rows;
    a column-parallel rank has some of the columns."""
    tp, cols = call.tp, dy.shape[1]
    by_column = tp.kind == "column"
    return site.gradients.next_region(
        0,
        tp.rank * cols if by_column else 0,
        cols * (tp.size if by_column else 1),
    )
