"""quantize, without state; Quantizer, with a site's state for one operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .backends import reference
from .backends.base import AmaxReduction, CastRequest, Quantized, Region, RunningAmax, check_matrix
from .files.argument_check import check_tensor
from .kernels.cast_dispatch import block_amaxes, in_memory
from .numerics.cast import RandomKey
from .numerics.rule import Direction, Rule
from .recipe import Recipe, recipe_name
from .state.arena import Slot
from .state.observer_protocol import SeenCast
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
    return reference.quantize(x, rule, direction, region=region).tensor


def measure(x: torch.Tensor) -> torch.Tensor:
    """float32 [2] on x's device: the amax of x [..., K] (may be Inf, never NaN; 0 if x is empty); the number of NaN and
    Inf."""
    matrix = in_memory(x.detach().reshape(-1, x.shape[-1])).contiguous()
    (amax,), nonfinite = block_amaxes(matrix, [(0, 0)])
    counted = amax.new_zeros(()) if nonfinite is None else nonfinite.to(amax.dtype)
    return torch.stack([amax.view([]), counted.view([])])


class _Place(NamedTuple):
    """Views of one slot's numbers in its arena, and the tensors they belong to. scale: float32 [], delayed."""

    rows: torch.Tensor
    scales: torch.Tensor
    running: RunningAmax
    scale: torch.Tensor

    @staticmethod
    @torch.inference_mode(False)
    def of(slot: Slot) -> _Place:
        """The views of a slot."""
        rows, scales, index = slot.arena.rows, slot.arena.scale, slot.index
        running = RunningAmax(rows[0, index], rows.view(torch.int32)[0, index], rows[1, index])
        return _Place(rows, scales, running, scales[index])


class Quantizer:
    """A GEMM site's quantizer of one role: the recipe's rule, the slot for amaxes, and the backend."""

    def __init__(self, rule: Rule, slot: Slot, backend: ModuleType):
        self.rule, self.slot, self.backend = rule, slot, backend
        self._place: _Place | None = None
        kernels_cast = getattr(backend, "kernels_cast", None)
        self._returns_slot_amax = kernels_cast is not None
        self._has_kernel: bool = kernels_cast is not None and kernels_cast(rule)

    def __call__(
        self,
        x: torch.Tensor,
        direction: Direction,
        *,
        record: bool,
        reduce_amax: AmaxReduction | None = None,
        region: Region | None = None,
        for_product: bool = False,
    ) -> Float8Tensor:
        """``quantize``, which also records amax and health; record=False does not (evaluation, recomputation).

        for_product: only the backend's gemm reads the sides, so their scales may have its layout.
        """
        observer = self.slot.arena.observer
        if observer is None and self.computes:  # its kernels record as they go
            return self._by_kernels(x, direction, record, reduce_amax, for_product)
        # Kernels that record as they go return the slot's amax; an observer needs the cast's own.
        apart = observer is not None and self._returns_slot_amax
        running = self._in_arena().running if record and not apart else None
        quantized = self.quantize(x, direction, reduce_amax=reduce_amax, region=region, running=running)
        if record and apart:
            self.record(quantized.amax, quantized.nonfinite)
        if observer is not None:
            shard = reduce_amax is not None
            observer.cast(SeenCast(self.slot.name, x, quantized, direction, record, shard))
        return quantized.tensor

    def _by_kernels(
        self,
        x: torch.Tensor,
        direction: Direction,
        record: bool,
        reduce_amax: AmaxReduction | None,
        for_product: bool,
    ) -> Float8Tensor:
        self.slot.arena.counter.here.casts += 1
        done: Quantized = self.backend.quantize(
            x,
            self.rule,
            direction,
            scale=self._current_scale(),
            reduce_amax=reduce_amax,
            running=self._in_arena().running if record else None,
            for_product=for_product,
        )
        return done.tensor

    def quantize(
        self,
        x: torch.Tensor,
        direction: Direction,
        *,
        reduce_amax: AmaxReduction | None = None,
        region: Region | None = None,
        running: RunningAmax | None = None,
    ) -> Quantized:
        """Quantizes x [rows, cols] with the delayed scale, once warm, or by current scaling.

        Args:
            reduce_amax, region: as in backends.reference.quantize; a warm delayed scale is shared already and needs no
                reduction.
            running: receives amax and non-finite count.
        """
        slot, rule = self.slot, self.rule
        quantized: Quantized = self.backend.quantize(
            x,
            rule,
            direction,
            scale=self._current_scale(),
            reduce_amax=reduce_amax,
            region=region if rule.stochastic else None,
            running=running,
        )
        slot.arena.counter.here.casts += 1
        return quantized

    def request(self, x: torch.Tensor, direction: Direction, *, record: bool) -> CastRequest | None:
        """The cast as a request for ``cast_each``. None if the quantizer must be called: it is a subclass, rounds
        stochastically, its backend has no ``quantize_each``, or an observer sees each cast."""
        in_one_call = (
            hasattr(self.backend, "quantize_each") and type(self) is Quantizer and not self.rule.stochastic
        )
        if not in_one_call or self.slot.arena.observer is not None:
            return None
        place = self._in_arena()
        scale = place.scale if self.rule.delayed and self.slot.warm else None
        return CastRequest(x.contiguous(), self.rule, direction, scale, place.running if record else None)

    def record(self, amax: torch.Tensor, nonfinite: torch.Tensor | None) -> None:
        """Updates the slot's running amax by this one (float32 [], may be Inf, never NaN); adds the non-finite count,
        if any."""
        self._in_arena().running.record(amax, nonfinite)

    def observe(self, x: torch.Tensor) -> None:
        """Records the amax of x [rows, cols] without a cast.

        Non-finite elements are not counted: without a cast they do not saturate, and x's users see them.
        """
        self.record(measure(x)[0], None)

    def _in_arena(self) -> _Place:
        """The slot's views, made again only if the arena was resized."""
        arena, place = self.slot.arena, self._place
        if place is None or place.rows is not arena.rows or place.scales is not arena.scale:
            self._place = place = _Place.of(self.slot)
        return place

    def _current_scale(self) -> torch.Tensor | None:
        """float32 [], a view of the delayed scale, valid only now. None for current scaling."""
        return self._in_arena().scale if self.rule.delayed and self.slot.warm else None

    def again(self, x: torch.Tensor, direction: Direction, scale: torch.Tensor | None) -> Float8Tensor:
        """Repeats an earlier cast of x with its delayed scale (None: current scaling). Records nothing."""
        self.slot.arena.counter.here.casts += 1
        done: Quantized = self.backend.quantize(x, self.rule, direction, scale=scale)
        return done.tensor

    @property
    def computes(self) -> bool:
        """Whether its kernels take a LazyTensor, which they compute while reading (kernels/lazy_tensor.py)."""
        return self._has_kernel

    def delayed_scale(self) -> torch.Tensor | None:
        """float32 [], a copy of the delayed scale; None for current scaling (not delayed, or not yet warm)."""
        return self._in_arena().scale.clone() if self.rule.delayed and self.slot.warm else None


@dataclass
class Casts:
    """The quantizers of one role of a site, by direction; None: that GEMM reads it in high precision.

    Both are the same object if one cast serves both GEMMs.
    """

    rowwise: Quantizer | None
    columnwise: Quantizer | None

    @property
    def twice(self) -> bool:
        """Whether two casts are needed, one for each GEMM."""
        return None not in (self.rowwise, self.columnwise) and self.rowwise is not self.columnwise

    @property
    def shared(self) -> Quantizer | None:
        """The quantizer that serves both GEMMs; None if there is none."""
        return self.rowwise if self.rowwise is self.columnwise else None

    @property
    def quantizers(self) -> list[Quantizer]:
        """The existing quantizers, each once."""
        found = dict.fromkeys((self.rowwise, self.columnwise))
        return [quantizer for quantizer in found if quantizer is not None]

    def observe(self, x: torch.Tensor) -> None:
        """Records the amax of x [rows, cols] without a cast, for delayed scales."""
        for quantizer in self.quantizers:
            if quantizer.slot.delayed is not None:
                quantizer.observe(x)

    def __call__(
        self,
        x: torch.Tensor,
        direction: Direction,
        *,
        record: bool,
        reduce_amax: AmaxReduction | None = None,
        for_product: bool = False,
    ) -> Float8Tensor:
        """Casts x to the requested sides; arguments as Quantizer's."""
        options: Any = {"record": record, "reduce_amax": reduce_amax, "for_product": for_product}
        done = [quantizer(x, way, **options) for quantizer, way in self.parts(direction)]
        return done[0] if len(done) == 1 else _joined(done, x.dtype)

    def parts(self, direction: Direction) -> list[tuple[Quantizer, Direction]]:
        """The needed casts: (quantizer, direction)."""
        row = None if direction == "columnwise" else self.rowwise
        column = None if direction == "rowwise" else self.columnwise
        if row is not None and row is column:
            return [(row, "both")]
        found: list[tuple[Quantizer, Direction]] = [] if row is None else [(row, "rowwise")]
        return found if column is None else [*found, (column, "columnwise")]


class CastJob(NamedTuple):
    """A cast of x [rows, cols] for ``cast_each``; other fields are arguments of ``casts``."""

    casts: Casts
    x: torch.Tensor
    direction: Direction
    record: bool
    for_product: bool = True


def cast_each(jobs: Sequence[CastJob]) -> list[Float8Tensor]:
    """The result of ``casts`` for each job, bit for bit; one call if the backend has ``quantize_each``."""
    made: list[list[Any]] = []
    requests: dict[ModuleType, list[CastRequest]] = {}
    for casts, x, direction, record, for_product in jobs:
        made.append([])
        for quantizer, way in casts.parts(direction):
            request = quantizer.request(x, way, record=record)
            if request is None:
                made[-1].append(quantizer(x, way, record=record, for_product=for_product))
            else:
                quantizer.slot.arena.counter.here.casts += 1
                requests.setdefault(quantizer.backend, []).append(request)
                made[-1].append(quantizer.backend)
    together = {backend: iter(backend.quantize_each(asked)) for backend, asked in requests.items()}
    found = []
    for job, parts in zip(jobs, made, strict=True):
        done = [part if isinstance(part, Float8Tensor) else next(together[part]).tensor for part in parts]
        found.append(done[0] if len(done) == 1 else _joined(done, job.x.dtype))
    return found


def _joined(made: Sequence[Float8Tensor], dtype: torch.dtype) -> Float8Tensor:
    """Joins the sides of one or two tensors."""
    rowwise = next((one.rowwise for one in made if one.rowwise is not None), None)
    columnwise = next((one.columnwise for one in made if one.columnwise is not None), None)
    return Float8Tensor(rowwise, columnwise, dtype)
