"""Measured bytes of a model: each storage once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..params.fp8_parameter import Fp8Parameter


def tensors_of(module: Any) -> Iterator[torch.Tensor]:
    """Every parameter and buffer of a module; of an FP8 weight the codes and scales that it keeps."""
    for tensor in [*module.parameters(), *module.buffers()]:
        yield from tensor.stored_tensors() if isinstance(tensor, Fp8Parameter) else [tensor]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind ``tensors``; one that several share, or are views of, counts once and whole."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def model_bytes(module: Any) -> int:
    """Bytes of all parameters and buffers of a module."""
    return storage_bytes(tensors_of(module))
