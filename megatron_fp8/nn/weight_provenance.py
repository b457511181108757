"""Tracks whether a model's weights were last written by training or by other code.

Delayed scaling needs this in evaluation (linear/weight_cache.py). A weight written by training may slightly exceed
its scale, since optimizers let weights grow; evaluation saturates it as the training forward does. A weight
written by other code must not saturate. So this class records each parameter's memory and version when
training has written it: after an optimizer of the model has stepped, and at the end of an iteration. A deep
copy copies the records. No values are read. A weight without a record was not written by training.

A record holds no reference to the tensor: torch.utils.swap_tensors, which modules may use to move, rejects
tensors with weak references. Moves go through the layers, which renew the records of unchanged weights.

A write into ``.data`` does not change a tensor's version. So a frozen weight, which no optimizer writes, may never
exceed its scale: adapters are merged into such weights. For other weights such a write shows in the amax only.
Another parameter or other memory in place of the trained one also counts as a write, except under FSDP, which
replaces parameters around each forward.

A new process has no records, and weights may be loaded before or after their histories. So saved histories
include each weight's amax. Until the next iteration ends, only weights up to that amax may exceed their
scale.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..linear.weight_cache import WeightFacts


class _Record(NamedTuple):
    """A weight as training left it. ``version`` is None for an inference tensor, which has none."""

    memory: StorageWeakRef  # keeps the address from being reused
    version: int | None
    kind: tuple[torch.device, torch.dtype]
    frozen: bool

    @staticmethod
    def now(weight: torch.Tensor, *, frozen: bool) -> _Record:
        """The record of the weight's current state."""
        memory = StorageWeakRef(weight.untyped_storage())
        return _Record(memory, _version(weight), _kind(weight), frozen)

    def unchanged(self, weight: torch.Tensor) -> bool:
        """Whether the weight's memory and version are unchanged."""
        now = _Record.now(weight, frozen=self.frozen)
        return (now.memory, now.version) == (self.memory, self.version)


class TrainedWeights:
    """The weights of a model's linears as training left them.

    Attributes:
        has_warned: the warning about a weight that exceeds its scale was given.
    """

    def __init__(self) -> None:
        self.has_warned = False
        self._sharded = False
        self._records: dict[int, _Record] = {}
        self._saved: dict[str, float] = {}

    def record(self, weights: Iterable[torch.nn.Parameter]) -> None:
        """Record these weights as written by training. Replaces all earlier records."""
        self._sharded, self._saved, self._records = False, {}, {}
        for weight in weights:
            if hasattr(weight, "to_local"):
                self._sharded = True  # FSDP replaces it in forwards
            elif id(weight) not in self._records:
                self._records[id(weight)] = _Record.now(weight, frozen=not weight.requires_grad)

    def unchanged(self, weights: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """The weights unchanged since their record."""
        records = ((weight, self._records.get(id(weight))) for weight in weights)
        return [weight for weight, record in records if record is not None and record.unchanged(weight)]

    def renew(self, weights: Iterable[torch.nn.Parameter]) -> None:
        """Renew the records of weights that were written without a change of values."""
        for weight in weights:
            self._records[id(weight)] = _Record.now(weight, frozen=not weight.requires_grad)

    @property
    def resumed(self) -> bool:
        """Whether the records come from loaded histories, and no iteration has ended since."""
        return bool(self._saved)

    def record_saved_amax(self, name: str, amax: float) -> None:
        """Record the amax that a linear's weight had when its histories were saved; 0: it did not exceed its scale."""
        self._saved[name] = amax

    def record_copies(
        self, of: TrainedWeights, name: str, copies: Iterable[tuple[torch.Tensor, Any]]
    ) -> None:
        """Copy the records of a copied linear. ``copies``: (parameter of its weight, this model's copy) pairs."""
        self._sharded = self._sharded or of._sharded
        if name in of._saved:
            self._saved[name] = of._saved[name]
        for weight, copied in copies:
            record = of._records.get(id(weight))
            if record is not None and record.unchanged(weight) and isinstance(copied, torch.Tensor):
                self._records[id(copied)] = _Record.now(copied, frozen=record.frozen)

    @contextmanager
    def moving(self, weights: Callable[[], Sequence[torch.Tensor]]) -> Iterator[None]:
        """Context manager around a move or dtype conversion: renews the records of weights that training left."""
        before = []
        for weight in weights():
            record = self._records.get(id(weight))
            # Another device or dtype: a module that shares the weight has moved it already.
            unchanged = record is not None and (record.kind != _kind(weight) or record.unchanged(weight))
            before.append((record, unchanged))
        yield
        for (record, unchanged), weight in zip(before, weights(), strict=True):
            if record is not None:
                same = unchanged and not weight.is_meta  # a move to meta drops the values
                now = (
                    _Record.now(weight, frozen=record.frozen) if same else record._replace(kind=_kind(weight))
                )
                self._records[id(weight)] = now

    def weight_facts(self, name: str, weights: Collection[torch.Tensor]) -> WeightFacts:
        """Facts about a linear's weight, from the parameters that it is, or is computed from."""
        if (amax := self._saved.get(name)) is not None:
            return WeightFacts(amax=amax, has_warned=self.has_warned)
        records = [self._records.get(id(weight)) for weight in weights]
        if self._sharded and None in records:  # FSDP replaces parameters around each forward
            return WeightFacts(has_warned=self.has_warned)
        found = [
            (record, weight) for record, weight in zip(records, weights, strict=True) if record is not None
        ]
        written = any(not record.unchanged(weight) for record, weight in found) or (
            bool(self._records) and None in records
        )
        if written or None in records or (found and all(record.frozen for record, _ in found)):
            return WeightFacts(1.0, written=written, has_warned=self.has_warned)
        return WeightFacts(has_warned=self.has_warned)


def _kind(weight: torch.Tensor) -> tuple[torch.device, torch.dtype]:
    return weight.device, weight.dtype


def _version(weight: torch.Tensor) -> int | None:
    return None if weight.is_inference() else weight._version
