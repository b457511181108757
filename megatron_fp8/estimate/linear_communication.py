"""Tensor-parallel communication of the linears in one microbatch, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..numerics.formats import E2M1
from ..numerics.rule import Rule
from .activations import is_aligned
from .config_reader import Settings
from .fp8_weights import side_codes, side_scales, two_rules
from .model import Model

Call = Literal["all-gather", "reduce-scatter", "all-reduce", "send", "all-to-all"]


@dataclass(frozen=True)
class Traffic:
    """One kind of exchange.

    Attributes:
        what: description; key in the estimate's ``wire``.
        call: the collective.
        axis: the group: 'tensor', 'data', 'context', 'pipeline', 'expert', 'expert tensor', 'embedding',
            'expert data', 'tensor and context', 'tensor and data', 'amax'.
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


def column(settings: Settings, site: str, width: int) -> Iterator[Traffic]:
    """A column-parallel linear: its input [tokens, width] is gathered twice, and its input gradient is summed."""
    what = "gradients of activations, backward"
    if not settings.model.sequence_parallel:
        yield _whole(settings, what, "all-reduce", width)
        return
    again = 1 + runs_again(settings.model, site)
    rowwise, columnwise = _aligned_rules(settings, site, "input", "fprop")
    yield _gather_traffic(settings, "activations, forward", rowwise, width) * again
    yield _gather_traffic(settings, "activations, backward", columnwise, width, by_column=True)
    for entry in _shared_amaxes(settings, rowwise, columnwise, width, "forward"):
        yield entry * again
    yield _whole(settings, what, "reduce-scatter", width)


def row(settings: Settings, site: str) -> Iterator[Traffic]:
    """A row-parallel linear: its output is summed, and its output gradient is gathered."""
    model, hidden = settings.model, settings.model.hidden_size
    call: Call = "reduce-scatter" if model.sequence_parallel else "all-reduce"
    yield _whole(settings, "activations, forward", call, hidden) * (1 + runs_again(model, site))
    if not model.sequence_parallel:
        return
    what = "gradients of activations, backward"
    rowwise, columnwise = _aligned_rules(settings, site, "grad_output", "dgrad")
    if rowwise is None or columnwise is None:
        yield _gather_traffic(settings, what, None, hidden)
    if rowwise is not None:
        yield _gather_traffic(settings, what, rowwise, hidden)
    if columnwise is not None and not (rowwise == columnwise and columnwise.granularity.symmetric):
        yield _gather_traffic(settings, what, columnwise, hidden, by_column=True)
    yield from _shared_amaxes(settings, rowwise, columnwise, hidden, "backward")


def runs_again(model: Model, site: str) -> bool:
    """Whether recompute_modules repeats this linear's forward in backward."""
    within = {
        "mla_up_proj": site.endswith(("_up_proj", "linear_q_proj")),
        "mlp": ".mlp.linear_" in site,
        "shared_experts": ".shared_experts." in site,
        "moe": "experts." in site,
    }
    return any(within[module] for module in model.recomputed & within.keys())


def _aligned_rules(settings: Settings, site: str, role: str, gemm: str) -> list[Rule | None]:
    """An operand's rules for ``gemm`` and for wgrad; None where values are gathered, not codes."""
    shard = settings.local_tokens
    rules = two_rules(settings.plan(site), role, gemm, "wgrad")
    return [rule if rule is not None and is_aligned(rule, shard) else None for rule in rules]


def _whole(settings: Settings, what: str, call: Call, width: int) -> Traffic:
    model = settings.model
    size = model.activation_bytes * settings.tokens * width
    return Traffic(what, call, "tensor", model.tensor_model_parallel_size, size)


def _gather_traffic(
    settings: Settings, what: str, rule: Rule | None, width: int, *, by_column: bool = False
) -> Traffic:
    """The all-gather of [tokens, width]: codes with their scales, or values without a rule."""
    if rule is None:
        return _whole(settings, what, "all-gather", width)
    scales = gathered_scales(rule, settings.tokens, width, by_column=by_column)
    codes = (
        side_codes(rule, width, settings.tokens) if by_column else side_codes(rule, settings.tokens, width)
    )
    size, calls = codes + scales, 2 if scales else 1
    return Traffic(what, "all-gather", "tensor", settings.model.tensor_model_parallel_size, size, calls)


def gathered_scales(rule: Rule, tokens: int, width: int, *, by_column: bool = False) -> int:
    """Bytes of the scales gathered with the codes of [tokens, width]; 0 if ranks share the scales."""
    if rule.granularity.is_tensor or (by_column and rule.granularity.cols == 0):
        return 0
    return side_scales(rule, width, tokens) if by_column else side_scales(rule, tokens, width)


def _shared_amaxes(
    settings: Settings, rowwise: Rule | None, columnwise: Rule | None, width: int, direction: str
) -> Iterator[Traffic]:
    """Amaxes that shards of tokens share before a cast: one per tensor (none for delayed scaling), one per direction
    (NVFP4, together), or one per column of the columnwise side."""
    tp, what = settings.model.tensor_model_parallel_size, f"amaxes of shards, {direction}"
    for rule in filter(None, dict.fromkeys((rowwise, columnwise))):
        if rule.granularity.is_tensor and not rule.delayed:
            yield Traffic(what, "all-reduce", "tensor", tp, 4)
        elif rule.fmt is E2M1:
            yield Traffic(what, "all-reduce", "tensor", tp, 8)
        elif not rule.granularity.is_tensor and rule.granularity.cols == 0 and rule == columnwise:
            yield Traffic(what, "all-reduce", "tensor", tp, 4 * width)
