"""A GEMM site at run time: the plan entry made into quantizers, and the three GEMMs by name; and its weight, quantised
and kept for as long as nobody can have written it.

Optimizers that write through flat buffers leave no trace in a tensor's version; whoever steps tells the state, whose
``weight_generation`` covers those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..backends import BACKENDS, emulated
from ..backends.base import RESULTS
from ..backends.native import backend as native
from ..backends.native.direct import facts_of
from ..kernels.gemms import add_matmul_fp32, matmul_high_precision
from ..numerics.rule import Direction
from ..params.fp8_parameter import Fp8Parameter
from ..plan.operands import READERS, Cast
from ..plan.site_plan import SitePlan
from ..plan.switch import WatchedForwards
from ..quantizer import Casts, Quantizer, measure
from ..state.arena import Group
from ..state.fp8_state import Fp8State
from ..state.observer import SeenProduct
from ..tensor import Float8Tensor, Operand, QuantizedSide, Sides
from .fitted import Known, fitted
from .gradient_stream import GradientStream
from .kinds import Kinds
from .registry import register
from .saved_layout import SideLayout


class GemmSite:
    """Quantises a linear layer's operands and multiplies them, as its plan says.

    Args:
        plan: the site's entry.
        state: the model's FP8 state.
        group: the amax reduction group of its slots (None: this process alone).
        seed: of stochastic rounding.
        stream: distinguishes data-parallel ranks, whose tokens differ, in stochastic rounding.
        casts: what quantises each role, where another site's quantizers are to serve; None: quantizers of its own.

    Attributes:
        casts: role -> its quantizers.
        backend: what they and the GEMMs run on; None if nothing is in FP8.
        weights: quantises the weight and keeps it.
        gradients: names the random bits by which grad_output is rounded.
        forwards: whether calls go as one operator, and recomputations as their forwards.
        traced: what compiled code knows the site by.
        notes: what the report says of how the site ran.
        kinds: of its calls, those that come again, and what they are bound to.
        has_run: whether a forward came here.
    """

    @torch.inference_mode(False)  # slots and handle must be writable and savable in training later
    def __init__(
        self,
        plan: SitePlan,
        state: Fp8State,
        group: Group,
        *,
        seed: int = 0,
        stream: int = 0,
        casts: Mapping[str, Casts] | None = None,
    ):
        self.plan, self.state = plan, state
        self.notes: set[str] = set()
        self.backend: ModuleType | None = None if plan.backend is None else BACKENDS[plan.backend]
        self.casts = {role: self._casts(role, group) for role in READERS} if casts is None else dict(casts)
        kept = self.casts["input"].columnwise
        layout = "" if kept is None else str(SideLayout.of(kept.rule, kept.backend.turns_codes(kept.rule)))
        self.traced = register(self, layout)
        self.weights = WeightCache(self.casts["weight"], state)
        self.seed, self.stream = seed, stream
        stochastic = any(quantizer.rule.stochastic for quantizer in self.casts["grad_output"].quantizers)
        self.gradients = GradientStream(plan.name, state, stochastic=stochastic, seed=seed, rank=stream)
        self.forwards = WatchedForwards(state)
        self.kinds = Kinds()
        self.has_run = False
        self._stand_in: GemmSite | None = None

    def _casts(self, role: str, group: Group) -> Casts:
        """What quantises a role: one quantizer where one serves both GEMMs that read it. ``group``: of its slots."""
        one, other = (self.plan.operands[gemm][role] for gemm in READERS[role])
        name = f"{self.plan.name}.{role}"
        row = self._quantizer(one, name, group)
        if one == other:
            return Casts(row, row)
        return Casts(
            row, self._quantizer(other, name if row is None else f"{name}.{READERS[role][1]}", group)
        )

    def _quantizer(self, cast: Cast | None, name: str, group: Group) -> Quantizer | None:
        if cast is None:
            return None
        assert self.backend is not None
        slot = self.state.arena(group).add(cast.delayed, cast.rule.fmt)
        slot.name = name
        return Quantizer(cast.rule, slot, self.backend)

    @property
    def acting(self) -> GemmSite:
        """The site that calls of this layer run: itself, but for experiments (``replaced_by``)."""
        return self if self._stand_in is None else self._stand_in

    @contextmanager
    def replaced_by(self, stand_in: GemmSite) -> Iterator[None]:
        """Inside, calls of this layer run another site, in any thread and in recomputations too."""
        before, self._stand_in = self._stand_in, stand_in
        try:
            yield
        finally:
            self._stand_in = before

    @property
    def quantizers(self) -> dict[str, Quantizer | None]:
        """By role; what a role is cast by a second time, for its second GEMM, as 'role.gemm'."""
        found: dict[str, Quantizer | None] = {}
        for role, casts in self.casts.items():
            found[role] = casts.columnwise if casts.rowwise is None else casts.rowwise
            if casts.twice:
                found[f"{role}.{READERS[role][1]}"] = casts.columnwise
        return found

    @property
    def is_fp8(self) -> bool:
        """Whether any GEMM of this site runs in FP8, as planned."""
        return self.plan.precision == "fp8"

    @property
    def has_histories(self) -> bool:
        """Whether scales of some operand are delayed."""
        return any(q.slot.delayed is not None for casts in self.casts.values() for q in casts.quantizers)

    def computes(self, role: str) -> bool:
        """Whether this operand is only ever quantised, by kernels that can compute it: all its GEMMs are FP8."""
        in_fp8 = all(self.plan.gemms[gemm] == "fp8" for gemm in READERS[role])
        return in_fp8 and all(quantizer.computes for quantizer in self.casts[role].quantizers)

    def note_forward(self) -> None:
        """A forward came here."""
        self.has_run = True

    def multiply(
        self,
        gemm: str,
        a: Operand,
        b: Operand,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        *,
        record: bool = True,
    ) -> torch.Tensor:
        """a [M, K] @ b [N, K]^T (+ bias [N]) = [M, N] as the plan has it for 'fprop', 'dgrad' or 'wgrad'; counted.

        ``record`` False: a forward of evaluation, or again in a recomputation.
        """
        y = self._multiply(gemm, a, b, out_dtype, bias)
        if (observer := self.state.observer) is not None:
            observer.product(SeenProduct(self.plan.name, gemm, a, b, y, record))
        return y

    def multiply_at_once(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """fprop of x [..., K], cast and multiplied in one call, with the bits of doing both; None where that cannot be.

        It is for inference: a weight that lives as FP8, few tokens on a CPU, nothing recorded nor counted and nobody
        watching.
        """
        quantizer = self.casts["input"].rowwise
        if quantizer is None or self.backend is not emulated or not isinstance(weight, Fp8Parameter):
            return None
        side = weight.quantized.rowwise
        if side is None or self.plan.gemms["fprop"] != "fp8" or self.state.observer is not None:
            return None
        return emulated.quantize_and_multiply(x, *quantizer.way(), side, bias)

    def wgrad_dtype(self, wanted: torch.dtype) -> torch.dtype:
        """What wgrad's product is asked for, where its float32 sums are handed on in the wanted dtype: that itself of a
        scaled product, which rounds once; float32 of 16-bit GEMMs, whose partial sums torch may round."""
        scaled = self.plan.gemms["wgrad"] == "fp8" and self.backend is native
        return wanted if scaled and wanted in RESULTS else torch.float32

    def accumulate(
        self, gemm: str, a: Operand, b: Operand, into: torch.Tensor, *, record: bool = True
    ) -> None:
        """Add to ``into`` [M, N], float32, what ``multiply`` gives: in the product where it is this package's own, in C
        or by Triton, or in high precision on a GPU; torch's scaled products cannot, nor can one that is observed."""
        in_fp8 = self.plan.gemms[gemm] == "fp8" and self.state.observer is None
        if in_fp8 and self._accumulates(a, b, into):
            self.state.counts.fp8_gemms += 1
            return
        if self.plan.gemms[gemm] == "fp8" or self.state.observer is not None:
            into.add_(self.multiply(gemm, a, b, torch.float32, record=record))
            return
        self.state.counts.hp_gemms += 1
        add_matmul_fp32(into, *_plain(a, b))

    def _accumulates(self, a: Operand, b: Operand, into: torch.Tensor) -> bool:
        """Whether the backend has added the product."""
        if self.backend is emulated:
            return emulated.accumulate(a, b, into)
        if self.backend is not native or not isinstance(a, QuantizedSide) or not isinstance(b, QuantizedSide):
            return False
        return native.accumulate(a, b, into)

    def _multiply(
        self, gemm: str, a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self.plan.gemms[gemm] == "fp8":
            assert isinstance(a, QuantizedSide) and isinstance(b, QuantizedSide)
            self.state.counts.fp8_gemms += 1
            return self.multiply_codes(a, b, out_dtype, bias, fast=gemm == "fprop")
        self.state.counts.hp_gemms += 1
        return matmul_high_precision(*_plain(a, b), out_dtype, bias)

    def multiply_codes(
        self,
        a: QuantizedSide,
        b: QuantizedSide,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None,
        *,
        fast: bool,
    ) -> torch.Tensor:
        """The backend's gemm. ``fast``: tensor cores may keep partial sums at their own precision."""
        assert self.backend is not None
        y: torch.Tensor = self.backend.gemm(a, b, out_dtype=out_dtype, bias=bias, fast_accumulation=fast)
        return y


def _plain(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands of a product in high precision: what is quantised is decoded to the other's dtype."""
    dtype = next((o.dtype for o in (a, b) if isinstance(o, torch.Tensor)), torch.bfloat16)
    first, second = (o if isinstance(o, torch.Tensor) else o.dequantize(dtype) for o in (a, b))
    return first, second


class Kept:
    """A quantised weight, of what memory in which state it is, and the delayed scale that was used, if one was.

    Args:
        sides: gives the quantised weight.
        facts: what products ask of its sides, if that is known.
        fitted: evaluation made it, whose scale may be another than training's.
    """

    def __init__(
        self,
        version: tuple[Any, ...],
        recorded: bool,
        scale: torch.Tensor | None,
        sides: Callable[[], Float8Tensor],
        facts: tuple[Any, ...] | None = None,
        *,
        fitted: bool = False,
    ):
        self.version, self.recorded, self.scale = version, recorded, scale
        self.made_by, self._facts, self.fitted = sides, facts, fitted

    @cached_property
    def quantized(self) -> Float8Tensor:
        """The quantised weight."""
        return self.made_by()

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Codes and scale_inv of each side that there is."""
        return tuple(
            t for side in self.quantized.sides if side is not None for t in (side.codes, side.scale_inv)
        )

    @property
    def facts(self) -> tuple[Any, ...]:
        """What products ask of its sides."""
        if self._facts is None:
            self._facts = tuple(facts_of(side) for side in self.quantized.sides if side is not None)
        return self._facts


class WeightCache:
    """Quantises a site's weight, and keeps what that gave.

    Args:
        casts: the role's.
        state: of the model: which iteration it is, and whether weights may be kept.

    Attributes:
        casts, state: as given.
        evaluated_by: what quantises it in evaluation: ``casts``, unless others than the training may write it.
        held: what is kept.
    """

    def __init__(self, casts: Casts, state: Fp8State):
        self.casts, self.state = casts, state
        self.evaluated_by = casts
        self.held: Kept | None = None
        self._memory: StorageWeakRef | None = None  # of what is kept, so that no other memory gets its number
        self._observed = -1  # the iteration in which the weight was recorded without a cast
        shared = casts.shared
        # Codes that serve both directions, one a transposed view of the other, are one copy anyway.
        self._may_make_again = shared is not None and not (
            shared.rule.granularity.symmetric and shared.backend.turns_codes(shared.rule)
        )

    def fit(self, known: Callable[[], Known], tell: Callable[[str], Any]) -> None:
        """Others than the training may write the weight: evaluation looks whether its delayed scale still fits."""
        self.evaluated_by = fitted(self.casts, known, tell)

    def casts_in(self, training: bool) -> Casts:
        """What quantises it."""
        return self.casts if training else self.evaluated_by

    def fits(self, training: bool) -> bool:
        """Whether a cast looks if its delayed scale fits, and may take another than training's."""
        return self.casts_in(training) is not self.casts

    @property
    def direction(self) -> Direction:
        """What a cast of the weight makes."""
        return "rowwise" if self._makes_again else "both"

    @property
    def _makes_again(self) -> bool:
        """Whether the columnwise side is made in each backward and not kept from the forward."""
        return self._may_make_again and not self.state.keeps_columnwise

    @property
    def kept(self) -> Float8Tensor | None:
        """The quantised weight that is held now."""
        return None if self.held is None else self.held.quantized

    def quantized(self, weight: torch.Tensor, *, fresh: bool, record: bool, training: bool = True) -> Sides:
        """The weight [N, K], and [K, N] columnwise: each quantised, or as it is where the plan has high precision.

        It is quantised once an iteration if the state ``keeps_weights``, else at each call. The columnwise side is None
        where backward makes it again (weight_again.py).

        Args:
            fresh: quantise again whatever is kept (Megatron's is_first_microbatch).
            training: False in evaluation.

        A weight that lives as FP8 is used as it is; its amax counts once an iteration, as if it had been cast here.
        """
        sides = self.ready(weight, fresh=fresh, record=record)
        if sides is None:
            with torch.inference_mode(False), torch.no_grad():  # codes that a later backward can save
                casts = self.casts_in(training)
                quantized = casts(weight, self.direction, record=record, for_product=True)
                sides = self.take(weight, quantized, record=record, training=training)
        return sides

    def ready(self, weight: torch.Tensor, *, fresh: bool, record: bool) -> Sides | None:
        """``quantized`` where that needs no cast, else None."""
        if isinstance(weight, Fp8Parameter):
            assert self.casts.rowwise is not None, (
                "a weight that the plan keeps in high precision was made FP8"
            )
            if record and self._first_this_iteration():
                weight.record()
                if (observer := self.state.observer) is not None:
                    observer.stored(weight.quantizer.slot.name, weight)
            return Sides(weight.quantized.rowwise, weight.quantized.columnwise)
        if self.casts.rowwise is self.casts.columnwise is None:
            return Sides(weight, weight.t())
        kept = self.serving(weight, fresh=fresh, record=record)
        return None if kept is None else self._sides(weight, kept)

    def take(self, weight: torch.Tensor, quantized: Float8Tensor, *, record: bool, training: bool) -> Sides:
        """Keep what ``casts_in`` just gave of the weight, in the direction that is asked for; as ``quantized``."""
        column, fitted = self.casts_in(training).columnwise, self.fits(training)
        scale = None if column is None else column.delayed_scale()
        kept = Kept(self.version(weight), record, scale, lambda: quantized, fitted=fitted)
        return self._sides(weight, self.keep(weight, kept))

    def _sides(self, weight: torch.Tensor, kept: Kept) -> Sides:
        made = kept.quantized
        if self._makes_again:
            return Sides(made.rowwise, None)
        return Sides(made.rowwise or weight, weight.t() if made.columnwise is None else made.columnwise)

    def serving(self, weight: torch.Tensor, *, fresh: bool, record: bool) -> Kept | None:
        """What was kept, if it is of the weight as it is now and may serve; arguments as those of ``quantized``."""
        kept = self.held
        # Of a weight without a version nobody would notice that it was written.
        if kept is None or fresh or not self.state.keeps_weights or weight.is_inference():
            return None
        if kept.version != self.version(weight):
            return None
        if record and not kept.recorded:
            self.record(measure(weight))
        return kept

    def record(self, measured: torch.Tensor) -> None:
        """Record a weight that was cast without a record, once where weights are kept. measured: float32 [2]."""
        kept = self.held
        if kept is not None and kept.recorded:
            return
        for quantizer in self.casts.quantizers:
            quantizer.record(measured[0], measured[1])
        if kept is not None:
            kept.recorded = True

    def recorded_nothing(self) -> None:
        """What was recorded last was taken back."""
        self._observed = -1
        if self.held is not None:
            self.held.recorded = False

    def keep(self, weight: torch.Tensor, kept: Kept) -> Kept:
        """Keep what was just made of the weight."""
        if self._memory is None or self._memory.cdata != _storage_number(weight):
            self._memory = StorageWeakRef(weight.untyped_storage())
        self.held = kept
        return kept

    def observe(self, weight: torch.Tensor) -> None:
        """Record the weight's amax, once an iteration, without a cast."""
        if self._first_this_iteration():
            self.casts.observe(weight)

    def forget(self) -> None:
        """Drop what is kept: another weight took this one's place, or the next call will quantise anyway."""
        self.held = None

    def _first_this_iteration(self) -> bool:
        first, self._observed = self._observed != self.state.iteration, self.state.iteration
        return first

    def version(self, weight: torch.Tensor, weight_generation: int | None = None) -> tuple[Any, ...]:
        """The weight's memory, how it lies there, and what is known of writes to it (now, or in an earlier generation).

        The storage is named by its number, which no other has for as long as somebody refers to it, as the cache does:
        its address freed memory gives to another. Codes made in the capture of a CUDA graph exist at its replay only, so
        they are another version.
        """
        generation = self.state.weight_generation if weight_generation is None else weight_generation
        captured = self.state.capturing or (weight.is_cuda and torch.cuda.is_current_stream_capturing())
        version = 0 if weight.is_inference() else weight._version
        lies = weight.dtype, weight.shape, weight.stride(), weight.storage_offset()
        return generation, _storage_number(weight), *lies, version, captured


def _storage_number(tensor: torch.Tensor) -> int:
    number: int = torch._C._storage_id(tensor)  # type: ignore[attr-defined]
    return number
