"""Checkpoints of weights alone, as an import writes them.

Master weights are loaded from the weights' own tensors, in their stored precision; Adam's moments and all other
optimizer state are zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor

from ...files.checkpoint import Manifest
from ...state.collectives import first_rank_with
from .saver import SaveError, Saver
from .store import Make


def save_weights(folder: Path, weights: dict[str, torch.Tensor], manifest: Manifest, make: Make) -> None:
    """Saves whole tensors, by name, as a checkpoint in `folder`: from one process, or from all ranks together.

    Args:
        weights: this rank's, on the meta device: names, shapes and dtypes. No other rank has one of them.
        make: creates each one when it is written, in their order; one is in memory at a time.

    Raises, on all ranks, SaveError if the disk is full, or the folder cannot be written, and ValueError if `make` does.
    """
    errors: list[ValueError] = []

    def make_or_record(name: str) -> torch.Tensor:
        try:
            return make(name)
        except ValueError as error:  # the writer turns any exception into one of its own
            errors.append(error)
            raise

    with _process_group():
        shards = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in weights.items()}
        saver = Saver(folder)
        try:
            saver.save(shards, manifest, make_or_record)
        except SaveError:
            if (found := first_rank_with(errors[0] if errors else None)) is not None:
                raise found[1] from None
            raise
        saver.close()


@contextmanager
def _process_group() -> Iterator[None]:
    """Uses the existing process group, or creates one of this process alone."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def has_optimizer(stored: dict[str, Any]) -> bool:
    """Whether a checkpoint has an optimizer's state beside the weights."""
    return any(name.startswith("optimizer.") for name in stored)


def start_optimizer(optimizing: dict[str, Any], masters: tuple[str, ...]) -> None:
    """Makes an optimizer's sharded state loadable from weights alone: masters from the weights, all else zero.

    Args:
        optimizing: changed in place.
        masters: prefixes of the keys of master weights; the weight's own key follows.
    """

    def fresh(value: Any) -> Any:
        if not isinstance(value, ShardedBase):
            return value
        for start in masters:
            if value.key.startswith(start):
                value.key = value.key[len(start) :]
                return value
        return torch.zeros(value.data.shape, dtype=torch.float32, device=value.data.device)

    dict_list_map_inplace(fresh, optimizing)
