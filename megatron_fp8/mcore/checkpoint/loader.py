"""Loads a checkpoint of training, or its weights or Adam's moments alone.

After loading, the optimizer's own copy makes model weights from the masters, as a step does. Otherwise a resumed run
would differ from an uninterrupted one in the last bits.

From a checkpoint of weights alone, as an import writes it, masters start from the weights' own tensors in their stored
precision, and all other optimizer state is zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

from ...files.checkpoint import Manifest, other_checkpoint_hint, read_metadata
from ...params.block_codes import is_scales_key
from ...plan.overrides import matching_overrides
from ...state.arena import PREFIX, is_slot_key
from ...state.collectives import any_on_ranks, first_rank_with, union
from ...state.guard import Move, saved_moves
from ..iteration import apply_moves
from ..names import name_of_key
from ..optimizer.cpu_offload import set_steps
from ..optimizer.loss_scaler import scalers
from ..optimizer.optimizer_setup import parts_of
from ..runtime import state_of, unwrap
from ..sites import fp8_linears, prepare
from .state_dict import fit_to_checkpoint, recipes_of, warm_from_weights
from .store import load_shards
from .training_state import (
    MASTERS,
    distributed_optimizers,
    fit_device,
    layout_facts,
    metadata_of_keys,
    model_state,
    restore_streams,
    sharded_params,
    sharded_streams,
    shards_in,
    tensors_of,
)
from .weights import take_codes

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class LoadResult:
    """The result of loading. ``notes``: lines for the log about state that could not be restored unchanged.
    ``new_streams``: why random streams must be seeded again; None if the checkpoint's were restored."""

    manifest: Manifest
    new_streams: str | None = None
    notes: list[str] = field(default_factory=list)


def load(folder: Path, manifest: Manifest, chunks: list[Any], optimizer: Any) -> LoadResult:
    """Loads a checkpoint into model, optimizer, FP8 state and random streams. Collective over all ranks.

    Any tensor, pipeline and data parallel layout, and any recipe, can load any other's checkpoint.

    Raises ValueError, on every rank and before anything is changed: the checkpoint is of another model, or a weight,
    master or moment in it has NaN or Inf.
    """
    prepare(chunks)
    metadata = read_metadata(folder)
    stored = metadata.state_dict_metadata
    resumed = LoadResult(manifest)
    resumed.notes += _restore_moves(saved_moves(manifest.state), chunks)
    if manifest.facts.get("layout") != layout_facts(chunks)["layout"]:
        resumed.new_streams = "another parallel layout"
    elif not fit_device(stored):
        resumed.new_streams = "a GPU's random streams are not a CPU's"

    model = model_state(chunks)
    request: dict[str, Any] = {**model}
    request["optimizer"] = optimizer.sharded_state_dict(model, is_loading=True, metadata=metadata_of_keys())
    missing: list[str] = []
    present: list[str] = []
    for flat in model.values():
        absent, found = fit_to_checkpoint(flat, stored)
        missing, present = missing + absent, present + found
    if resumed.new_streams is None:
        request["rng"] = sharded_streams(empty=True)
    if any(name.startswith("optimizer.") for name in stored):
        _rename_masters(request["optimizer"], stored)
    else:
        _start_optimizer(request["optimizer"])
        resumed.notes.append(
            "the checkpoint holds weights alone: masters start from them, the optimizer afresh"
        )
    _check_same_model(folder, request, stored)
    # Cold delayed scales need whole weights. Otherwise sharded weights come from their masters, after the gather.
    from_masters = set() if missing else sharded_params(_can_copy_masters(optimizer))
    for name, flat in model.items():
        request[name] = {key: shard for key, shard in flat.items() if id(shard.data) not in from_masters}

    # Separately: from a checkpoint of weights alone both load the same tensors, in different dtypes.
    optimizing = load_shards(folder, {"optimizer": request.pop("optimizer")}, metadata)
    rest = load_shards(folder, request, metadata)
    if bad := _first_on_any_rank(rest.not_finite or optimizing.not_finite):
        raise ValueError(
            f"the checkpoint {str(folder)!r} cannot be trained on from: {bad} holds NaN or Inf."
            f" {other_checkpoint_hint(folder)}"
        )
    loaded = {**rest.state, **optimizing.state}
    for name, chunk in zip(model, chunks, strict=True):
        _load_chunk(unwrap(chunk), loaded[name], model[name].keys() - request[name].keys())
    optimizer.load_state_dict(loaded["optimizer"])
    _load_numbers(manifest.state, chunks, optimizer)
    resumed.notes += _reconcile_fp8(chunks, stored, set(missing), present)
    _weights_to_model(chunks, optimizer)
    resumed.notes += take_codes(folder, metadata, model_state(chunks))
    if resumed.new_streams is None:
        restore_streams(loaded["rng"])
    return resumed


def load_weights(folder: Path, model: Any, *, left_out: tuple[str, ...] = ()) -> str:
    """Loads a checkpoint's weights and delayed-scaling state into a model without an optimizer. Collective.

    Args:
        left_out: prefixes of weights that the checkpoint may have and the model does not.

    Delayed weights without a scale in the checkpoint get one from their current amax. Weights with NaN or Inf are
    loaded too, for debugging: returns the first such key and its rank, '' if there is none.

    Raises ValueError, on every rank and before anything is changed: the checkpoint is of another model.
    """
    prepare([model])
    metadata = read_metadata(folder)
    stored = metadata.state_dict_metadata
    request = model_state([model])
    missing, _ = fit_to_checkpoint(request["model0"], stored)
    _check_same_model(folder, request, {k: v for k, v in stored.items() if not k.startswith(left_out)}, "")
    loaded = load_shards(folder, request, metadata)
    _load_chunk(unwrap(model), loaded.state["model0"])
    warm_from_weights(fp8_linears([model]), _slots(missing))
    state_of(unwrap(model).config).weight_generation += 1  # cached quantized weights are stale
    return _first_on_any_rank(loaded.not_finite)


def load_moments(
    folder: Path, chunks: list[Any]
) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """Yields this rank's parameters with ``exp_avg`` and ``exp_avg_sq``, float32 in their shape. Collective.

    Yields nothing if the checkpoint has weights alone, or moments in another format than float32
    (optimizer.state_dtype=fp8).

    Raises ValueError, on every rank: a file does not match the metadata.
    """
    metadata = read_metadata(folder)
    stored = metadata.state_dict_metadata
    for chunk, shards in zip(chunks, model_state(chunks).values(), strict=True):
        parameters = {name: p for name, p in unwrap(chunk).named_parameters() if name in shards}
        requests: dict[str, dict[str, Any]] = {moment: {} for moment in _MOMENTS}
        for name, parameter in parameters.items():
            for moment in _MOMENTS:
                values = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
                prefix = f"optimizer.state.{moment}"
                requests[moment][name] = make_sharded_optimizer_tensor(shards[name], values, prefix=prefix)
            if not all(_is_float32(requests[moment][name], stored) for moment in _MOMENTS):
                for moment in _MOMENTS:
                    del requests[moment][name]
        loaded = load_shards(folder, requests, metadata).state
        for name in loaded[_MOMENTS[0]]:
            yield parameters[name], {moment: loaded[moment][name] for moment in _MOMENTS}


def _is_float32(shard: Any, stored: dict[str, Any]) -> bool:
    """Whether a checkpoint has all tensors of a shard in float32: a gated MLP's projection has two."""
    properties = [getattr(stored.get(part.key), "properties", None) for part in tensors_of(shard)]
    return all(each is not None and each.dtype == torch.float32 for each in properties)


def _load_chunk(model: Any, loaded: dict[str, Any], left: Collection[str] = ()) -> None:
    """Loads a chunk's tensors; those of ``left`` are loaded later from masters. Extra states are not stored."""
    found = model.load_state_dict(loaded, strict=False)
    missing = {name for name in found.missing_keys if not name.endswith("_extra_state")} - set(left)
    assert not missing and not found.unexpected_keys, (missing, found.unexpected_keys)


def _first_on_any_rank(key: str) -> str:
    """Returns '<key> on rank <rank>' of the first rank with a key; '' if none has one. Collective."""
    found = first_rank_with(key or None)
    return "" if found is None else f"{found[1]} on rank {found[0]}"


def _can_copy_masters(optimizer: Any) -> list[Any]:
    """Returns the optimizers that can copy masters to weights outside their steps."""
    aware = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
    return [each for each in distributed_optimizers(optimizer) if not getattr(each.config, aware)]


def _rename_masters(optimizing: Any, stored: dict[str, Any]) -> None:
    """Renames master weights to the checkpoint's names: the two optimizers name them differently."""
    ours, theirs = MASTERS
    for shard in shards_in(optimizing):
        for start, other in ((ours, theirs), (theirs, ours)):
            if shard.key.startswith(start) and not _is_stored(shard, stored):
                shard.key = other + shard.key[len(start) :]
                break


def _is_stored(shard: Any, stored: dict[str, Any]) -> bool:
    """Whether the checkpoint has the shard: a factory makes one tensor under its key, or two that end with _w and _v."""
    return shard.key in stored or f"{shard.key}_w" in stored


def _start_optimizer(optimizing: dict[str, Any]) -> None:
    """Makes an optimizer's sharded state loadable from weights alone: masters from the weights, all else zero."""

    def fresh(value: Any) -> Any:
        if not isinstance(value, ShardedBase):
            return value
        for start in MASTERS:
            if value.key.startswith(start):
                value.key = value.key[len(start) :]
                return value
        return torch.zeros(value.data.shape, dtype=torch.float32, device=value.data.device)

    dict_list_map_inplace(fresh, optimizing)


def _check_same_model(
    folder: Path, wanted: dict[str, Any], stored: dict[str, Any], otherwise: str = ", or --resume=never"
) -> None:
    """Raises ValueError, on every rank, unless the checkpoint has the ranks' tensors in their shapes, and no others."""
    problem, keys = "", set()
    for shard in shards_in(wanted):
        for tensor in tensors_of(shard):
            keys.add(tensor.key)
            entry = stored.get(tensor.key)
            if problem:
                continue
            if entry is None:
                problem = f"it has no {tensor.key}"
            elif tuple(entry.size) != tuple(tensor.global_shape):
                problem = f"{tensor.key} is {list(entry.size)} there and {list(tensor.global_shape)} here"
    stored_keys = sorted(_weights(stored))  # the same on every rank
    used_somewhere = any_on_ranks([key in keys for key in stored_keys])
    found = first_rank_with(problem or None)
    text = "" if found is None else found[1]
    if unused := next((key for key, used in zip(stored_keys, used_somewhere, strict=True) if not used), None):
        text = text or f"it has {unused}, which this model does not have"
    if text:
        raise ValueError(
            f"the checkpoint {str(folder)!r} is of another model: {text}. Give the model section it was trained with"
            f" (config.yaml of its run){otherwise}."
        )


def _weights(stored: dict[str, Any]) -> set[str]:
    """Returns the names of the model's own tensors, without optimizer, random streams and delayed scaling."""
    return {key for key in stored if not key.startswith(("optimizer.", "rng.")) and not is_slot_key(key)}


def _restore_moves(moves: list[Move], chunks: list[Any]) -> list[str]:
    """Applies the saved guard moves; returns lines for the log. Before state is loaded: a moved site has other slots."""
    config = unwrap(chunks[0]).config
    moves = [
        move
        for move in moves
        if not matching_overrides(move.site, getattr(config, "fp8_overrides", None) or {})
    ]
    if not moves:
        return []
    names = f"{moves[0].site}: {moves[0].to}{', ...' if len(moves) > 1 else ''}"
    state = state_of(config)
    if state.guard is None:
        return [f"fp8_guard is off: the {len(moves)} moves that it made are undone ({names})"]
    apply_moves(chunks, state, moves)
    return [f"fp8_guard had moved {len(moves)} sites ({names}); to undo one, name it in fp8_overrides"]


def _load_numbers(state: dict[str, Any], chunks: list[Any], optimizer: Any) -> None:
    step = int(state["optimizer_step"])
    for group in optimizer.param_groups:
        if step and group["params"] and "betas" in group:  # Muon counts none
            group["step"] = step
    set_steps(optimizer, step)
    # A scaler that this run does not use is dropped; one that the checkpoint lacks starts with its defaults.
    for scaler in scalers(optimizer) if state.get("loss_scaler") else []:
        scaler.load_state_dict(state["loss_scaler"])
    fp8 = state_of(unwrap(chunks[0]).config)
    fp8.iteration = int(state["fp8_iteration"])
    if fp8.guard is not None:
        fp8.guard.load_rows(state.get("guard_rows", []))
    fp8.weight_generation += 1  # cached quantized weights are stale


def _reconcile_fp8(
    chunks: list[Any], stored: dict[str, Any], missing: set[str], present: list[str]
) -> list[str]:
    """Drops delayed state without use here, warms what the checkpoint lacks; returns lines for the log. Collective."""
    linears = fp8_linears(chunks)
    recipes = sorted(union(dict.fromkeys(recipes_of(linears))))
    slots = sorted(filter(is_slot_key, stored))  # of the checkpoint, the same on every rank
    present_here = set(present)
    used = any_on_ranks([key in present_here for key in slots])
    notes = []
    now = " and ".join(recipes) if recipes else "BF16"
    if dropped := _slots(
        [key for key, is_used in zip(slots, used, strict=True) if not is_used and not is_scales_key(key)]
    ):
        notes.append(f"the delayed-scaling state of {len(dropped)} tensors is dropped: this run uses {now}")
    cold = _slots(list(missing))
    warmed = warm_from_weights(linears, cold)
    counts = torch.tensor(
        [warmed, len(cold) - warmed], dtype=torch.int64, device=state_of(unwrap(chunks[0]).config).device
    )
    torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX)
    warm, rest = counts.tolist()
    if warm or rest:
        notes.append(
            f"delayed scaling starts here: scales of {warm} weights on a rank from their largest values; {rest} tensors"
            " without history start from their own amax"
        )
    return notes


def _slots(keys: list[str]) -> set[str]:
    """Returns '<site>.<role>' of the delayed-state tensors among ``keys``."""
    return {name_of_key(key).rpartition(".")[0].replace(f".{PREFIX}.", ".") for key in keys}


def _weights_to_model(chunks: list[Any], optimizer: Any) -> None:
    """Makes model weights from master weights, as the optimizer's step does, on every data-parallel rank."""
    for each in parts_of(optimizer):
        if hasattr(each, "_copy_main_params_to_model_params") and each.optimizer is not None:
            each._copy_main_params_to_model_params()
    for chunk in chunks:
        config = getattr(chunk, "ddp_config", None)
        # With overlap_param_gather the first forward pass gathers.
        if config is not None and config.use_distributed_optimizer and not config.overlap_param_gather:
            chunk.start_param_sync()
