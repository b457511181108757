"""The arithmetic of a layer's experts, without autograd: ``linear_ops.py`` for many linears at once.

Two callers put autograd around it: grouped.py's function in eager mode, compiled_grouped.py's operators in compiled code.
Neither knows the other's way of saving, and both run these very lines, so their bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..quantizer import Wanted, cast_each
from ..state.observer_protocol import SeenProduct
from ..tensor import Operand, Sides
from . import cpu_expert_batch
from .gemm_site import GemmSite
from .linear_ops import (
    Call,
    gradient_cast,
    gradient_operands,
    input_cast,
    input_operands,
    quantize_grad_output,
    quantize_input,
    requantize_input,
)
from .quantized_activation import QuantizedActivation
from .weight_gradients import each_weight_gradient

Each = cpu_expert_batch.Operands | list[Operand | None]
"""An operand of all experts: as one, or each expert's, None of one that has none."""


class Group(NamedTuple):
    """What one call was given for each expert.

    Attributes:
        tokens: T_e.
        holds: sites hold their weights' codes until the backward, whether or not they serve a second forward.
    """

    calls: tuple[Call, ...]
    tokens: tuple[int, ...]
    holds: bool = False

    @property
    def sites(self) -> list[GemmSite]:
        """The experts' GEMMs."""
        return [call.site for call in self.calls]


def check_numbers(name: str, tokens: Sequence[int], rows: int) -> None:
    """ValueError, in the name of a site, unless these numbers of tokens share out so many rows."""
    if not all(isinstance(count, int) for count in tokens):
        raise ValueError(
            f"{name}: numbers of tokens {list(tokens)} must be whole numbers: use an integer tensor, or its tolist()"
        )
    if min(tokens) < 0 or sum(tokens) != rows:
        raise ValueError(
            f"{name}: numbers of tokens {list(tokens)} sum to {sum(tokens)}, and the input has {rows} rows: they say"
            " how many rows each expert has, in order"
        )


class Forward(NamedTuple):
    """y [T, N]; wgrad's operand of each expert, or None; the weights, quantised or as they are."""

    y: torch.Tensor
    x: Each | None
    weights: cpu_expert_batch.Operands | list[Sides]


def forward(
    x: torch.Tensor, weights: Sequence[torch.Tensor], group: Group, needs_wgrad: Sequence[bool]
) -> Forward:
    """y [T, N] of x [T, K] and weights [N, K], with what backward needs (``x`` only of those that need a wgrad).

    Codes of weights that were cast stay with their sites, of stacks only where weights are kept or the group ``holds``.
    """
    calls, tokens = group.calls, list(group.tokens)
    if kept := cpu_expert_batch.weights_of(x, weights, calls, needs_wgrad):
        wanted = needs_wgrad[0]
        return Forward(
            *cpu_expert_batch.forward(x, weights, calls, tokens, kept, needs_wgrad=wanted, holds=group.holds)
        )
    done = _cast(x.split(tokens), weights, group, needs_wgrad)
    operands: list[Operand] = []
    coded: list[Operand] = []
    for operand, _, sides in done:
        assert sides.rowwise is not None
        operands.append(operand)
        coded.append(sides.rowwise)
    y = torch.empty(len(x), weights[0].shape[0], dtype=x.dtype, device=x.device)
    _multiply("fprop", group.sites, tokens, operands, coded, y.split(tokens), calls[0].record)
    return Forward(y, [saved for _, saved, _ in done], [sides for *_, sides in done])


def _cast(
    parts: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    group: Group,
    needs_wgrad: Sequence[bool],
) -> list[tuple[Operand, Operand | None, Sides]]:
    """Of each expert what ``quantize_input`` gives of its tokens (none: themselves), and its weight; cast in one call."""
    wanted: list[Wanted] = []
    operands: list[tuple[Operand, Operand | None]] = []
    uncast: list[torch.Tensor | None] = []
    ready: list[Sides | None] = []
    for part, weight, call, needs in zip(parts, weights, group.calls, needs_wgrad, strict=True):
        site, plain = call.site, None
        site.note_forward()
        operands.append((part, None))
        if _is_coded(part):
            operands[-1] = quantize_input(part, call, needs)
        elif len(part):
            cast, plain = input_cast(part, call, needs)
            wanted.append(cast)
        uncast.append(plain)
        ready.append(site.weights.ready(weight, fresh=call.fresh_weight, record=call.record))
        if ready[-1] is None:
            casts = site.weights.casts_in(call.training)
            wanted.append(Wanted(casts, weight, site.weights.direction, call.record))
    found: list[tuple[Operand, Operand | None, Sides]] = []
    with torch.inference_mode(False), torch.no_grad():  # codes that a later backward can save
        made = iter(cast_each(wanted))
        for e, (part, weight, call) in enumerate(zip(parts, weights, group.calls, strict=True)):
            if len(part) and not _is_coded(part):
                operands[e] = input_operands(part, call, next(made), uncast[e])
            sides = ready[e] or call.site.weights.take(
                weight, next(made), record=call.record, training=call.training
            )
            found.append((*operands[e], sides))
    return found


def _is_coded(part: torch.Tensor) -> bool:
    """Whether an expert's tokens came as codes, of which wgrad's are derived one expert after the other."""
    return isinstance(part, QuantizedActivation) and len(part) > 0


def gradients(
    grad_output: torch.Tensor,
    saved_x: Each | None,
    saved_w: Each | None,
    weights: Sequence[torch.Tensor],
    group: Group,
    needs_dgrad: bool,
    needs_wgrad: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """(dx [T, K]; of each weight its gradient, or a dummy where that was added to main_grad), None where not needed.

    Args:
        grad_output: [T, N].
        saved_x, saved_w: the columnwise operands; None where no GEMM needs them.
    """
    calls, tokens = group.calls, list(group.tokens)
    if cpu_expert_batch.can_go_back(grad_output, (saved_x, saved_w), calls):
        saved: Any = cpu_expert_batch.Saved(saved_x, saved_w)  # type: ignore[arg-type]
        return cpu_expert_batch.gradients(
            grad_output, saved, weights, calls, tokens, needs_dgrad, needs_wgrad
        )
    of_x, of_w = (_of_experts(saved, len(calls)) for saved in (saved_x, saved_w))
    operands = _cast_gradients(grad_output.split(tokens), calls, needs_dgrad, needs_wgrad)
    rowwise, columnwise = [row for row, _ in operands], [column for _, column in operands]
    for e, call in enumerate(calls):
        if needs_wgrad[e] and isinstance(plain := of_x[e], torch.Tensor):
            of_x[e] = requantize_input(plain, call)
    dx = None
    if needs_dgrad:
        cols = weights[0].shape[1]
        dx = torch.empty(len(grad_output), cols, dtype=grad_output.dtype, device=grad_output.device)
        _multiply("dgrad", group.sites, tokens, rowwise, of_w, dx.split(tokens), True)
    wanted = [e for e, needs in enumerate(needs_wgrad) if needs]

    def multiply(these: list[int], outs: list[Any], add: bool) -> None:
        sites, counts = [calls[e].site for e in these], [tokens[e] for e in these]
        a, b = [columnwise[e] for e in these], [of_x[e] for e in these]
        _multiply("wgrad", sites, counts, a, b, outs, True, add=add)

    return dx, each_weight_gradient(weights, calls, wanted, multiply)


def _of_experts(saved: Each | None, count: int) -> list[Operand | None]:
    if isinstance(saved, cpu_expert_batch.Operands):
        return [saved.side(saved.columnwise, e) for e in range(count)]
    return [None] * count if saved is None else [*saved]


def _cast_gradients(
    parts: Sequence[torch.Tensor], calls: Sequence[Call], needs_dgrad: bool, needs_wgrad: Sequence[bool]
) -> list[tuple[Any, Any]]:
    """``quantize_grad_output`` of each expert, [T_e, N] and [N, T_e]; cast in one call, where rounding is not random."""
    found: list[tuple[Any, Any]] = [(None, None)] * len(parts)
    wanted = {}
    for e, (part, call, needs) in enumerate(zip(parts, calls, needs_wgrad, strict=True)):
        # Each backward has random bits of its own, an idle one too.
        if call.site.gradients.stochastic or _is_coded(part):
            found[e] = quantize_grad_output(part, call, needs_dgrad, needs)
        elif len(part):
            wanted[e] = gradient_cast(part, call, needs_dgrad, needs)
    for (e, cast), done in zip(wanted.items(), cast_each(list(wanted.values())), strict=True):
        found[e] = gradient_operands(cast, done, needs_dgrad, needs_wgrad[e])
    return found


def _multiply(
    gemm: str,
    sites: Sequence[GemmSite],
    tokens: Sequence[int],
    a: Sequence[Operand],
    b: Sequence[Any],
    outs: Sequence[Any],
    record: bool,
    *,
    add: bool = False,
) -> None:
    """outs[e] = a[e] @ b[e]^T (add: +=) as each site's plan has it; those of one backend in FP8 in one call.

    An expert without tokens is left out: it has no rows, or, in wgrad, a gradient of zeros.
    """
    together: dict[ModuleType, list[int]] = {}
    for e, site in enumerate(sites):
        if not tokens[e]:
            if gemm == "wgrad" and not add:
                outs[e].zero_()
        elif (
            site.plan.gemms[gemm] == "fp8" and site.backend is not None and not (add and site.state.observer)
        ):
            together.setdefault(site.backend, []).append(e)
        elif add:
            site.accumulate(gemm, a[e], b[e], outs[e], record=record)
        else:
            outs[e].copy_(site.multiply(gemm, a[e], b[e], outs[e].dtype, record=record))
    for backend, these in together.items():
        backend.grouped_gemm(
            [a[e] for e in these],
            [b[e] for e in these],
            [outs[e] for e in these],
            add=add,
            fast_accumulation=gemm == "fprop",
        )
        for e in these:
            site = sites[e]
            site.state.counts.fp8_gemms += 1
            if (observer := site.state.observer) is not None:
                observer.product(SeenProduct(site.plan.name, gemm, a[e], b[e], outs[e], record))
