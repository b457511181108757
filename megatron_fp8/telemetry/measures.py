"""Distances of a variant's losses and gradients from high precision.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch

from .model_runner import Table

WORTHLESS = 0.1
"""Relative error by rounding to BF16 above which a tensor's gradient is meaningless."""

_T = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95)
"""Student's t for 1, 2, ... degrees of freedom, one-sided, at 0.5 %."""


@dataclass(frozen=True)
class Paired:
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

    def __sub__(self, other: Paired) -> Paired:
        return Paired(tuple(a - b for a, b in zip(self.values, other.values, strict=True)))

    def times(self, factor: float) -> Paired:
        """Every number times the factor."""
        return Paired(tuple(value * factor for value in self.values))


class Measured:
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
        self.loss_changes = Paired(tuple(a - b for a, b in zip(losses, reference, strict=True)))
        self.gradient_errors = Paired(tuple(_error(table.values()) for table in tables))
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

    def distances(self, counted: Sequence[str]) -> Paired:
        """Distance by batch, over these parameters; at most 1."""
        if not counted:
            return Paired(tuple(min(error, 1.0) for error in self.gradient_errors.values))
        found = []
        for table in self.tables:
            squares = [min(_error([table[name]]), 1.0) ** 2 for name in counted]
            found.append(math.sqrt(fmean(squares)))
        return Paired(tuple(found))


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
    """Parameter -> the four sums of Measured, float64. A gradient missing from one side counts as zero."""
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
