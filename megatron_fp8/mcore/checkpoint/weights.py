"""Checkpoints of weights alone, as an import writes them.

Master weights are then read from the weights' own tensors, in the precision in which those are stored; Adam's moments,
and what else the optimizer has, are zero.
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
from ...state.ranks import first_to_say
from .saver import SaveError, Saver
from .store import Make


def save_weights(folder: Path, weights: dict[str, torch.Tensor], manifest: Manifest, make: Make) -> None:
    """Save whole tensors, by name, as a checkpoint in `folder`: of one process, or of all ranks together.

    Args:
        weights: this rank's, on the meta device: names, shapes and dtypes. No other rank has one of them.
        make: gives each one when it is written, in their order; one is in memory at a time.

    Raises, on all ranks, SaveError if the disk is full, or the folder cannot be written, and ValueError if `make` does.
    """
    refused: list[ValueError] = []

    def careful(name: str) -> torch.Tensor:
        try:
            return make(name)
        except ValueError as error:  # the writer takes whatever is raised for a failure of its own
            refused.append(error)
            raise

    with _ranks():
        shards = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in weights.items()}
        saver = Saver(folder)
        try:
            saver.save(shards, manifest, careful)
        except SaveError:
            if (found := first_to_say(refused[0] if refused else None)) is not None:
                raise found[1] from None
            raise
        saver.close()


@contextmanager
def _ranks() -> Iterator[None]:
    """The process group; one of this process alone, if there is none."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def has_optimizer(stored: dict[str, Any]) -> bool:
    """Whether a checkpoint holds an optimizer's state beside the weights."""
    return any(name.startswith("optimizer.") for name in stored)


def start_optimizer(optimizing: dict[str, Any], masters: tuple[str, ...]) -> None:
    """Make an optimizer's sharded state loadable from weights alone: masters from the weights, all else zero.

    Args:
        optimizing: changed in place.
        masters: how the keys of master weights start; the weight's own key follows.
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
