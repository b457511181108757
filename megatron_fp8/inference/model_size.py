"""Bytes of a model's tensors; of FP8 weights, their codes and scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..params.fp8_parameter import Fp8Parameter


def tensors_of(module: Any) -> Iterator[torch.Tensor]:
    """All parameters and buffers of a module; for an FP8 weight its codes and scales."""
    for tensor in [*module.parameters(), *module.buffers()]:
        yield from tensor.stored_tensors() if isinstance(tensor, Fp8Parameter) else [tensor]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of ``tensors``. A storage with several tensors or views counts once, in full."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def model_bytes(module: Any) -> int:
    """Bytes of all parameters and buffers of a module."""
    return storage_bytes(tensors_of(module))
