"""CPU experts of one recipe as one stack of operands.

``grouped.py`` does for every expert what a linear does, some 500 calls of Python in a forward and a backward, which take
longer than small experts' products. Where nothing sets an expert apart (one recipe, all of it in FP8 and emulated,
nobody watching, no random bits), casts and products of all are described to C at once (kernels/cpu/batched_cast.py).
Codes, scales, amaxes, histories and kept weights are those of the experts one after the other, to the bit; what C does
not take (few rows, scales too small or large) is multiplied as anywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..backends import emulated
from ..kernels.cpu import batched_cast, emulation
from ..kernels.cpu.batched_cast import Parts, Side
from ..kernels.cpu.skinny_gemm import MOST as FEW_ROWS
from ..numerics.rule import Direction, Rule
from ..quantizer import Quantizer
from ..tensor import Float8Tensor, QuantizedSide
from .dgrad_weight import still_held
from .gemm_site import GemmSite
from .linear_ops import Call
from .saved_expert_activations import SavedExperts, SavedExpertsLayout
from .saved_tensor_layout import SideLayout
from .weight_cache import CachedWeight
from .weight_gradients import each_weight_gradient


class Operands(NamedTuple):
    """What a cast gave of one operand of all experts.

    Attributes:
        cast: its stacks, that of rows first.
        rule: by which it was made.
        dtype: of what was cast.
    """

    cast: batched_cast.Cast
    rule: Rule
    dtype: torch.dtype

    @property
    def rowwise(self) -> Side:
        return Side(self.cast.stacks[0], False, self.rule, self.cast.special)

    @property
    def columnwise(self) -> Side:
        return Side(self.cast.stacks[-1], True, self.rule, self.cast.special)

    def quantized(self, e: int) -> Float8Tensor:
        """That of one expert, in both directions."""
        return Float8Tensor(self.side(self.rowwise, e), self.side(self.columnwise, e), self.dtype)

    def side(self, side: Side, e: int) -> QuantizedSide:
        """One direction of one expert's."""
        part = side.operand(e)
        assert part.scale is not None
        return QuantizedSide(part.values, part.scale, self.rule.granularity, part.pow2, part.finite)


class _Expert:
    """One expert's part of an operand, which is looked at only where it is used alone."""

    def __init__(self, of: Operands, number: int):
        self.of, self.number = of, number

    def __call__(self) -> Float8Tensor:
        return self.of.quantized(self.number)


class Saved(NamedTuple):
    """What a backward needs of the input and of the weights; their tensors are saved apart."""

    x: Operands | None
    weights: Operands | None

    def taken_apart(self) -> tuple[Saved, list[torch.Tensor]]:
        """Itself without tensors, and those."""
        kept = [None if of is None else _bare(of) for of in self]
        tensors = [t for of in self if of is not None for t in of.cast.stacks[-1][:2]]
        return Saved(kept[0], kept[1]), tensors

    def put_together(self, tensors: Sequence[torch.Tensor]) -> Saved:
        """As it was before, of tensors that have shapes and dtypes of those; C reads each from end to end."""
        given = iter([tensor.contiguous() for tensor in tensors])
        return Saved(*(None if of is None else _with(of, next(given), next(given)) for of in self))


def packed(of: Operands) -> SavedExperts:
    """wgrad's operand as SavedExpertsLayout has it, its codes without a copy."""
    stack = of.cast.stacks[-1]
    layout = SavedExpertsLayout(SideLayout.of(of.rule, True), stack.codes.shape[1])
    into = layout.empty(sum(stack.rows), len(stack.rows), torch.device("cpu"))
    scales = stack.scale_inv.view(into.scales.dtype)
    for first, rows, end in zip(stack.first, stack.rows, (*stack.first[1:], len(scales)), strict=True):
        if rows:  # nobody wrote scales of an expert without tokens
            into.scales[first:end] = scales[first:end]
    return into._replace(codes=stack.codes.view(torch.uint8).view(-1))


def unpacked(
    tokens: SavedExperts, features: int, numbers: Sequence[int], dtype: torch.dtype, calls: Sequence[Call]
) -> Operands:
    """The operand again, of calls that are ``alike``."""
    rules = _rules_of(calls[0].site)
    assert rules is not None
    stack = batched_cast.columnwise_again(*tokens, numbers, features, rules.input)
    unknown = [1] * len(numbers)  # whether codes are finite was known at run time only
    return Operands(batched_cast.Cast([stack], unknown), rules.input, dtype)


def weights_held(
    weights: Sequence[torch.Tensor], stamps: torch.Tensor, calls: Sequence[Call]
) -> Operands | None:
    """What sites hold of these weights since the forwards with these stamps, if one cast made it and it is still here."""
    held = [
        still_held(call.site.weights, weight, *stamp)
        for call, weight, stamp in zip(calls, weights, stamps.tolist(), strict=True)
    ]
    return _of_one_cast(held)


def _bare(of: Operands) -> Operands:
    stack = of.cast.stacks[-1]._replace(codes=None, scale_inv=None)  # type: ignore[arg-type]
    return of._replace(cast=of.cast._replace(stacks=[stack]))


def _with(of: Operands, codes: torch.Tensor, scale_inv: torch.Tensor) -> Operands:
    stack = of.cast.stacks[-1]._replace(codes=codes, scale_inv=scale_inv)
    return of._replace(cast=of.cast._replace(stacks=[stack]))


# --------------------------------------------------------------------------------------------------- which experts can


class _Alike(NamedTuple):
    """A site's rules by role; sites of equal rules have one object."""

    input: Rule
    weight: Rule
    grad_output: Rule


_found: WeakKeyDictionary[GemmSite, _Alike | None] = WeakKeyDictionary()
_known: dict[_Alike, _Alike] = {}


def _rules_of(site: GemmSite) -> _Alike | None:
    """The rules of a site that can be stacked; None of others. Plans and rules do not change."""
    if site not in _found:
        _found[site] = None
        quantizers = [site.casts[role].shared for role in _Alike._fields]
        planned = site.backend is emulated and all(site.plan.gemms[gemm] == "fp8" for gemm in site.plan.gemms)
        rules = [of.rule for of in quantizers if type(of) is Quantizer and of.backend is emulated]
        if (
            planned
            and len(rules) == 3
            and all(batched_cast.in_c(rule, "both") and batched_cast.taken(rule) for rule in rules)
        ):
            alike = _Alike(*rules)
            _found[site] = _known.setdefault(alike, alike)
    return _found[site]


def alike(calls: Sequence[Call]) -> bool:
    """Whether what these calls cast can be stacked."""
    first, state = _rules_of(calls[0].site), calls[0].site.state
    return first is not None and all(
        _rules_of(call.site) is first and call.site.state is state for call in calls
    )


def weights_of(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    calls: Sequence[Call],
    needs_wgrad: Sequence[bool],
) -> Operands | bool:
    """Whether a forward of these experts goes by ``forward``, which has the bits of any other way; what all sites have
    kept of their weights, of one cast."""
    dtype = weights[0].dtype
    taken = (
        alike(calls)
        and calls[0].site.state.observer is None
        and _castable(x)
        and emulation.inner_loop() is not None
        and len(set(needs_wgrad)) == 1
        and weights[0].shape[0] > FEW_ROWS
        and dtype in emulation.FLOATS
        and all(emulation.plain(weight) and weight.dtype == dtype and weight.numel() for weight in weights)
        and not any(call.save_original_input for call in calls)
        and all(call.site.weights.direction == "both" for call in calls)
        and all(call.site.weights.evaluated_by is call.site.weights.casts or call.training for call in calls)
    )
    return taken and _kept(weights, calls)


def _castable(x: torch.Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float32) and x.numel() > 0 and emulation.plain(x.contiguous())


def _kept(weights: Sequence[torch.Tensor], calls: Sequence[Call]) -> Operands | bool:
    """What all sites have kept of their weights, of one cast; True: none has any; False: they have something else."""
    kept = [
        call.site.weights.serving(weight, fresh=call.fresh_weight, record=call.record)
        for weight, call in zip(weights, calls, strict=True)
    ]
    return _of_one_cast(kept) or all(one is None for one in kept)


def _of_one_cast(kept: Sequence[CachedWeight | None]) -> Operands | None:
    """What all sites have kept, if one cast made it."""
    made = [one.made_by for one in kept if one is not None and isinstance(one.made_by, _Expert)]
    in_order = [one.number for one in made] == list(range(len(kept)))
    whole = in_order and len(made[0].of.rowwise.rows) == len(made)  # not some of its experts
    return made[0].of if whole and all(one.of is made[0].of for one in made) else None


# -------------------------------------------------------------------------------------------------------- the forward


def forward(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    calls: Sequence[Call],
    tokens: Sequence[int],
    kept: Operands | bool,
    *,
    needs_wgrad: bool,
    holds: bool = False,
) -> tuple[torch.Tensor, Operands | None, Operands]:
    """(y [T, N] of x [T, K]; x's operands, if backward ``needs_wgrad``; the weights').

    Args:
        kept: what ``weights_of`` gave.
        holds: sites keep what was made of their weights, even if it serves no other forward.
    """
    x = x.contiguous()
    record = calls[0].record
    for call in calls:
        call.site.note_forward()
    rules = _rules_of(calls[0].site)
    assert rules is not None
    direction: Direction = "both" if needs_wgrad else "rowwise"
    inputs = _parts(x, tokens, calls, "input", direction, record=record)
    with torch.inference_mode(False), torch.no_grad():  # codes that a later backward can save
        if isinstance(kept, Operands):
            of_w = kept
            (cast_x,) = batched_cast.quantize([inputs])
        else:
            asked = _parts(weights, [len(w) for w in weights], calls, "weight", "both", record=record)
            cast_x, cast_w = batched_cast.quantize([inputs, asked])
            _note(cast_w, calls, "weight", record=record)
            of_w = Operands(cast_w, rules.weight, weights[0].dtype)
            _keep(of_w, weights, calls, record=record, holds=holds)
    _note(cast_x, calls, "input", record=record)
    of_x = Operands(cast_x, rules.input, x.dtype)
    y = torch.empty(len(x), len(weights[0]), dtype=x.dtype, device=x.device)
    present = [e for e, count in enumerate(tokens) if count]
    _multiply(calls, (of_x, of_x.rowwise), (of_w, of_w.rowwise), y, present)
    return y, of_x if needs_wgrad else None, of_w


def _parts(
    x: torch.Tensor | Sequence[torch.Tensor],
    rows: Sequence[int],
    calls: Sequence[Call],
    role: str,
    direction: Direction,
    *,
    record: bool,
) -> Parts:
    """The cast of one role: of tokens [T, cols], or of weights."""
    first = x if isinstance(x, torch.Tensor) else x[0]
    running, scales = [], []
    for call in calls:
        quantizer = _quantizer(call, role)
        scale, place = quantizer.where(record)
        running.append(None if place is None else emulation.address(place.amax, torch.float32, 1).value)
        scales.append(None if scale is None else emulation.address(scale, torch.float32, 1).value)
    rule = _quantizer(calls[0], role).rule
    return Parts(_addresses(x, rows), rows, first.shape[1], first.dtype, rule, direction, running, scales)


def _quantizer(call: Call, role: str) -> Quantizer:
    quantizer = call.site.casts[role].rowwise
    assert quantizer is not None, "these sites have all of it in FP8"
    return quantizer


def _addresses(x: torch.Tensor | Sequence[torch.Tensor], rows: Sequence[int]) -> list[int]:
    """Where experts' matrices lie: one behind the other in x, or each on its own."""
    if not isinstance(x, torch.Tensor):
        return [each.data_ptr() for each in x]
    size = x.shape[1] * x.element_size()
    return list(accumulate((count * size for count in rows[:-1]), initial=x.data_ptr()))


def _note(cast: batched_cast.Cast, calls: Sequence[Call], role: str, *, record: bool) -> None:
    """Count the casts, and what was NaN or Inf."""
    for call, rows, special in zip(calls, cast.stacks[0].rows, cast.special, strict=True):
        quantizer = _quantizer(call, role)
        quantizer.slot.arena.counts.casts += rows > 0
        _, place = quantizer.where(record) if special else (None, None)
        if place is not None:
            place.nonfinite.add_(special)


def _keep(
    made: Operands, weights: Sequence[torch.Tensor], calls: Sequence[Call], *, record: bool, holds: bool
) -> None:
    """Each site keeps its weight, where weights are kept or the call ``holds`` them."""
    for e, (weight, call) in enumerate(zip(weights, calls, strict=True)):
        cache = call.site.weights
        if not (cache.state.keeps_weights or holds):
            cache.forget()
            continue
        column = cache.casts.columnwise
        scale = None if column is None else column.delayed_scale()
        cache.keep(weight, CachedWeight(cache.version(weight), record, scale, _Expert(made, e)))


# ----------------------------------------------------------------------------------------------------- the gradients


def can_go_back(dy: torch.Tensor, saved: Sequence[Any], calls: Sequence[Call]) -> bool:
    """Whether gradients from these operands, of tokens and of weights, are made by ``gradients``."""
    kept = [of for of in saved if of is not None]
    if not kept or not all(isinstance(of, Operands) for of in kept):
        return False
    last = [of.cast.stacks[-1] for of in kept]
    in_memory = all(emulation.plain(stack.codes) and emulation.plain(stack.scale_inv) for stack in last)
    return calls[0].site.state.observer is None and in_memory and _castable(dy)


def _cast_gradient(
    dy: torch.Tensor, calls: Sequence[Call], tokens: Sequence[int], needs_dgrad: bool, needs_wgrad: bool
) -> Operands:
    """The operands of dy [T, N], which ``can_go_back``."""
    rules = _rules_of(calls[0].site)
    assert rules is not None
    dy = dy.contiguous()
    direction: Direction = "both"
    if not (needs_dgrad and needs_wgrad):
        direction = "rowwise" if needs_dgrad else "columnwise"
    (cast,) = batched_cast.quantize([_parts(dy, tokens, calls, "grad_output", direction, record=True)])
    _note(cast, calls, "grad_output", record=True)
    return Operands(cast, rules.grad_output, dy.dtype)


def _input_gradient(
    dy: Operands, weights: Operands, calls: Sequence[Call], tokens: Sequence[int]
) -> torch.Tensor:
    """dx [T, K]."""
    side = weights.columnwise
    dx = torch.empty(sum(tokens), side.stack.codes.shape[1], dtype=dy.dtype, device="cpu")
    present = [e for e, count in enumerate(tokens) if count]
    _multiply(calls, (dy, dy.rowwise), (weights, side), dx, present)
    return dx


def gradients(
    grad_output: torch.Tensor,
    saved: Saved,
    weights: Sequence[torch.Tensor],
    calls: Sequence[Call],
    tokens: Sequence[int],
    needs_dgrad: bool,
    needs_wgrad: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """(dx; of each weight its gradient, or a dummy), where ``can_go_back``."""
    dy = _cast_gradient(grad_output, calls, tokens, needs_dgrad, any(needs_wgrad))
    dx = None
    if needs_dgrad:
        assert saved.weights is not None
        dx = _input_gradient(dy, saved.weights, calls, tokens)
    wanted = [e for e, needs in enumerate(needs_wgrad) if needs]

    def multiply(these: list[int], outs: list[Any], add: bool) -> None:
        """One product for each expert that has tokens."""
        places: list[Any] = [None] * len(weights)
        for e, out in zip(these, outs, strict=True):
            places[e] = out
            if not (tokens[e] or add):
                out.zero_()
        if present := [e for e in these if tokens[e]]:
            assert saved.x is not None
            _multiply(calls, (dy, dy.columnwise), (saved.x, saved.x.columnwise), places, present, add=add)

    return dx, each_weight_gradient(weights, calls, wanted, multiply)


def _multiply(
    calls: Sequence[Call],
    a: tuple[Operands, Side],
    b: tuple[Operands, Side],
    outs: torch.Tensor | Sequence[torch.Tensor],
    these: Sequence[int],
    *,
    add: bool = False,
) -> None:
    """outs[e] = a[e] @ b[e]^T of experts ``these`` (add: +=), with the bits of ``emulated.gemm``; outs may lie one behind
    the other in a tensor."""
    rows, large = a[1].rows, _large(a[1], b[1])
    if isinstance(outs, torch.Tensor):
        dtype, at, fit = outs.dtype, _addresses(outs, rows), [*these]
    else:
        dtype, at = outs[these[0]].dtype, [0] * len(outs)
        shape = (rows[these[0]], b[1].rows[these[0]])  # of all gradients of weights
        fit = [
            e for e in these if outs[e].dtype == dtype and emulation.plain(outs[e]) and outs[e].shape == shape
        ]
        for e in fit:
            at[e] = outs[e].data_ptr()
    if dtype not in ((torch.float32,) if add else (torch.bfloat16, torch.float32)):
        fit = []
    fit = [e for e in fit if rows[e] > FEW_ROWS and large[e]]
    missed = batched_cast.multiply(a[1], b[1], at, dtype, fit, add=add)
    if rest := sorted({*these} - {*fit} | {*missed}):
        left, right = ([of.side(side, e) for e in rest] for of, side in (a, b))
        parts = outs.split(rows) if isinstance(outs, torch.Tensor) else outs
        emulated.grouped_gemm(left, right, [parts[e] for e in rest], add=add)
    calls[0].site.state.counts.fp8_gemms += len(these)


def _large(a: Side, b: Side) -> list[bool]:
    """Whether products are worth packing (``emulation.fits``)."""
    (cols_a, cols_b), rows = (
        (side.stack.codes.shape[1] for side in (a, b)),
        zip(a.stack.rows, b.stack.rows, strict=True),
    )
    return [left * cols_a + right * cols_b >= emulation.MIN_PRODUCT for left, right in rows]
