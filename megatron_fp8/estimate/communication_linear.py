"""Tensor-parallel communication of the linears in one microbatch, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..numerics.rule import Granularity, Rule
from .saved_tensors import kept_rule, runs_again
from .settings import Settings
from .sites import Plans, side_scales, two_rules

Call = Literal["all-gather", "reduce-scatter", "all-reduce", "send", "all-to-all"]


@dataclass(frozen=True)
class Traffic:
    """One kind of exchange.

    Attributes:
        what: description; key in the estimate's ``wire``.
        call: the collective.
        axis: the group: 'tensor', 'data', 'context', 'pipeline', 'expert', 'expert tensor', 'embedding',
            'expert data', 'tensor and context', 'tensor and data', 'amax', 'verdict'.
        ranks: size of the group.
        bytes: of the whole tensor, summed over an iteration.
        calls: per iteration.
    """

    what: str
    call: Call
    axis: str
    ranks: int
    bytes: int
    calls: int = 1

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.what, self.call, self.axis, self.ranks, self.bytes * times, self.calls * times)

    @property
    def sent(self) -> int:
        """Bytes that a rank sends: in a ring, or directly to the next or previous stage."""
        if self.call == "send":
            return self.bytes
        return self.bytes * (self.ranks - 1) // self.ranks * (2 if self.call == "all-reduce" else 1)

    @property
    def messages(self) -> int:
        """Messages that a rank sends: the steps of a ring, two rounds for an all-reduce. An assumption: libraries also
        use trees and other algorithms, depending on the size."""
        if self.call == "send":
            return self.calls
        return self.calls * (self.ranks - 1) * (2 if self.call == "all-reduce" else 1)


def column(settings: Settings, plans: Plans, site: str, layer: int | None, width: int) -> Iterator[Traffic]:
    """A column-parallel linear: its input [tokens, width] is gathered twice, and its input gradient is summed."""
    yield from _with_recompute(settings, site, _column(settings, plans, site, layer, width))


def row(settings: Settings, plans: Plans, site: str, layer: int | None) -> Iterator[Traffic]:
    """A row-parallel linear: its output is summed, and its output gradient is gathered."""
    yield from _with_recompute(settings, site, _row(settings, plans, site, layer))


def _with_recompute(settings: Settings, site: str, traffic: Iterator[Traffic]) -> Iterator[Traffic]:
    again = runs_again(settings.model, site)
    for entry in traffic:
        yield entry * 2 if again and entry.what.endswith("forward") else entry


def _column(settings: Settings, plans: Plans, site: str, layer: int | None, width: int) -> Iterator[Traffic]:
    model, tokens = settings.model, settings.tokens
    tp = model.tensor_model_parallel_size
    whole = model.activation_bytes * tokens * width
    if not model.sequence_parallel:
        yield Traffic("gradients of activations, backward", "all-reduce", "tensor", tp, whole)
        return
    plan = plans.of(site, layer)
    rowwise, columnwise = two_rules(plan, "input", "fprop", "wgrad")
    saved_rule = kept_rule(settings, plans, site, layer, tokens // tp)
    if rowwise is not None and aligned(rowwise, tokens // tp):
        codes = tokens * width + gathered_scales(rowwise, tokens, width)
        yield Traffic("activations, forward", "all-gather", "tensor", tp, codes, _calls(rowwise, False))
    else:
        yield Traffic("activations, forward", "all-gather", "tensor", tp, whole)
    if saved_rule is not None:
        codes = tokens * width + gathered_scales(saved_rule, tokens, width, by_column=True)
        yield Traffic("activations, backward", "all-gather", "tensor", tp, codes, _calls(saved_rule, True))
    else:
        yield Traffic("activations, backward", "all-gather", "tensor", tp, whole)
    for rule in dict.fromkeys((rowwise, columnwise)):
        if rule is not None and aligned(rule, tokens // tp):
            sides = (rule is rowwise or rule == rowwise, rule == columnwise)
            yield from _shared_amaxes(rule, tokens // tp, width, sides, tp, "forward")
    yield Traffic("gradients of activations, backward", "reduce-scatter", "tensor", tp, whole)


def _row(settings: Settings, plans: Plans, site: str, layer: int | None) -> Iterator[Traffic]:
    model, tokens = settings.model, settings.tokens
    tp, hidden = model.tensor_model_parallel_size, model.hidden_size
    whole = model.activation_bytes * tokens * hidden
    if not model.sequence_parallel:
        yield Traffic("activations, forward", "all-reduce", "tensor", tp, whole)
        return
    yield Traffic("activations, forward", "reduce-scatter", "tensor", tp, whole)
    plan, shard = plans.of(site, layer), tokens // tp
    rules = two_rules(plan, "grad_output", "dgrad", "wgrad")
    if any(rule is None or not aligned(rule, shard) for rule in rules):
        yield Traffic("gradients of activations, backward", "all-gather", "tensor", tp, whole)
    rowwise, columnwise = (rule if rule is not None and aligned(rule, shard) else None for rule in rules)
    if rowwise is not None:
        codes = tokens * hidden + gathered_scales(rowwise, tokens, hidden)
        yield Traffic(
            "gradients of activations, backward", "all-gather", "tensor", tp, codes, _calls(rowwise, False)
        )
    serves_both = rowwise == columnwise and rowwise is not None and rowwise.granularity.symmetric
    if columnwise is not None and not serves_both:
        codes = tokens * hidden + gathered_scales(columnwise, tokens, hidden, by_column=True)
        yield Traffic(
            "gradients of activations, backward", "all-gather", "tensor", tp, codes, _calls(columnwise, True)
        )
    for rule in dict.fromkeys((rowwise, columnwise)):
        if rule is not None:
            yield from _shared_amaxes(
                rule, shard, hidden, (rule == rowwise, rule == columnwise), tp, "backward"
            )


def aligned(rule: Rule, tokens: int) -> bool:
    """Whether a shard of ``tokens`` tokens contains whole blocks, so that its codes can be gathered."""
    granularity: Granularity = rule.granularity
    block = max(granularity.rows, granularity.cols)
    return granularity.is_tensor or granularity.cols == 0 or tokens % block == 0


def gathered_scales(rule: Rule, tokens: int, width: int, *, by_column: bool = False) -> int:
    """Bytes of the scales gathered with the codes of [tokens, width]; 0 if ranks share the scales."""
    if rule.granularity.is_tensor or (by_column and rule.granularity.cols == 0):
        return 0
    return side_scales(rule, width, tokens) if by_column else side_scales(rule, tokens, width)


def _calls(rule: Rule, by_column: bool) -> int:
    return 1 if rule.granularity.is_tensor or (by_column and rule.granularity.cols == 0) else 2


def _shared_amaxes(
    rule: Rule, tokens: int, width: int, sides: tuple[bool, bool], tp: int, direction: str
) -> Iterator[Traffic]:
    """Amaxes that shards of tokens share before a cast: one per tensor (none for delayed scaling), or one per column of
    the columnwise side."""
    granularity = rule.granularity
    if granularity.is_tensor:
        if not rule.delayed:
            yield Traffic(f"amaxes of shards, {direction}", "all-reduce", "tensor", tp, 4)
    elif granularity.cols == 0 and sides[1]:
        yield Traffic(f"amaxes of shards, {direction}", "all-reduce", "tensor", tp, 4 * width)
