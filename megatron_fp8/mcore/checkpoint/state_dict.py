"""Delayed-scaling state in checkpoints: of one rank, or sharded for any layout.

A model's ``state_dict()`` has its weights, under Megatron-Core's keys in any precision. ``fp8_state_dict`` is for
training loops of one's own: it is one rank's, for the same rank of the same layout, and works like nn/state_dict.py.

In ``sharded_state_dict()`` a linear saves scale, history and warm flag with its weights, and loads them with its weights
(``load_state_dict``). Keys follow the module's place in the whole model, never a slot number, so any layout can load any
other's. Ranks of an amax group hold equal values, and one of them writes. With ``tp_only_amax_red`` data-parallel ranks
have separate histories, and each is saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_dist

from ...files.terminal import print_rank_0
from ...linear.tensor_parallel import weight_of
from ...numerics.scaling import compute_scale
from ...params.fp8_parameter import Fp8Parameter
from ...quantizer import Quantizer
from ...recipe import recipe_name
from ...state.arena import (
    PREFIX,
    SAVED_PARTS,
    Arena,
    Slot,
    check_saved,
    is_slot_key,
    load_slots,
    saved_slots,
)
from ..names import expert_name, split_expert
from ..runtime import state_of, unwrap
from ..sites import fp8_linears, prepare

ITERATION = "iteration"


def fp8_state_dict(model_chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Returns all FP8 state of this rank that training carries from one iteration to the next, except the weights.

    Args:
        model_chunks: a list of the model, or of its chunks, in DistributedDataParallel or not.

    Returns:
        Tensors on the CPU, for torch.save between two iterations: ``iteration`` (int64 []), and with delayed scaling
            for each operand of each linear ``NAME.ROLE.scale`` (float32 [1]), ``NAME.ROLE.amax_history`` (float32
            [length]) and ``NAME.ROLE.warm`` (uint8 [1]). NAME is the linear's in the whole model.

    Raises ValueError: FP8 cannot run as the config asks.
    """
    prepare(model_chunks)
    state = state_of(unwrap(model_chunks[0]).config)
    iteration = torch.tensor(state.iteration, dtype=torch.int64, device="cpu")
    return {ITERATION: iteration, **saved_slots(_slots(model_chunks))}


def load_fp8_state_dict(model_chunks: list[Any], saved: Mapping[str, torch.Tensor]) -> None:
    """Restores the result of ``fp8_state_dict`` on this rank: training continues with the same bits.

    Before or after the weights are loaded. A history of another length gives its latest entries that fit. The guard
    starts anew: checkpoint.saver's files alone hold its moves.

    Raises:
        ValueError: the linears or recipes are not the saved ones. Nothing is changed then.
    """
    expected = fp8_state_dict(model_chunks)
    saved = _rename_old_experts(saved, expected)
    check_saved(expected, saved, "Build the model as the saved one was, in the same layout")
    state = state_of(unwrap(model_chunks[0]).config)
    state.iteration = int(saved[ITERATION])
    state.weight_generation += 1  # cached quantized weights are stale
    load_slots(_slots(model_chunks), saved)


def _rename_old_experts(
    saved: Mapping[str, torch.Tensor], expected: Collection[str]
) -> Mapping[str, torch.Tensor]:
    """Renames state from versions in which each rank numbered its experts from 0."""
    first: dict[str, int] = {}
    for stem, number in map(split_expert, expected):
        first[stem] = min(number, first.get(stem, number))
    before = {
        name: expert_name(name, number - first[stem])
        for name in expected
        for stem, number in [split_expert(name)]
    }
    if saved.keys() != set(before.values()):
        return saved
    return {name: saved[old] for name, old in before.items()}


def _slots(model_chunks: list[Any]) -> dict[str, Slot]:
    return {
        f"{linear.fp8_site.plan.name}.{role}": quantizer.slot
        for linear in fp8_linears(model_chunks)
        for role, quantizer in delayed_quantizers(linear).items()
    }


def delayed_quantizers(linear: Any) -> dict[str, Quantizer]:
    """Returns role -> quantizer, for the quantizers of a linear that have a history."""
    found = linear.fp8_site.quantizers.items()
    return {role: q for role, q in found if q is not None and q.slot.delayed is not None}


def sharded_slots(linear: Any, prefix: str, sharded_offsets: Any = ()) -> dict[str, ShardedTensor]:
    """Returns the delayed state of ``linear`` as sharded tensors ``<prefix>fp8_state.<role>.<part>``."""
    offsets, replica = list(sharded_offsets), _replica(linear)
    if _per_data_rank(linear):
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        offsets.append((len(offsets), rank, ranks))
        replica = (0, replica[1], parallel_state.get_context_parallel_rank())
    found = {}
    for role, quantizer in delayed_quantizers(linear).items():
        for part, value in quantizer.slot.arena.saved_slot(quantizer.slot).items():
            key = f"{prefix}{PREFIX}.{role}.{part}"
            # An axis of length one for each offset: prepended axes take an older path in Megatron-Core.
            value = value.reshape((1,) * len(offsets) + value.shape)
            found[key] = ShardedTensor.from_rank_offsets(key, value, *offsets, replica_id=replica)
    return found


def take_slots(linear: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Removes the delayed state of ``linear`` from a loaded state dict and puts it into its slots."""
    start = f"{prefix}{PREFIX}."
    found = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(start)}
    for role, quantizer in delayed_quantizers(linear).items():
        saved = {part: found.get(f"{start}{role}.{part}") for part in SAVED_PARTS}
        if all(value is not None for value in saved.values()):
            scale, history, warm = (_reduce_rows(part, saved[part]) for part in SAVED_PARTS)
            quantizer.slot.arena.load_slot(
                quantizer.slot, {"scale": scale, "amax_history": history, "warm": warm}
            )


def _reduce_rows(part: str, value: Any) -> torch.Tensor:
    """Reduces a loaded [..., n] to [n]: over data-parallel ranks the smallest scale and the largest amaxes."""
    rows = value.reshape(-1, value.shape[-1])
    return rows.amin(0) if part == "scale" else rows.amax(0)


def _replica(linear: Any) -> tuple[int, int, int]:
    if linear.is_expert:
        return (
            0,
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_data_parallel_rank(),
        )
    return (
        0,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def _per_data_rank(linear: Any) -> bool:
    """Whether data-parallel ranks hold different histories."""
    return bool(linear.config.tp_only_amax_red) and not linear.is_expert


def fit_to_checkpoint(wanted: dict[str, Any], stored: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Makes a run's delayed state loadable: takes the stored shapes, and drops what is not stored.

    Args:
        wanted: this rank's flat sharded state dict of a model chunk; changed in place.
        stored: tensor name -> metadata with ``size``.

    Returns (keys that the checkpoint lacks, keys that it has). Histories may differ in length, and in their number of
    data-parallel ranks.
    """
    missing, present = [], []
    for name, shard in list(wanted.items()):
        if not _is_slot(shard):
            continue
        if shard.key not in stored:
            missing.append(shard.key)
            del wanted[name]
            continue
        present.append(shard.key)
        shape = tuple(stored[shard.key].size)
        if shape != tuple(shard.global_shape):
            whole = torch.empty(shape, dtype=shard.dtype, device="cpu")
            wanted[name] = ShardedTensor.from_rank_offsets(
                shard.key, whole, replica_id=(0, 0, dist.get_rank())
            )
    return missing, present


def without_missing_histories(wanted: Any, folder: str) -> Any:
    """Returns a sharded state dict for Megatron-Core's loader, with the delayed state that ``folder`` can give.

    Args:
        wanted: nested dicts with the shards of this rank; not changed.
        folder: a torch_dist checkpoint, also one of Megatron-Core alone.

    The first rank prints how many of its tensors' histories the checkpoint lacks.
    """
    if not any(map(_is_slot, nested_values(wanted))):
        return wanted
    stored = torch_dist._get_filesystem_reader(folder).read_metadata().state_dict_metadata
    missing: list[str] = []

    def fitted(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        part = {key: fitted(value) for key, value in part.items()}
        missing.extend(fit_to_checkpoint(part, stored)[0])
        return part

    wanted = fitted(wanted)
    if missing:
        print_rank_0(
            f"megatron_fp8: {folder} has no delayed scaling's state of {len(missing) // len(SAVED_PARTS)} tensors of"
            " the first rank: their scales start from their own amax"
        )
    return wanted


def _is_slot(shard: Any) -> bool:
    return isinstance(shard, ShardedTensor) and is_slot_key(shard.key)


@torch.no_grad()
def warm_from_weights(linears: list[Any], cold: set[str]) -> int:
    """Sets the scale of delayed weights without a history from their current amax; returns how many. Collective.

    Args:
        linears: this rank's, in the order that all ranks of an amax group share.
        cold: names (``<site>.<role>``) of the slots to warm, the same on all ranks of a group.
    """
    by_arena: dict[int, list[tuple[Slot, torch.Tensor]]] = {}
    for linear in linears:
        quantizer = delayed_quantizers(linear).get("weight")
        if quantizer is not None and quantizer.slot.name in cold and not quantizer.slot.warm:
            amax = _amax(weight_of(linear))
            by_arena.setdefault(id(quantizer.slot.arena), []).append((quantizer.slot, amax))
    for found in by_arena.values():
        arena = found[0][0].arena
        amaxes = torch.stack([amax for _, amax in found])
        if arena.world_size > 1:
            dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=arena.group)
        for (slot, _), amax in zip(found, amaxes, strict=True):
            _warm_slot(arena, slot, amax)
    return sum(map(len, by_arena.values()))


def _amax(weight: torch.Tensor) -> torch.Tensor:
    """Returns the largest finite magnitude, float32 []; 0 if there is none. An FP8 weight has its last cast's amax."""
    if isinstance(weight, Fp8Parameter):
        amax = weight.cast_amax
        return torch.where(amax.isfinite(), amax, torch.zeros_like(amax)).reshape(())
    magnitudes = weight.detach().float().abs()
    return torch.where(magnitudes.isfinite(), magnitudes, torch.zeros_like(magnitudes)).amax()


def _warm_slot(arena: Arena, slot: Slot, amax: torch.Tensor) -> None:
    assert slot.delayed is not None
    if not bool(amax > 0):
        return
    saved = arena.saved_slot(slot)
    scale = compute_scale(
        amax.reshape(1), slot.fmt, margin=slot.delayed.margin, epsilon=slot.delayed.amax_epsilon
    )
    saved["scale"].copy_(scale)
    saved["amax_history"][-1] = amax if len(saved["amax_history"]) > 1 else 0.0
    saved["warm"].fill_(1)
    arena.load_slot(slot, saved)


def recipes_of(linears: list[Any]) -> list[str]:
    """Returns the sorted recipe names of these linears' FP8 sites; empty in BF16."""
    plans = [linear.fp8_site.plan for linear in linears]
    return sorted({recipe_name(plan.recipe) for plan in plans if plan.recipe is not None})
