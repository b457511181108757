"""Counts the bytes that a micro-batch saves for backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class ActivationMemory:
    """Counts what one micro-batch of each model chunk saves: autograd's storages, once each, no parameters.

    Attributes:
        bytes: sum over the chunks counted so far; None before the first. Under pipeline parallelism a rank holds this
        much
            for each micro-batch in flight.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.bytes: int | None = None
        self._counted: list[Any] = []
        self._parameters = {
            parameter.untyped_storage().data_ptr() for chunk in chunks for parameter in chunk.parameters()
        }

    @contextmanager
    def counting(self, chunk: Any) -> Iterator[None]:
        """Context: count what is saved inside, unless this chunk was counted before. Changes no result."""
        if any(chunk is other for other in self._counted):
            yield
            return
        self._counted.append(chunk)
        # Referenced until the forward ends, so that no address is reused; a storage emptied meanwhile counts 0.
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._parameters:
                storages[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.bytes = (self.bytes or 0) + sum(storage.nbytes() for storage in storages.values())
