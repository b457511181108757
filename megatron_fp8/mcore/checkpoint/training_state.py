"""What a checkpoint of a Megatron-Core model in training holds.

    names of tensors                     what
    decoder.layers.3....weight           weights in the model's dtype, by their place in the whole model
    decoder.layers.3....fp8_state....    delayed scaling: scale, history, warm flag of each tensor of the layer
    optimizer.state.{param,exp_avg,...}  float32 master weights and Adam's moments, each in its weight's shape
    rng....                              random streams, a row for each rank

Tensors are stored in the whole model's shapes, so any layout can load any other's. Weights are stored in high
precision, so FP8 and BF16 runs can load each other's. Weights come from their float32 masters: an FP8 weight's
decoded codes have lost bits that the master has.

A random stream (Python, NumPy, torch and Megatron-Core) belongs to a rank of a layout, and to a CPU or a GPU. If both are
the same, it is restored; otherwise the streams are seeded again, from the seed and the iteration.
"""

from __future__ import annotations

import random
from collections.abc import Container
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.tensor_parallel.random import (
    convert_cuda_rng_state,
    get_cuda_rng_tracker,
    is_graph_safe_cuda_rng_tracker,
)

from ...files.gc_pause import gc_paused
from ...fp8_utils import is_float8tensor
from ...state.collectives import max_over_ranks, union
from .. import environment as compat
from ..optimizer.cpu_offload import steps_taken
from ..optimizer.layer_wise import owned_params
from ..optimizer.loss_scaler import scalers
from ..optimizer.optimizer_setup import parts_of
from ..optimizer.sharded_state import own_weights
from ..report import parallel_layout
from ..runtime import state_of, unwrap
from ..sites import prepare

# Keys must agree between runs whose layers differ in kind (BF16 and FP8) and in number a stage.
_METADATA = {
    "non_homogeneous_layers": True,
    "singleton_local_shards": True,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_sharded_model_space",
}


@gc_paused()
def sharded_state(chunks: list[Any], optimizer: Any) -> dict[str, Any]:
    """Returns all of this rank's state for a checkpoint, as sharded tensors over live ones. Collective.

    Args:
        chunks: model chunks, in DistributedDataParallel and Float16Module or not.
        optimizer: Megatron-Core's, of these chunks.
    """
    prepare(chunks)
    _create_moments(optimizer)
    model = model_state(chunks)
    optimizing = optimizer.sharded_state_dict(model, is_loading=False, metadata=metadata_of_keys())
    weights = _weights_from_masters(model, optimizer, optimizing)
    return {**weights, "optimizer": optimizing, "rng": sharded_streams()}


def numbers(chunks: list[Any], optimizer: Any) -> dict[str, Any]:
    """Returns the state that is numbers and not tensors, for the manifest; the same on every rank. Collective."""
    # This rank does not step a group of which it has no part.
    steps = {int(group["step"]) for group in optimizer.param_groups if group["params"] and "step" in group}
    steps |= steps_taken(optimizer)
    assert len(steps) <= 1, f"parameter groups took different numbers of steps: {steps}"
    scaler = next(iter(scalers(optimizer)), None)
    fp8 = state_of(unwrap(chunks[0]).config)
    moves = [] if fp8.guard is None else [list(move) for move in fp8.guard.moves.values()]
    # A pipeline stage or an expert rank has rows of its own tensors alone.
    rows = [] if fp8.guard is None else sorted(union(dict.fromkeys(fp8.guard.rows())))
    return {
        **({"guard": moves} if moves else {}),
        **({"guard_rows": [list(row) for row in rows]} if rows else {}),
        "optimizer_step": max_over_ranks([max(steps, default=0)])[0],  # a stage that is frozen takes no steps
        "fp8_iteration": fp8.iteration,
        "loss_scaler": scaler and {name: float(value) for name, value in scaler.state_dict().items()},
    }


def layout_facts(chunks: list[Any]) -> dict[str, Any]:
    """Returns the parallel layout and the precision of the saving run, for display and comparison."""
    config = unwrap(chunks[0]).config
    return {
        "layout": parallel_layout(config),
        "precision": {
            "params_dtype": str(config.params_dtype).removeprefix("torch."),
            "fp8": config.fp8,
            "fp8_recipe": config.fp8_recipe if config.fp8 else None,
            "fp8_param": bool(config.fp8 and config.fp8_param),
            **({"fp4": config.fp4, "fp4_recipe": config.fp4_recipe} if getattr(config, "fp4", None) else {}),
            **({"fp4_param": True} if config.fp4 and config.fp4_param else {}),
        },
    }


def metadata_of_keys() -> dict[str, Any]:
    """Returns the metadata by which Megatron-Core names and shards tensors."""
    return {**_METADATA, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


@gc_paused()
def model_state(chunks: list[Any]) -> dict[str, dict[str, Any]]:
    """Returns {'model0': flat sharded state dict, ...} without extra states, which hold nothing: Megatron-Core's are
    None, those of Transformer Engine's norms tensors without elements."""
    found = {}
    for index, chunk in enumerate(chunks):
        flat = unwrap(chunk).sharded_state_dict(metadata=metadata_of_keys())
        tensors = {
            name: shard
            for name, shard in flat.items()
            if isinstance(shard, (ShardedTensor, ShardedTensorFactory))
        }
        dropped = {name: flat[name].data for name in flat if name not in tensors}
        for name, state in dropped.items():
            assert name.endswith("_extra_state") and (state is None or not len(state)), (name, state)
        found[f"model{index}"] = tensors
    return found


def _create_moments(optimizer: Any) -> None:
    """Creates Adam's moments as zeros, which exist only from the first step on.

    Raises ValueError: the optimizer has state that these checkpoints cannot store.
    """
    for each in parts_of(optimizer):
        if each.optimizer is None:
            continue
        # Megatron-Core has none for SGD.
        if each.init_state_fn is None:
            raise ValueError(
                f"{type(each.optimizer).__name__} cannot be stored in checkpoints of megatron_fp8, which hold Adam's"
                " masters, moments and steps: use Adam (OptimizerConfig.optimizer='adam'), or save it by other means."
            )
        each.init_state_fn(each.optimizer, each.config)


def shards_in(state: Any) -> list[Any]:
    """Returns the sharded tensors, and factories of them, in a state dict."""
    return [
        value for value in nested_values(extract_sharded_base(state)[0]) if isinstance(value, ShardedBase)
    ]


def tensors_of(shard: Any) -> list[ShardedTensor]:
    """Returns the sharded tensors of a shard: a factory, as of a gated MLP's projection, makes two."""
    return list(nested_values(shard.build())) if isinstance(shard, ShardedTensorFactory) else [shard]


# Key prefixes of the distributed optimizer and of the plain one.
MASTERS = ("optimizer.state.param.", "optimizer.state.fp32_param.")


def _weights_from_masters(model: dict[str, Any], optimizer: Any, optimizing: Any) -> dict[str, Any]:
    """Returns the model's sharded state, with weights rounded from float32 masters where the optimizer has them.

    Live weights equal these, with two exceptions: FP8 weights have lost bits, and with overlap_param_gather other
    ranks' shards are one step old until the next forward. With a distributed or a layer-wise optimizer each rank
    stores the weights, or parts of them, whose masters it has.
    """
    sharded = sharded_params(distributed_optimizers(optimizer))
    whole = {
        name: {key: shard for key, shard in flat.items() if id(shard.data) not in sharded}
        for name, flat in model.items()
    }
    masters = {
        shard.key[len(start) :]: shard.data
        for shard in shards_in(optimizing)
        for start in MASTERS
        if shard.key.startswith(start)
    }
    owned = owned_params(optimizer)
    for shard in shards_in(whole):
        if (is_owner := owned.get(id(shard.data))) is not None:
            shard.replica_id = (*shard.replica_id[:-1], int(not is_owner))
        if shard.key in masters:
            shard.data = masters[shard.key].detach().reshape(shard.data.shape).to(shard.data.dtype)
        elif is_float8tensor(shard.data) and is_owner is None:  # frozen
            shard.data = shard.data.dequantize()
    return {
        **whole,
        "parts": [part for each in distributed_optimizers(optimizer) for part in own_weights(each, model)],
    }


def distributed_optimizers(optimizer: Any) -> list[Any]:
    """Returns the distributed optimizers of a chain."""
    return [each for each in parts_of(optimizer) if hasattr(each, "gbuf_ranges")]


def sharded_params(sharding: list[Any]) -> set[int]:
    """Returns the ids of the parameters whose masters these distributed optimizers shard."""
    buffers = [buffer for each in sharding for buffer in each.buffers]
    return {id(param) for buffer in buffers for param in buffer.params}


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
