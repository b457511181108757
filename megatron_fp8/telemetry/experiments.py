"""Runs variants of a model on all batches, within a budget of passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch

from .measures import WORTHLESS, Measured, sums_of
from .model_runner import Gradients, ModelRunner, Pass, Table
from .variants import Variant, Variants, installed

LEAST_BATCHES = 4
"""Minimum for an estimate of the spread."""


@dataclass(frozen=True)
class Progress:
    """Progress of a diagnosis: passes done, estimated total, estimated seconds left."""

    done: int
    expected: int
    seconds_left: float
    now: str


class Experiments:
    """Runs variants of a subject. The first variant is high precision, the reference for all others.

    Args:
        subject: a model with at least four batches.
        budget: number of passes (a forward and a backward of one batch).
        progress: called after each pass.

    The gradients in high precision are stored, one copy per batch. ``losses``: in high precision.
    ``useless``: text on losses or gradients that are NaN or Inf, or on all-zero gradients.
    ``gradient_noise``: relative distance of the batches' gradients from their mean.

    Raises ValueError: too few batches; an FP8 GEMM ran that no variant changes.
    """

    def __init__(
        self, subject: ModelRunner, budget: int, progress: Callable[[Progress], None] = lambda _: None
    ):
        if subject.batches < LEAST_BATCHES:
            raise ValueError(
                f"{subject.batches} batches are too few: differences are judged by their spread over batches, so give"
                f" {LEAST_BATCHES} or more"
            )
        self.subject, self.budget, self._progress = subject, budget, progress
        self.variants = Variants(subject.plans)
        self.passes, self.expected = 0, 0
        self.expect(4 + 2 * len(subject.plans) + 12)
        self._start = time.monotonic()
        self._measured: dict[str, Measured] = {}
        self._reference = [self._plain_pass(batch) for batch in range(subject.batches)]
        self.losses = tuple(done.loss for done in self._reference)
        self.useless = self._first_useless()
        self._mean = self._mean_gradient()
        self.gradient_noise = self._gradient_noise()

    @property
    def left(self) -> int:
        """Number of variants that the budget still allows."""
        return (self.budget - self.passes) // self.subject.batches

    def measure(self, variant: Variant) -> Measured:
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
        tables = [self.subject.merge(self._norms(done)) for done in self._reference]
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
        found = self.subject.not_finite()
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
            share = gradient.to(torch.float32) / self.subject.batches
            total[name] = total[name].add_(share) if name in total else share

    def _norms(self, done: Pass) -> Table:
        return {name: (row[1],) for name, row in sums_of({}, done.gradients).items()}

    def _gradient_noise(self) -> float:
        """Norm of the deviations of batches' gradients from their mean, relative to the mean's norm."""
        rows: dict[str, list[float]] = {}
        for done in self._reference:
            for name, row in sums_of(done.gradients, self._mean).items():
                known = rows.setdefault(name, [0.0, row[1]])
                known[0] += row[0] / self.subject.batches
        merged = self.subject.merge({name: tuple(row) for name, row in rows.items()})
        square = sum(row[1] for row in merged.values())
        return math.sqrt(sum(row[0] for row in merged.values()) / square) if square else 0.0

    def _measure(self, variant: Variant) -> Measured:
        losses, tables = [], []
        total: Gradients = {}
        for batch, reference in enumerate(self._reference):
            done = self._pass(variant, batch)
            losses.append(done.loss)
            tables.append(self.subject.merge(sums_of(done.gradients, reference.gradients)))
            self._add_share(total, done.gradients)
        means = self.subject.merge(sums_of(total, self._mean))
        updates = self.subject.merge(
            sums_of(self._updates(total, means, 2), self._updates(self._mean, means, 1))
        )
        return Measured(variant.name, losses, tables, means, updates, self.losses)

    def _updates(self, gradients: Gradients, means: Table, column: int) -> Gradients:
        """The optimizer's updates for these gradients. Their squared norms are that column of the sums over all
        ranks."""
        norm = math.sqrt(sum(row[column] for row in means.values()))
        updates = {name: self.subject.update_of(name, gradient, norm) for name, gradient in gradients.items()}
        return {name: update for name, update in updates.items() if update is not None}

    def _pass(self, variant: Variant, batch: int) -> Pass:
        with installed(variant, self.subject.sites):
            done = self.subject.run(batch)
        self.passes += 1
        each = (time.monotonic() - self._start) / self.passes
        self.expected = max(self.expected, self.passes)
        self._progress(
            Progress(self.passes, self.expected, each * (self.expected - self.passes), variant.name)
        )
        return done

    def expect(self, variants: int) -> None:
        """Announce more variants, for the estimate of the time left."""
        self.expected = min(self.budget, self.passes + variants * self.subject.batches)


def counted_parameters(bf16: Measured) -> list[str]:
    """Parameters whose gradient is still meaningful after rounding to BF16."""
    return [name for name, error in bf16.errors().items() if error < WORTHLESS]


def mean_loss(losses: tuple[float, ...]) -> float:
    """The mean over batches."""
    return fmean(losses)
