"""Experiments: variants of a model run on the same batches, and compared with high precision.

Differences are paired: both runs have the same batch, random numbers and delayed state. Measures of the
gradient:

* ``gradient_error``: norm of the difference over the gradient's norm, over all parameters;
* ``distance``: root mean square of the parameter tensors' relative errors, each capped at 1, so all tensors
weigh the same. Adam's update does not depend on the size of a tensor's gradient, so errors of small tensors
matter as much. Tensors whose gradient is meaningless after rounding to BF16 are excluded (the gradient of an
attention key bias consists of rounding errors);
* ``bias``: as gradient_error, for the mean of the difference over batches: the error that more data does not
average out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch

from .model_runner import Gradients, ModelRunner, Pass, Table
from .variants import Variant, Variants, use_variant

WORTHLESS = 0.1
"""Relative error by rounding to BF16 above which a tensor's gradient is meaningless."""

_T = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95)
"""Student's t for 1, 2, ... degrees of freedom, one-sided, at 0.5 %."""


@dataclass(frozen=True)
class BatchValues:
    """One number per batch."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over batches; not finite if any number is not."""
        return fmean(self.values) if all(map(math.isfinite, self.values)) else math.inf

    @property
    def spread(self) -> float:
        """Statistical uncertainty of the mean: standard error times Student's t (one-sided, 0.5 %)."""
        count = len(self.values)
        if not all(map(math.isfinite, self.values)):
            return math.inf
        t = _T[min(count - 1, len(_T)) - 1]
        return t * stdev(self.values) / math.sqrt(count)

    def __sub__(self, other: BatchValues) -> BatchValues:
        return BatchValues(tuple(a - b for a, b in zip(self.values, other.values, strict=True)))

    def times(self, factor: float) -> BatchValues:
        """Every number times the factor."""
        return BatchValues(tuple(value * factor for value in self.values))


class VariantMeasurement:
    """One variant compared with high precision.

    Args:
        name: name of the variant.
        losses: by batch.
        tables: by batch: parameter -> sums of squares of the difference, the reference and the variant, and
            of products.
        means: the same sums for the means over batches.
        updates: the same sums for the optimizer's updates by those means; empty if the optimizer is unknown.
        reference: the losses in high precision.
    """

    def __init__(
        self,
        name: str,
        losses: Sequence[float],
        tables: Sequence[Table],
        means: Table,
        updates: Table,
        reference: Sequence[float],
    ):
        self.name, self.losses, self.tables = name, tuple(losses), list(tables)
        self.loss_changes = BatchValues(tuple(a - b for a, b in zip(losses, reference, strict=True)))
        self.gradient_errors = BatchValues(tuple(_error(table.values()) for table in tables))
        self.cosine = fmean(_cosine(table.values()) for table in tables)
        self.bias = _error(means.values())
        self.update_error = _error(updates.values()) if updates else None

    @property
    def finite(self) -> bool:
        """Whether all losses and gradients are finite."""
        return all(map(math.isfinite, self.losses)) and all(
            math.isfinite(sums[2]) for table in self.tables for sums in table.values()
        )

    def errors(self) -> dict[str, float]:
        """Parameter -> relative error of its gradient, root mean square over batches."""
        return {
            name: math.sqrt(fmean(_error([table[name]]) ** 2 for table in self.tables))
            for name in self.tables[0]
        }

    def distances(self, counted: Sequence[str]) -> BatchValues:
        """Distance by batch, over these parameters; at most 1."""
        if not counted:
            return BatchValues(tuple(min(error, 1.0) for error in self.gradient_errors.values))
        found = []
        for table in self.tables:
            squares = [min(_error([table[name]]), 1.0) ** 2 for name in counted]
            found.append(math.sqrt(fmean(squares)))
        return BatchValues(tuple(found))


def _error(sums: Iterable[Sequence[float]]) -> float:
    difference = reference = 0.0
    for row in sums:
        difference += row[0]
        reference += row[1]
    if not math.isfinite(difference):
        return math.inf
    if not reference:
        return math.inf if difference else 0.0
    return math.sqrt(difference / reference)


def _cosine(sums: object) -> float:
    rows = list(sums)  # type: ignore[call-overload]
    reference, variant, product = (sum(row[i] for row in rows) for i in (1, 2, 3))
    if not (math.isfinite(variant) and math.isfinite(product)):
        return 0.0
    return product / math.sqrt(reference * variant) if reference and variant else 0.0


def sums_of(variant: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> Table:
    """Parameter -> the four sums of a VariantMeasurement, float64. A gradient missing from one side counts as zero."""
    names = list(dict.fromkeys([*reference, *variant]))
    rows = []
    for name in names:
        v, r = variant.get(name), reference.get(name)
        present = r if v is None else v
        assert present is not None
        v = (torch.zeros_like(present) if v is None else v).float()
        r = (torch.zeros_like(present) if r is None else r).float()
        rows.append(torch.stack([_norm(v - r), _norm(r), _norm(v), (v * r).sum(dtype=torch.float64)]))
    values = torch.stack(rows).tolist() if rows else []
    return {name: (d * d, r * r, v * v, vr) for name, (d, r, v, vr) in zip(names, values, strict=True)}


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64)


@dataclass(frozen=True)
class Progress:
    """Progress of a diagnosis: passes done, estimated total, estimated seconds left."""

    done: int
    expected: int
    seconds_left: float
    now: str


class Experiments:
    """Runs variants of a model. The first variant is high precision, the reference for all others.

    Args:
        runner: a model with its batches.
        budget: number of passes (a forward and a backward of one batch).
        progress: called after each pass.

    The gradients in high precision are stored, one copy per batch. ``losses``: in high precision.
    ``useless``: text on losses or gradients that are NaN or Inf, or on all-zero gradients.
    ``gradient_noise``: relative distance of the batches' gradients from their mean.

    Raises ValueError: an FP8 GEMM ran that no variant changes.
    """

    def __init__(
        self, runner: ModelRunner, budget: int, progress: Callable[[Progress], None] = lambda _: None
    ):
        self.runner, self.budget, self._progress = runner, budget, progress
        self.variants = Variants(runner.plans)
        self.passes, self.expected = 0, 0
        self.expect(4 + 2 * len(runner.plans) + 12)
        self._start = time.monotonic()
        self._measured: dict[str, VariantMeasurement] = {}
        self._reference = [self._plain_pass(batch) for batch in range(runner.batches)]
        self.losses = tuple(done.loss for done in self._reference)
        self.useless = self._first_useless()
        self._mean = self._mean_gradient()
        self.gradient_noise = self._gradient_noise()

    @property
    def left(self) -> int:
        """Number of variants that the budget still allows."""
        return (self.budget - self.passes) // self.runner.batches

    def measure(self, variant: Variant) -> VariantMeasurement:
        """Run a variant on all batches; cached."""
        if variant.key not in self._measured:
            self._measured[variant.key] = self._measure(variant)
        return self._measured[variant.key]

    def _plain_pass(self, batch: int) -> Pass:
        done = self._pass(self.variants.high_precision, batch)
        if done.fp8_gemms:
            raise ValueError(
                "layers run in FP8 that are not in the model's plan (fp8_autocast(recipe=...) in loss_of?): their cost"
                " cannot be measured"
            )
        return done

    def _first_useless(self) -> str | None:
        tables = [self.runner.merge(self._norms(done)) for done in self._reference]
        for batch, (loss, table) in enumerate(zip(self.losses, tables, strict=True)):
            if not math.isfinite(loss):
                return f"the loss of batch {batch} is {loss}{self._of_weights()}"
            for name, (square,) in table.items():
                if not math.isfinite(square):
                    return f"the gradient of {name} is not finite in batch {batch}{self._of_weights()}"
        if not any(square for table in tables for (square,) in table.values()):
            return "every gradient is zero"
        return None

    def _of_weights(self) -> str:
        """Text that names the weights with NaN or Inf."""
        found = self.runner.not_finite()
        named = [f"{name} ({int(count)} of its values)" for name, (count,) in found.items()]
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        return f" (weights that are NaN or Inf: {', '.join(named[:3])}{more})" if named else ""

    def _mean_gradient(self) -> Gradients:
        total: Gradients = {}
        for done in self._reference:
            self._add_share(total, done.gradients)
        return total

    def _add_share(self, total: Gradients, gradients: Gradients) -> None:
        """Add a batch's part of a mean over batches to the total."""
        for name, gradient in gradients.items():
            share = gradient.to(torch.float32) / self.runner.batches
            total[name] = total[name].add_(share) if name in total else share

    def _norms(self, done: Pass) -> Table:
        return {name: (row[1],) for name, row in sums_of({}, done.gradients).items()}

    def _gradient_noise(self) -> float:
        """Norm of the deviations of batches' gradients from their mean, relative to the mean's norm."""
        rows: dict[str, list[float]] = {}
        for done in self._reference:
            for name, row in sums_of(done.gradients, self._mean).items():
                known = rows.setdefault(name, [0.0, row[1]])
                known[0] += row[0] / self.runner.batches
        merged = self.runner.merge({name: tuple(row) for name, row in rows.items()})
        square = sum(row[1] for row in merged.values())
        return math.sqrt(sum(row[0] for row in merged.values()) / square) if square else 0.0

    def _measure(self, variant: Variant) -> VariantMeasurement:
        losses, tables = [], []
        total: Gradients = {}
        for batch, reference in enumerate(self._reference):
            done = self._pass(variant, batch)
            losses.append(done.loss)
            tables.append(self.runner.merge(sums_of(done.gradients, reference.gradients)))
            self._add_share(total, done.gradients)
        means = self.runner.merge(sums_of(total, self._mean))
        updates = self.runner.merge(
            sums_of(self._updates(total, means, 2), self._updates(self._mean, means, 1))
        )
        return VariantMeasurement(variant.name, losses, tables, means, updates, self.losses)

    def _updates(self, gradients: Gradients, means: Table, column: int) -> Gradients:
        """The optimizer's updates for these gradients. Their squared norms are that column of the sums over all
        ranks."""
        norm = math.sqrt(sum(row[column] for row in means.values()))
        updates = {name: self.runner.update_of(name, gradient, norm) for name, gradient in gradients.items()}
        return {name: update for name, update in updates.items() if update is not None}

    def _pass(self, variant: Variant, batch: int) -> Pass:
        with use_variant(variant, self.runner.sites):
            done = self.runner.run(batch)
        self.passes += 1
        each = (time.monotonic() - self._start) / self.passes
        self.expected = max(self.expected, self.passes)
        self._progress(
            Progress(self.passes, self.expected, each * (self.expected - self.passes), variant.name)
        )
        return done

    def expect(self, variants: int) -> None:
        """Announce more variants, for the estimate of the time left."""
        self.expected = min(self.budget, self.passes + variants * self.runner.batches)


def counted_parameters(bf16: VariantMeasurement) -> list[str]:
    """Parameters whose gradient is still meaningful after rounding to BF16."""
    return [name for name, error in bf16.errors().items() if error < WORTHLESS]
