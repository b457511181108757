"""Experts' tokens sent between ranks in FP8 (`moe_fp8_dispatch`): quantized once, before Megatron-Core dispatches them.

    forward    tokens [s, b, hidden] -> codes and scales -> permuted, sent, sorted by expert -> fc1's fprop reads them
               experts' outputs, sent back and summed in BF16 (combine), as without the option
    backward   the gradient of that sum -> codes and scales -> permuted, sent, sorted -> fc2's dgrad reads them
               the gradients of the tokens return and are summed in BF16

Each token is cast once, however many experts it goes to, by the rule that all experts' linears have for this operand;
the experts do not cast it again. wgrad's codes are derived from the received codes (linear/quantized_tokens.py).
Megatron-Core's MoELayer is hooked at two places: `preprocess`, which passes tokens to the dispatcher, and `postprocess`,
which receives the sum. The dispatchers themselves are Megatron-Core's own. They move rows with torch operations, which
QuantizedTokens implements, and with three collectives, which would send dequantized values. Those are replaced where
dispatchers look them up: rows in codes are sent as bytes, in forward (dispatch) or in backward (the gradient of combine),
and everything else by the original calls.

A layer sends BF16 if its experts do not all read codes with scales per token: its linears run in BF16, by plan, phase
or context; they have several rules; scales span tokens; or wgrad needs values that were never quantized. The sites'
notes, and so the report, have the reason. Ranks that send each other tokens must decide alike, so each resolves the
plans of all experts. In experiments, which replace sites of one rank, they communicate.

Rejected: own dispatchers, which would duplicate permutation, padding to capacity and the synchronisation with the
host. Rejected: codes as a BF16 tensor of half the width. Autograd requires a gradient of the sent tensor's shape and
dtype, and that gradient stays in BF16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer

from ...linear.amax_recorder import count_forward
from ...linear.gemm_site import GemmSite
from ...linear.quantized_tokens import QuantizedTokens
from ...linear.saved_operands import first_derivative_only
from ...linear.tensor_parallel import ShardInfo
from ...numerics.rule import Rule
from ...plan.autocast_state import layer_being_built
from ...plan.cast_spec import READERS, CastSpec
from ...plan.site_plan import SitePlan, bf16_site, dispatch_cast, healing_plan, refusal
from ...recipe import GEMM_OPERANDS
from ...state.fp8_state import Fp8State
from ...state.iteration import record_time
from .. import environment as compat
from ..names import expert_name
from ..patches.patching import PatchList
from ..runtime import state_of
from ..sites import plan_of

_SENT = {"input": "tokens", "grad_output": "gradients"}
_NOTED = "moe_fp8_dispatch: "


class Fp8MoELayer(MoELayer):
    """Megatron-Core's MoELayer, with the same arguments. Tokens and gradients go to the experts in FP8."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.fp8_dispatch = Dispatch(self.config, list(self.experts.local_experts))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron-Core's; outside any graph of torch.compile, which cannot trace tokens in codes."""
        if torch.compiler.is_compiling():
            from ...linear.compiled import break_graph  # loads torch's compiler

            return break_graph(super().forward, *args, **kwargs)
        return super().forward(*args, **kwargs)

    def preprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> Any:
        """As Megatron-Core's, with tokens in codes."""
        tokens = self.fp8_dispatch.tokens(hidden_states, training=self.training)
        return super().preprocess(tokens, probs, routing_map)

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """As Megatron-Core's; the gradient for the routed experts is in codes, that for shared experts is not."""
        output = super().postprocess(output, None)
        output = self.fp8_dispatch.with_gradient_in_fp8(output, training=self.training)
        return output if shared_expert_output is None else output + shared_expert_output


class Dispatch:
    """Quantizes a layer's tokens and their gradients before they are sent: a site without products.

    Its casts are counted, recorded and observed like a linear's, under the names NAME.input and NAME.grad_output.

    Args:
        experts: of this rank, MLPs of FP8 linears.

    Attributes:
        layer: the layer under construction when this was made.
    """

    def __init__(self, config: Any, experts: list[Any]):
        self.layer = layer_being_built()
        self._config = config
        self._readers = {
            "input": [expert.linear_fc1 for expert in experts],
            "grad_output": [expert.linear_fc2 for expert in experts],
        }
        self._site: GemmSite | None = None
        self._refusals: dict[str, str | None] = dict.fromkeys(self._readers)
        self._healing_refusals: dict[str, str | None] = {}
        self._stopped = False

    def stop(self, why: str) -> None:
        """Sends no codes from now on: the experts cast their operands, as without moe_fp8_dispatch."""
        self._stopped = True
        for role in self._readers:
            self._note(role, None, why)

    def bind(self, name: str, state: Fp8State) -> None:
        """Sets name and state; the rules are those of the experts' sites, which must exist."""
        group, stream = None, 0
        if parallel_state.model_parallel_is_initialized():
            group = compat.amax_group(self._config, expert=False)
            stream = dist.get_rank()
        self._site = GemmSite(self._plan(name), state, group, seed=state.seed, stream=stream)

    def __getstate__(self) -> dict[str, Any]:
        """Drops the site: a copy belongs to another model, whose experts have other sites."""
        return {**self.__dict__, "_site": None}

    @property
    def fp8_site(self) -> GemmSite:
        """Its site; a layer outside any prepared model makes its own here."""
        if self._site is None:
            self.bind(type(self).__name__, state_of(self._config))
        assert self._site is not None
        return self._site

    @property
    def fp8_share(self) -> ShardInfo:
        """This rank's share: no other rank casts its tokens."""
        return ShardInfo(tokens=dist.get_rank() if dist.is_initialized() else 0)

    def slots(self) -> Iterator[tuple[Any, str, str]]:
        """Yields (linear, slot, role) of each operand that is quantized here and read by the linear."""
        for role, linears in self._readers.items():
            if (quantizer := self.fp8_site.casts[role].rowwise) is not None:
                for linear in linears:
                    yield linear, quantizer.slot.name, role

    def tokens(self, x: torch.Tensor, *, training: bool) -> torch.Tensor:
        """Returns x [..., hidden] in codes, or unchanged if the experts of this call do not read codes."""
        if not self._sends_codes("input"):
            return x
        coded: torch.Tensor = _Tokens.apply(x, self, training, record_time(training, x))
        return coded

    def with_gradient_in_fp8(self, y: torch.Tensor, *, training: bool) -> torch.Tensor:
        """Returns y [..., hidden]; its gradient continues in codes if the experts of this call read codes."""
        if not self._sends_codes("grad_output"):
            return y
        result: torch.Tensor = _Gradients.apply(y, self)
        return result

    def quantize(self, x: torch.Tensor, role: str, *, record: bool) -> QuantizedTokens:
        """Quantizes x [..., hidden] as the role."""
        site, matrix = self.fp8_site, x.reshape(-1, x.shape[-1])
        quantizer = site.casts[role].rowwise
        assert quantizer is not None
        region = None
        if role == "grad_output" and site.stochastic:
            region = site.next_region(0, 0, matrix.shape[1])
        side = quantizer(matrix, "rowwise", record=record, region=region).rowwise
        assert side is not None
        return QuantizedTokens.of_side(side, quantizer.rule, x.shape, x.dtype)

    def _sends_codes(self, role: str) -> bool:
        """Whether all experts run in FP8 here, and read this operand as it is planned to be sent."""
        quantizer, linears = self.fp8_site.casts[role].rowwise, self._readers[role]
        if self._stopped or quantizer is None:
            return False
        run_here = all(linear.runs_fp8() for linear in linears)
        # Experiments and the guard change plans.
        plans = [linear.fp8_site.active_site.plan for linear in linears]
        refusals = (refusal(plan, role, quantizer.rule) for plan in plans)
        why = self._refused_on_other_ranks(role) or next(filter(None, refusals), None)
        if self.fp8_site.state.experiment:
            return self._on_all_ranks(run_here and why is None)
        if why is not None:
            self._note(role, None, why)
        return run_here and why is None

    def _on_all_ranks(self, yes: bool) -> bool:
        """Whether ``yes`` holds on all ranks that share the layer's experts. Collective over them."""
        if not parallel_state.model_parallel_is_initialized():
            return yes
        all_of_them = torch.tensor(yes, dtype=torch.int64, device=self.fp8_site.state.device)
        group = parallel_state.get_expert_model_parallel_group()
        dist.all_reduce(all_of_them, op=dist.ReduceOp.MIN, group=group)
        return bool(all_of_them)

    def _refused_on_other_ranks(self, role: str) -> str | None:
        """Why some expert of the layer, on any rank, reads no codes in this phase; None if all do, as far as known."""
        state = self.fp8_site.state
        if state.phase != "healing" or (quantizer := self.fp8_site.casts[role].rowwise) is None:
            return self._refusals[role]
        if role not in self._healing_refusals:
            plans = (healing_plan(plan, state.phases.parts) for plan in self._plans(role))
            refusals = (refusal(plan, role, quantizer.rule) for plan in plans)
            self._healing_refusals[role] = next(filter(None, refusals), None)
        return self._healing_refusals[role]

    def update_refusals(self) -> None:
        """Determines, without communication, whether other ranks' experts read codes.

        It uses their plans with the guard's moves, which every rank knows.
        """
        self._healing_refusals.clear()
        for role in self._readers:
            quantizer = self.fp8_site.casts[role].rowwise
            if quantizer is not None:
                refusals = (refusal(plan, role, quantizer.rule) for plan in self._plans(role))
                self._refusals[role] = next(filter(None, refusals), None)

    def _plans(self, role: str) -> list[SitePlan]:
        """Returns the plans of the linears that read an operand, for all experts of the layer, by number."""
        linears = self._readers[role]
        own = {linear.fp8_site.plan.name: linear.fp8_site.plan for linear in linears}
        first, state = linears[0], linears[0].fp8_site.state
        overridden = getattr(self._config, "fp8_overrides", None) or (state.guard and state.guard.moves)
        if not (overridden or state.phases.parts):  # all experts have equal plans
            return list(own.values())
        names = {expert_name(first.fp8_site.plan.name, e): None for e in range(self._config.num_moe_experts)}
        return [own.get(name) or plan_of(first, name, state) for name in names]

    def _note(self, role: str, rule: Rule | None, why: str | None) -> None:
        """Notes at the experts' sites in which format they receive an operand."""
        text = f"arrive as {rule} codes" if why is None else f"travel in high precision: {why}"
        for linear in self._readers[role]:
            notes = linear.fp8_site.notes
            notes -= {note for note in notes if note.startswith(_NOTED)}
            notes.add(f"{_NOTED}{_SENT[role]} {text}")

    def _plan(self, name: str) -> SitePlan:
        """Returns the plan of what is sent in codes; notes it at the experts' sites."""
        number = None if self.layer is None or self.layer.number < 0 else self.layer.number
        operands: dict[str, dict[str, CastSpec | None]] = {
            gemm: dict.fromkeys(roles) for gemm, roles in GEMM_OPERANDS.items()
        }
        for role in self._readers:
            cast, why = dispatch_cast(self._plans(role), role)
            operands[READERS[role][0]][role] = cast
            self._note(role, None if cast is None else cast.rule, why)
        if not any(cast for casts in operands.values() for cast in casts.values()):
            return bf16_site(name, number, "the experts read no codes with scales per token")
        plan = self._readers["input"][0].fp8_site.plan
        if plan.precision != "fp8":
            plan = self._readers["grad_output"][0].fp8_site.plan
        return SitePlan(name, number, "fp8", plan.recipe, plan.backend, "moe_fp8_dispatch", operands)


class _Tokens(torch.autograd.Function):
    """Converts tokens to codes; their gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dispatch: Dispatch, training: bool, when: str) -> torch.Tensor:
        ctx.site = dispatch.fp8_site
        no_weight = x.new_empty(0, x.shape[-1])
        options: Any = {"training": training, "when": when}
        with count_forward([ctx.site], [x], [no_weight], **options) as (record, ctx.deferred):
            return dispatch.quantize(x, "input", record=record)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.deferred is not None:
            ctx.deferred.record([ctx.site])
        return grad, None, None, None


class _Gradients(torch.autograd.Function):
    """Passes values unchanged; converts their gradient to codes."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
        ctx.dispatch = dispatch
        return y.view_as(y)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.dispatch.quantize(grad, "grad_output", record=True), None


_WHY = "tokens and gradients in FP8 are sent as bytes"
patches = PatchList("megatron.core.transformer.moe")


@patches.wrap("token_dispatcher.all_to_all", _WHY)
def all_to_all_of_rows(
    original: Callable[..., Any],
    group: Any,
    input_: Any,
    output_split_sizes_: Any = None,
    input_split_sizes: Any = None,
) -> Any:
    """all_to_all, forward and backward, of rows in codes too."""
    return _send_rows(
        input_,
        lambda rows: original(group, rows, output_split_sizes_, input_split_sizes),
        lambda rows: original(group, rows, input_split_sizes, output_split_sizes_),
    )


@patches.wrap("token_dispatcher.gather_from_sequence_parallel_region", _WHY)
def gather_of_rows(
    original: Callable[..., Any],
    input_: Any,
    tensor_parallel_output_grad: bool = True,
    group: Any = None,
    output_split_sizes: Any = None,
    use_global_buffer: bool = False,
) -> Any:
    """gather_from_sequence_parallel_region of rows in codes too; their gradients are summed as before."""

    def forward(rows: Any) -> Any:
        return original(rows, tensor_parallel_output_grad, group, output_split_sizes, use_global_buffer)

    if not isinstance(input_, QuantizedTokens):
        return forward(input_)
    assert tensor_parallel_output_grad, "dispatchers sum the gradients of what they gather"

    def backward(rows: Any) -> Any:
        return reduce_scatter_to_sequence_parallel_region(rows, group, output_split_sizes, use_global_buffer)

    return _send_rows(input_, forward, backward)


@patches.wrap("token_dispatcher.reduce_scatter_to_sequence_parallel_region", _WHY)
def reduce_scatter_of_rows(
    original: Callable[..., Any],
    input_: Any,
    group: Any = None,
    input_split_sizes: Any = None,
    use_global_buffer: bool = False,
) -> Any:
    """reduce_scatter_to_sequence_parallel_region, whose gradient may be in codes."""
    return _send_rows(
        input_,
        lambda rows: original(rows, group, input_split_sizes, use_global_buffer),
        lambda rows: gather_from_sequence_parallel_region(
            rows, True, group, input_split_sizes, use_global_buffer
        ),
    )


@patches.wrap(
    "experts.SequentialMLP._pad_tensor_for_quantization",
    "tokens in FP8 are not joined with zeros: casts and products here take any number of tokens",
)
def padding_of_values(original: Callable[..., Any], self: Any, hidden: Any, probs: Any) -> Any:
    """SequentialMLP._pad_tensor_for_quantization, which does not pad tokens in codes."""
    return (hidden, probs) if isinstance(hidden, QuantizedTokens) else original(self, hidden, probs)


_Send = Callable[[torch.Tensor], torch.Tensor]


def _send_rows(rows: torch.Tensor, forward: _Send, backward: _Send) -> Any:
    """Sends rows by ``forward``, and their gradients by ``backward``."""
    if not torch.is_grad_enabled() or not rows.requires_grad:
        return _apply(rows, forward)
    return _SendRows.apply(rows, forward, backward)


def _apply(rows: torch.Tensor, send: _Send) -> torch.Tensor:
    return rows.apply_to_rows(send) if isinstance(rows, QuantizedTokens) else send(rows)


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: _Send, send_back: _Send) -> torch.Tensor:
        ctx.send_back = send_back
        return _apply(rows, send)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _apply(grad, ctx.send_back), None, None
