"""Random states of all ranks in a checkpoint, as tensors: Python, NumPy, torch and Megatron-Core.

A stream belongs to a rank of a layout, and to a CPU or a GPU. If both are the same, it is restored; otherwise the
streams are seeded again, from the seed and the iteration.
"""

from __future__ import annotations

import random
from collections.abc import Container
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.random import (
    convert_cuda_rng_state,
    get_cuda_rng_tracker,
    is_graph_safe_cuda_rng_tracker,
)

from .. import environment as compat

_PREFIX = "rng"


def streams() -> dict[str, torch.Tensor]:
    """Returns this rank's streams by name: uint8, int64 or float64 [n], the same n on every rank."""
    _, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = numpy_state
    assert name == "MT19937"
    found = {
        "python": torch.tensor(words, dtype=torch.int64, device="cpu"),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64, device="cpu"),
        "numpy": torch.from_numpy(np.append(keys.astype(np.int64), [position, has_gauss])),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64, device="cpu"),
        "torch": torch.get_rng_state(),
    }
    if compat.has_cuda():
        found["cuda"] = torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    return {**found, **{f"tracker.{name}": _bytes(state) for name, state in tracked.items()}}


def restore_streams(saved: dict[str, torch.Tensor]) -> None:
    """Restores this rank's streams from the result of ``streams``, or from loaded rows [1, n]."""
    saved = {name: state.reshape(-1) for name, state in saved.items()}
    has, gauss = saved["python_gauss"].tolist()
    random.setstate((3, tuple(saved["python"].tolist()), gauss if has else None))
    keys = saved["numpy"].numpy()
    np.random.set_state(
        ("MT19937", keys[:-2].astype(np.uint32), int(keys[-2]), int(keys[-1]), float(saved["numpy_gauss"]))
    )
    torch.set_rng_state(saved["torch"])
    if "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"])
    prefix, tracker = "tracker.", get_cuda_rng_tracker()
    graph_safe = is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states(
        {
            name[len(prefix) :]: convert_cuda_rng_state(state, to_graphable=graph_safe)
            for name, state in saved.items()
            if name.startswith(prefix)
        }
    )


def fit_device(stored: Container[str]) -> bool:
    """Whether a checkpoint with these keys has streams for this kind of device: a CPU cannot use a GPU's states."""
    return (f"{_PREFIX}.cuda" in stored) == compat.has_cuda()


def sharded_streams(*, empty: bool = False) -> dict[str, Any]:
    """Returns every rank's streams as one row each of tensors [ranks, n]; ``empty``: only as targets for loading."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, state in streams().items():
        row = torch.empty_like(state) if empty else state
        found[name] = ShardedTensor.from_rank_offsets(f"{_PREFIX}.{name}", row[None], (0, rank, ranks))
    return found


def _bytes(state: Any) -> torch.Tensor:
    """Returns the state of a tracked stream; with CUDA graphs Megatron-Core stores generators instead."""
    return state if isinstance(state, torch.Tensor) else state.get_state()
