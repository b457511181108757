"""Checkpoints of a Megatron-Core model in training: contents and resume.

    names of tensors                     what
    decoder.layers.3....weight           weights in the model's dtype, by their place in the whole model
    decoder.layers.3....fp8_state....    delayed scaling: scale, history, warm flag of each tensor of the layer
    optimizer.state.{param,exp_avg,...}  float32 master weights and Adam's moments, each in its weight's shape
    rng....                              random streams, a row for each rank

Tensors are stored in the whole model's shapes, so any layout can load any other's. Weights are stored in high
precision, so FP8 and BF16 runs can load each other's. Weights come from their float32 masters: an FP8 weight's
decoded codes have lost bits that the master has.

After loading, the optimizer's own copy makes model weights from the masters, as a step does. Otherwise a resumed run
would differ from an uninterrupted one in the last bits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from ...files.checkpoint import Manifest, read_metadata, use_another
from ...files.gc_pause import gc_paused
from ...fp8_utils import is_float8tensor
from ...params.block_codes import is_scales_key
from ...plan.overrides import matching
from ...state.arena import PREFIX, is_slot_key
from ...state.collectives import anywhere, first_rank_with, largest, union
from ...state.guard import Move, saved_moves
from ..guard_plans import take
from ..names import of_key
from ..optimizer.loss_scaler import scalers
from ..optimizer.sharded_state import own_weights
from ..report import parallel_layout
from ..runtime import state_of, unwrap
from ..sites import fp8_linears, prepare
from .block_codes import take_codes
from .rng import fit_here, put_back, sharded_streams
from .state_dict import fit_to_checkpoint, recipes_of, warm_from_weights
from .store import load_shards
from .weights import has_optimizer, start_optimizer

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
    optimizing = optimizer.sharded_state_dict(model, is_loading=False, metadata=_metadata())
    weights = _weights_from_masters(model, optimizer, optimizing)
    return {**weights, "optimizer": optimizing, "rng": sharded_streams()}


def numbers(chunks: list[Any], optimizer: Any) -> dict[str, Any]:
    """Returns the state that is numbers and not tensors, for the manifest; the same on every rank. Collective."""
    # This rank does not step a group of which it has no part.
    steps = {int(group["step"]) for group in optimizer.param_groups if group["params"] and "step" in group}
    assert len(steps) <= 1, f"parameter groups took different numbers of steps: {steps}"
    scaler = next(iter(scalers(optimizer)), None)
    fp8 = state_of(unwrap(chunks[0]).config)
    moves = [] if fp8.guard is None else [list(move) for move in fp8.guard.moves.values()]
    return {
        **({"guard": moves} if moves else {}),
        "optimizer_step": largest([max(steps, default=0)])[0],  # a stage that is frozen takes no steps
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
        },
    }


@dataclass
class Resumed:
    """The result of loading. ``notes``: lines for the log about state that could not be restored unchanged.
    ``new_streams``: why random streams must be seeded again; None if the checkpoint's were restored."""

    manifest: Manifest
    new_streams: str | None = None
    notes: list[str] = field(default_factory=list)


def load(folder: Path, manifest: Manifest, chunks: list[Any], optimizer: Any) -> Resumed:
    """Loads a checkpoint into model, optimizer, FP8 state and random streams. Collective over all ranks.

    Any tensor, pipeline and data parallel layout, and any recipe, can load any other's checkpoint.

    Raises ValueError, on every rank and before anything is changed: the checkpoint is of another model, or a weight,
    master or moment in it has NaN or Inf.
    """
    prepare(chunks)
    metadata = read_metadata(folder)
    stored = metadata.state_dict_metadata
    resumed = Resumed(manifest)
    resumed.notes += _apply_moves(saved_moves(manifest.state), chunks)
    if manifest.facts.get("layout") != layout_facts(chunks)["layout"]:
        resumed.new_streams = "another parallel layout"
    elif not fit_here(stored):
        resumed.new_streams = "a GPU's random streams are not a CPU's"

    model = model_state(chunks)
    request: dict[str, Any] = {**model}
    request["optimizer"] = optimizer.sharded_state_dict(model, is_loading=True, metadata=_metadata())
    missing: list[str] = []
    present: list[str] = []
    for flat in model.values():
        absent, found = fit_to_checkpoint(flat, stored)
        missing, present = missing + absent, present + found
    if resumed.new_streams is None:
        request["rng"] = sharded_streams(empty=True)
    if has_optimizer(stored):
        _rename_masters(request["optimizer"], stored)
    else:
        start_optimizer(request["optimizer"], _MASTERS)
        resumed.notes.append(
            "the checkpoint holds weights alone: masters start from them, the optimizer afresh"
        )
    _check_same_model(folder, request, stored)
    # Cold delayed scales need whole weights. Otherwise sharded weights come from their masters, after the gather.
    from_masters = set() if missing else _sharded_params(_can_copy_masters(optimizer))
    for name, flat in model.items():
        request[name] = {key: shard for key, shard in flat.items() if id(shard.data) not in from_masters}

    # Separately: from a checkpoint of weights alone both load the same tensors, in different dtypes.
    optimizing = load_shards(folder, {"optimizer": request.pop("optimizer")}, metadata)
    rest = load_shards(folder, request, metadata)
    if bad := _first_on_any_rank(rest.not_finite or optimizing.not_finite):
        raise ValueError(
            f"the checkpoint {str(folder)!r} cannot be trained on from: {bad} holds NaN or Inf. {use_another(folder)}"
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
        put_back(loaded["rng"])
    return resumed


def _load_chunk(model: Any, loaded: dict[str, Any], left: Collection[str]) -> None:
    """Loads a chunk's tensors; those of ``left`` are loaded later from masters."""
    found = model.load_state_dict(loaded, strict=False)
    missing = set(found.missing_keys) - set(left)
    assert not missing and not found.unexpected_keys, (missing, found.unexpected_keys)


def _first_on_any_rank(key: str) -> str:
    """Returns '<key> on rank <rank>' of the first rank with a key; '' if none has one. Collective."""
    found = first_rank_with(key or None)
    return "" if found is None else f"{found[1]} on rank {found[0]}"


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
    unwrap(model).load_state_dict(loaded.state["model0"])
    warm_from_weights(fp8_linears([model]), _slots(missing))
    state_of(unwrap(model).config).weight_generation += 1  # cached quantized weights are stale
    return _first_on_any_rank(loaded.not_finite)


def _metadata() -> dict[str, Any]:
    return {**_METADATA, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


@gc_paused()
def model_state(chunks: list[Any]) -> dict[str, dict[str, Any]]:
    """Returns {'model0': flat sharded state dict, ...} without Megatron-Core's extra states, which are None."""
    found = {}
    for index, chunk in enumerate(chunks):
        flat = unwrap(chunk).sharded_state_dict(metadata=_metadata())
        tensors = {
            name: shard
            for name, shard in flat.items()
            if isinstance(shard, (ShardedTensor, ShardedTensorFactory))
        }
        dropped = [name for name in flat if name not in tensors]
        assert all(name.endswith("_extra_state") and flat[name].data is None for name in dropped), dropped
        found[f"model{index}"] = tensors
    return found


def _optimizers(optimizer: Any) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _create_moments(optimizer: Any) -> None:
    """Creates Adam's moments as zeros, which exist only from the first step on.

    Raises ValueError: the optimizer has state that these checkpoints cannot store.
    """
    for each in _optimizers(optimizer):
        if each.optimizer is None:
            continue
        if (
            each.init_state_fn is None
        ):  # Megatron-Core has none for SGD, nor for an Adam whose steps are on the CPU
            raise ValueError(
                f"{type(each.optimizer).__name__} cannot be stored in checkpoints of megatron_fp8, which hold Adam's"
                " masters, moments and steps: use Adam (OptimizerConfig.optimizer='adam', optimizer_cpu_offload=False),"
                " or save it by other means."
            )
        each.init_state_fn(each.optimizer, each.config)


def _shards(state: Any) -> list[Any]:
    """Returns the sharded tensors, and factories of them, in a state dict."""
    return [
        value for value in nested_values(extract_sharded_base(state)[0]) if isinstance(value, ShardedBase)
    ]


# Key prefixes of the distributed optimizer and of the plain one.
_MASTERS = ("optimizer.state.param.", "optimizer.state.fp32_param.")


def _weights_from_masters(model: dict[str, Any], optimizer: Any, optimizing: Any) -> dict[str, Any]:
    """Returns the model's sharded state, with weights rounded from float32 masters where the optimizer has them.

    Live weights equal these, with two exceptions: FP8 weights have lost bits, and with overlap_param_gather other
    ranks' shards are one step old until the next forward. With a distributed optimizer each rank stores the parts of
    weights whose masters it has.
    """
    sharded = _sharded_params(_distributed(optimizer))
    whole = {
        name: {key: shard for key, shard in flat.items() if id(shard.data) not in sharded}
        for name, flat in model.items()
    }
    masters = {
        shard.key[len(start) :]: shard.data
        for shard in _shards(optimizing)
        for start in _MASTERS
        if shard.key.startswith(start)
    }
    for shard in _shards(whole):
        if shard.key in masters:
            shard.data = masters[shard.key].detach().reshape(shard.data.shape).to(shard.data.dtype)
        elif is_float8tensor(shard.data):  # frozen
            shard.data = shard.data.dequantize()
    return {**whole, "parts": [part for each in _distributed(optimizer) for part in own_weights(each, model)]}


def _distributed(optimizer: Any) -> list[Any]:
    return [each for each in _optimizers(optimizer) if hasattr(each, "gbuf_ranges")]


def _can_copy_masters(optimizer: Any) -> list[Any]:
    """Returns the optimizers that can copy masters to weights outside their steps."""
    aware = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
    return [each for each in _distributed(optimizer) if not getattr(each.config, aware)]


def _sharded_params(sharding: list[Any]) -> set[int]:
    """Returns the ids of the parameters whose masters these distributed optimizers shard."""
    buffers = [buffer for each in sharding for buffer in each.buffers]
    return {id(param) for buffer in buffers for param in buffer.params}


def _rename_masters(optimizing: Any, stored: dict[str, Any]) -> None:
    """Renames master weights to the checkpoint's names: the two optimizers name them differently."""
    ours, theirs = _MASTERS
    for shard in _shards(optimizing):
        for start, other in ((ours, theirs), (theirs, ours)):
            if shard.key.startswith(start) and not _is_stored(shard, stored):
                shard.key = other + shard.key[len(start) :]
                break


def _is_stored(shard: Any, stored: dict[str, Any]) -> bool:
    """Whether the checkpoint has the shard: a factory makes one tensor under its key, or two that end with _w and _v."""
    return shard.key in stored or f"{shard.key}_w" in stored


def _check_same_model(
    folder: Path, wanted: dict[str, Any], stored: dict[str, Any], otherwise: str = ", or --resume=never"
) -> None:
    """Raises ValueError, on every rank, unless the checkpoint has the ranks' tensors in their shapes, and no others."""
    problem, keys = "", set()
    for shard in _shards(wanted):
        for tensor in nested_values(shard.build()) if isinstance(shard, ShardedTensorFactory) else [shard]:
            keys.add(tensor.key)
            entry = stored.get(tensor.key)
            if problem:
                continue
            if entry is None:
                problem = f"it has no {tensor.key}"
            elif tuple(entry.size) != tuple(tensor.global_shape):
                problem = f"{tensor.key} is {list(entry.size)} there and {list(tensor.global_shape)} here"
    stored_keys = sorted(_weights(stored))  # the same on every rank
    used_somewhere = anywhere([key in keys for key in stored_keys])
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


def _apply_moves(moves: list[Move], chunks: list[Any]) -> list[str]:
    """Applies the saved guard moves; returns lines for the log. Before state is loaded: a moved site has other slots."""
    config = unwrap(chunks[0]).config
    moves = [move for move in moves if not matching(move.site, getattr(config, "fp8_overrides", None) or {})]
    if not moves:
        return []
    names = f"{moves[0].site}: {moves[0].to}{', ...' if len(moves) > 1 else ''}"
    state = state_of(config)
    if state.guard is None:
        return [f"fp8_guard is off: the {len(moves)} moves that it made are undone ({names})"]
    take(chunks, state, moves)
    return [f"fp8_guard had moved {len(moves)} sites ({names}); to undo one, name it in fp8_overrides"]


def _load_numbers(state: dict[str, Any], chunks: list[Any], optimizer: Any) -> None:
    step = int(state["optimizer_step"])
    for group in optimizer.param_groups:
        if step and group["params"]:
            group["step"] = step
    # A scaler that this run does not use is dropped; one that the checkpoint lacks starts with its defaults.
    for scaler in scalers(optimizer) if state.get("loss_scaler") else []:
        scaler.load_state_dict(state["loss_scaler"])
    fp8 = state_of(unwrap(chunks[0]).config)
    fp8.iteration = int(state["fp8_iteration"])
    fp8.weight_generation += 1  # cached quantized weights are stale


def _reconcile_fp8(
    chunks: list[Any], stored: dict[str, Any], missing: set[str], present: list[str]
) -> list[str]:
    """Drops delayed state without use here, warms what the checkpoint lacks; returns lines for the log. Collective."""
    linears = fp8_linears(chunks)
    recipes = sorted(union(dict.fromkeys(recipes_of(linears))))
    slots = sorted(filter(is_slot_key, stored))  # of the checkpoint, the same on every rank
    present_here = set(present)
    used = anywhere([key in present_here for key in slots])
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
    return {of_key(key).rpartition(".")[0].replace(f".{PREFIX}.", ".") for key in keys}


def _weights_to_model(chunks: list[Any], optimizer: Any) -> None:
    """Makes model weights from master weights, as the optimizer's step does, on every data-parallel rank."""
    for each in _optimizers(optimizer):
        if hasattr(each, "_copy_main_params_to_model_params") and each.optimizer is not None:
            each._copy_main_params_to_model_params()
    for chunk in chunks:
        config = getattr(chunk, "ddp_config", None)
        # With overlap_param_gather the first forward pass gathers.
        if config is not None and config.use_distributed_optimizer and not config.overlap_param_gather:
            chunk.start_param_sync()
