"""Loads Adam's moments from a checkpoint, without the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

from ...files.checkpoint import read_metadata
from ..runtime import unwrap
from .store import load_shards
from .training import model_state

MOMENTS = ("exp_avg", "exp_avg_sq")

Moments = dict[str, torch.Tensor]
"""The name of each of MOMENTS -> float32, in this rank's shape of the parameter."""


def load_moments(folder: Path, chunks: list[Any]) -> Iterator[tuple[torch.nn.Parameter, Moments]]:
    """Yields this rank's parameters with their moments in a checkpoint. Collective.

    Yields nothing if the checkpoint has weights alone, or moments in another format than float32
    (optimizer.state_dtype=fp8).

    Raises ValueError, on every rank: a file does not match the metadata.
    """
    metadata = read_metadata(folder)
    stored = metadata.state_dict_metadata
    first, second = ({name for name in stored if _is_float32(name, stored, moment)} for moment in MOMENTS)
    if not first or not second:
        return
    for chunk, shards in zip(chunks, model_state(chunks).values(), strict=True):
        parameters = {name: p for name, p in unwrap(chunk).named_parameters() if name in shards}
        requests: dict[str, dict[str, Any]] = {moment: {} for moment in MOMENTS}
        for name, parameter in parameters.items():
            pair = [_moment_shard(moment, shards[name], parameter) for moment in MOMENTS]
            if all(
                key in keys for shard, keys in zip(pair, (first, second), strict=True) for key in _keys(shard)
            ):
                for moment, shard in zip(MOMENTS, pair, strict=True):
                    requests[moment][name] = shard
        loaded = load_shards(folder, requests, metadata).state
        for name in loaded[MOMENTS[0]]:
            yield parameters[name], {moment: loaded[moment][name] for moment in MOMENTS}


def _is_float32(name: str, stored: dict[str, Any], moment: str) -> bool:
    entry = stored[name]
    return (
        name.startswith(_prefix(moment))
        and getattr(entry, "properties", None) is not None
        and (entry.properties.dtype == torch.float32)
    )


def _prefix(moment: str) -> str:
    return f"optimizer.state.{moment}"


def _moment_shard(moment: str, shard: Any, parameter: torch.nn.Parameter) -> Any:
    """Returns a sharded tensor for a parameter's moment, with the layout of the parameter's ``shard``."""
    values = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    return make_sharded_optimizer_tensor(shard, values, prefix=_prefix(moment))


def _keys(shard: Any) -> list[str]:
    """Returns the keys of the checkpoint tensors that make up a shard: two for a gated MLP's projection."""
    parts = nested_values(shard.build()) if isinstance(shard, ShardedTensorFactory) else [shard]
    return [part.key for part in parts]
