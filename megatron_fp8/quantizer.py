"""quantize, without state; Quantizer, with a site's state for one operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from .backends import reference
from .backends.base import AmaxReduction, CastRequest, CastResult, Region, check_matrix
from .files.argument_check import check_tensor
from .kernels.cast_dispatch import block_amaxes, in_memory
from .numerics.cast import RandomKey
from .numerics.rule import Direction, Rule
from .recipe import Recipe, recipe_name
from .state.arena import Slot
from .state.observer_protocol import CastEvent, Observer
from .tensor import Float8Tensor


def quantize(
    x: torch.Tensor,
    recipe: Recipe,
    role: str,
    direction: Direction = "rowwise",
    *,
    key: RandomKey | None = None,
) -> Float8Tensor:
    """Quantize a matrix as ``recipe`` quantizes the operand ``role``.

    Args:
        x: [rows, cols], float32, bfloat16 or float16; any strides; may be empty. NaN -> 0x7F, +-Inf -> +-max; neither
            makes a scale non-finite.
        recipe: one of recipe.py's classes. DelayedScaling, which has no history here, scales by x's own amax.
        role: 'input', 'weight' or 'grad_output'.
        direction: 'rowwise' (blocks along cols), 'columnwise' (codes of the transposed matrix, blocks along rows) or
            'both'.
        key: chooses the random bits if the recipe rounds grad_output stochastically.

    Raises:
        ValueError: shape, dtype, role or direction is wrong, or the recipe leaves this role in high precision.
    """
    check_tensor("quantize", x)
    recipe_name(recipe)
    check_matrix(x, direction)
    rule = recipe.rule(role)
    if rule is None:
        raise ValueError(f"{recipe!r} leaves {role!r} in high precision: there is nothing to quantize")
    if rule.stochastic and key is None:
        raise ValueError(
            f"{recipe!r} rounds {role!r} stochastically: pass key=RandomKey(seed) to name the random bits"
        )
    region = None if key is None else Region(key)
    return reference.quantize(CastRequest(x, rule, direction, region=region)).tensor


def measure(x: torch.Tensor) -> torch.Tensor:
    """float32 [2] on x's device: the amax of x [..., K] (may be Inf, never NaN; 0 if x is empty); the number of NaN and
    Inf."""
    matrix = in_memory(x.detach().reshape(-1, x.shape[-1])).contiguous()
    (amax,), nonfinite = block_amaxes(matrix, [(0, 0)])
    counted = amax.new_zeros(()) if nonfinite is None else nonfinite.to(amax.dtype)
    return torch.stack([amax.view([]), counted.view([])])


class Quantizer:
    """A GEMM site's quantizer of one role: the recipe's rule, the slot for amaxes, and the backend.

    Attributes:
        computes: whether its kernels take a LazyTensor, which they compute while reading (kernels/lazy_tensor.py).
    """

    def __init__(self, rule: Rule, slot: Slot, backend: ModuleType):
        self.rule, self.slot, self.backend = rule, slot, backend
        kernels_cast = getattr(backend, "kernels_cast", None)
        self._returns_slot_amax = kernels_cast is not None
        self.computes: bool = kernels_cast is not None and kernels_cast(rule)

    def __call__(
        self,
        x: torch.Tensor,
        direction: Direction,
        *,
        record: bool,
        reduce_amax: AmaxReduction | None = None,
        region: Region | None = None,
    ) -> Float8Tensor:
        """One cast of ``cast_each``."""
        return cast_each([CastJob(self, direction, x, record, reduce_amax, region, for_product=False)])[0]

    def quantize(
        self, x: torch.Tensor, direction: Direction, *, reduce_amax: AmaxReduction | None = None
    ) -> CastResult:
        """Casts x [rows, cols] and records nothing."""
        request = self.request(CastJob(self, direction, x, False, reduce_amax, for_product=False))
        done: CastResult = self.backend.quantize(
            x, request.rule, direction, scale=request.scale, reduce_amax=reduce_amax
        )
        return done

    def request(self, job: CastJob) -> CastRequest:
        """The request for a cast, which is counted: by the delayed scale, once warm, else by current scaling."""
        rule, slot, arena = self.rule, self.slot, self.slot.arena
        observed = arena.observer is not None
        arena.counter.current.casts += 1
        return CastRequest(
            job.x,
            rule,
            job.direction,
            slot.views.scale if rule.delayed and slot.warm else None,
            # An observer needs the cast's own amax, which kernels that record do not return.
            slot.views.running if job.record and not (observed and self._returns_slot_amax) else None,
            job.reduce_amax,
            job.region if rule.stochastic else None,
            job.for_product and self.computes and not observed,
        )

    def observe_cast(self, job: CastJob, quantized: CastResult, observer: Observer) -> None:
        """Shows the observer a cast, and records what the cast did not."""
        if job.record and self._returns_slot_amax:
            self.record(quantized.amax, quantized.nonfinite)
        shard = job.reduce_amax is not None
        observer.cast(CastEvent(self.slot.name, job.x, quantized, job.direction, job.record, shard))

    def record(self, amax: torch.Tensor, nonfinite: torch.Tensor | None) -> None:
        """Updates the slot's running amax by this one (float32 [], may be Inf, never NaN); adds the non-finite count,
        if any."""
        self.slot.views.running.record(amax, nonfinite)

    def observe(self, x: torch.Tensor) -> None:
        """Records the amax of x [rows, cols] without a cast.

        Non-finite elements are not counted: without a cast they do not saturate, and x's users see them.
        """
        self.record(measure(x)[0], None)

    def requantize(self, x: torch.Tensor, direction: Direction, scale: torch.Tensor | None) -> Float8Tensor:
        """Repeats an earlier cast of x with its delayed scale (None: current scaling). Records nothing."""
        self.slot.arena.counter.current.casts += 1
        done: CastResult = self.backend.quantize(x, self.rule, direction, scale=scale)
        return done.tensor

    def delayed_scale(self) -> torch.Tensor | None:
        """float32 [], a copy of the delayed scale; None for current scaling (not delayed, or not yet warm)."""
        return self.slot.scale if self.rule.delayed and self.slot.warm else None


class Casts(NamedTuple):
    """The quantizers of one role of a site, by direction; None: that GEMM reads it in high precision.

    Both are the same object if one cast serves both GEMMs.
    """

    rowwise: Quantizer | None
    columnwise: Quantizer | None

    @property
    def shared(self) -> Quantizer | None:
        """The quantizer that serves both GEMMs; None if there is none."""
        return self.rowwise if self.rowwise is self.columnwise else None

    @property
    def quantizers(self) -> list[Quantizer]:
        """The existing quantizers, each once."""
        return [quantizer for quantizer in dict.fromkeys(self) if quantizer is not None]

    def observe(self, x: torch.Tensor) -> None:
        """Records the amax of x [rows, cols] without a cast, for delayed scales."""
        for quantizer in self.quantizers:
            if quantizer.slot.delayed is not None:
                quantizer.observe(x)

    def parts(self) -> list[tuple[Quantizer, Direction]]:
        """The casts that make both sides: (quantizer, direction)."""
        row, column = self
        if row is not None and row is column:
            return [(row, "both")]
        found: list[tuple[Quantizer, Direction]] = [] if row is None else [(row, "rowwise")]
        return found if column is None else [*found, (column, "columnwise")]


class CastJob(NamedTuple):
    """A cast for ``cast_each``.

    Attributes:
        x: [rows, cols].
        record: record amax and health in the slot; False in evaluation and in a recomputation.
        reduce_amax: shares amaxes with the ranks that have other rows of the matrix; None: x is all of it.
        region: x's position in that matrix and the random stream, for stochastic rounding.
        for_product: only the backend's gemm reads the sides, so they may have its layout.
    """

    quantizer: Quantizer
    direction: Direction
    x: torch.Tensor
    record: bool
    reduce_amax: AmaxReduction | None = None
    region: Region | None = None
    for_product: bool = True


def cast_each(jobs: Sequence[CastJob]) -> list[Float8Tensor]:
    """Makes all casts, those of one backend in one call if it has ``quantize_each``."""
    requests: dict[ModuleType, list[CastRequest]] = {}
    for job in jobs:
        requests.setdefault(job.quantizer.backend, []).append(job.quantizer.request(job))
    done = {}
    for backend, asked in requests.items():
        quantize_each = getattr(backend, "quantize_each", None) or _quantize_in_turn(backend)
        done[backend] = iter(quantize_each(asked))
    made = []
    for job in jobs:
        quantized: CastResult = next(done[job.quantizer.backend])
        if (observer := job.quantizer.slot.arena.observer) is not None:
            job.quantizer.observe_cast(job, quantized, observer)
        made.append(quantized.tensor)
    return made


def _quantize_in_turn(backend: ModuleType) -> Callable[[Sequence[CastRequest]], list[CastResult]]:
    """``quantize_each`` for a backend that has none."""

    def quantize(request: CastRequest) -> CastResult:
        options = request._asdict()
        if not hasattr(backend, "kernels_cast"):
            del options["for_product"]
        found: CastResult = backend.quantize(**options)
        return found

    return lambda requests: [quantize(request) for request in requests]
