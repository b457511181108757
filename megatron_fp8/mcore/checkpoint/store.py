"""Reads and writes sharded tensors in Megatron-Core's torch_dist format.

Megatron-Core describes the shards (``sharded_state_dict``), plans the save and checks it. torch.distributed.checkpoint
writes the files. Megatron-Core's own writer forks two processes a save and starts a manager process. They survive a
killed rank and continue to write into a folder that the restarted run wants to remove. Here each rank writes its own
files. An asynchronous save is a thread that writes copies and has its own process group. torch's writer holds every
tensor of a file (for a GPU: copies) until the file is complete; here each tensor is freed once it is written.

The only pickle written is ``.metadata``, and it is the only one loaded, with files/checkpoint.py's unpickler.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.base import LoadCommonStrategy
from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ...files.checkpoint import LARGEST_METADATA, METADATA
from ...files.gc_pause import gc_paused
from ...state.arena import must_be_finite
from ...state.collectives import first_rank_with

_COMMON_FILE = "common.pt"
_OPTIMIZER = "optimizer."


@dataclass
class TensorsToWrite:
    """The tensors that one rank writes.

    Attributes:
        tensors: by key, as torch.distributed.checkpoint takes them.
        not_finite: the first weight, optimizer tensor or delayed state of this rank with NaN or Inf; '' if there is
            none. Includes its replicas of optimizer tensors, which another rank writes. Tensors that are made while
            writing are not checked.
    """

    tensors: dict[str, Any]
    not_finite: str


Make = Callable[[str], torch.Tensor]
"""Creates the whole tensor of a key at the time of writing, for shards on the meta device."""


@gc_paused()
def prepare(sharded_state: dict[str, Any], *, copy: bool) -> TensorsToWrite:
    """Returns this rank's part of ``sharded_state``, for ``Shards``. Values that are no sharded tensors are omitted.

    ``Shards.settle`` checks that the ranks' shards cover every tensor exactly once. Megatron-Core's check would make
    every rank gather all shards of all ranks, with replicas.

    Args:
        copy: put copies on the CPU, so that training can continue.
    """
    sharded, _ = extract_sharded_base(sharded_state)
    sharded, _ = save_preprocess(sharded, validate_access_integrity=False)
    tensors: dict[str, list[ShardedTensor]] = {}
    replicas: list[ShardedTensor] = []
    for shard in nested_values(sharded):
        assert isinstance(shard, ShardedTensor), f"{shard.key} would be pickled"
        if is_main_replica(shard.replica_id):
            tensors.setdefault(shard.key, []).append(shard)
        elif shard.key.startswith(_OPTIMIZER) and shard.data is not None:
            replicas.append(shard)
    written = [shard for shards in tensors.values() for shard in shards]
    # A replica with NaN spreads into its rank's weights, and into all ranks' gradients.
    bad = _first_not_finite([(shard.key, shard.data) for shard in written + replicas])
    for shard in written if copy else ():
        shard.data = shard.data.detach().to("cpu", copy=True)
    return TensorsToWrite(torch_dist.mcore_to_pyt_state_dict(tensors, False), bad)


def _first_not_finite(named: list[tuple[str, torch.Tensor]]) -> str:
    """Returns the key of the first shard (key, data) with NaN or Inf; '' if none has.

    A finite sum proves that all terms are finite, in one pass without a copy; an infinite sum may be an overflow.
    """
    checked = [
        (key, must_be_finite(key, data))
        for key, data in named
        if data.is_floating_point() and data.numel() and not data.is_meta
    ]
    suspects = []
    for device in dict.fromkeys(data.device for _, data in checked):  # an offloaded optimizer is on the CPU
        on_device = [(key, data) for key, data in checked if data.device == device]
        sums = torch.stack([data.detach().sum(dtype=torch.float32) for _, data in on_device])
        suspects += [
            one for one, finite in zip(on_device, sums.isfinite().tolist(), strict=True) if not finite
        ]
    return next((key for key, data in suspects if not bool(data.isfinite().all())), "")


class Shards:
    """One rank's part of a save into ``folder``: planned, written, and on the first rank combined in ``.metadata``.

    torch's own ``save`` gathers every rank's plan, padded to the longest, and scatters plans back. Here no plan goes
    back, and ranks send only what they write, towards the first rank (``saver.py``), which writes the one file with
    an entry for every shard.

    Args:
        make: creates the tensors that are on the meta device, one by one, in the order of ``tensors``.
    """

    def __init__(self, folder: Path, tensors: dict[str, Any], rank: int, make: Make | None = None) -> None:
        self._tensors, self._rank, self._writer = tensors, rank, _Writer(folder)
        self._planner = _SavePlanner(make)
        self._metadata: Any = None

    @gc_paused()
    def plan(self) -> dcp.SavePlan:
        """Returns what this rank will write."""
        first = self._rank == 0
        self._planner.set_up_planner(self._tensors, self._writer.storage_meta(), first)
        self._writer.set_up_storage_writer(first, rank=self._rank, use_collectives=True)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    @gc_paused()
    def settle(self, plans: list[dcp.SavePlan]) -> None:
        """Merges the plans on the first rank, before any write. ValueError unless they cover each element once."""
        # torch compares volumes only if there are several plans: a single one would pass with missing elements.
        settled, self._metadata = self._planner.create_global_plan([*plans, dcp.SavePlan([])])
        for plan, other in zip(plans, settled, strict=False):
            if len(plan.items) != len(other.items):  # torch drops items that another plan has too
                indices = {item.index for item in other.items}
                duplicate = next(item.index for item in plan.items if item.index not in indices)
                raise ValueError(f"{duplicate.fqn} at {list(duplicate.offset or [])} is written by two ranks")

    def write(self) -> list[Any]:
        """Writes this rank's file; returns the position of each shard in it."""
        plan = dataclasses.replace(self._planner.plan, storage_data=_StoragePrefix(f"__{self._rank}_"))
        writes = self._writer.write_data(self._planner.finish_plan(plan), self._planner)
        writes.wait()
        return list(writes.value())

    @gc_paused()
    def finish(self, results: list[list[Any]]) -> bytes:
        """Writes ``.metadata`` on the first rank, from the ranks' results of ``write``; returns its bytes."""
        self._writer.finish(self._metadata, results)
        content = (Path(self._writer.path) / METADATA).read_bytes()
        if len(content) > LARGEST_METADATA:
            raise ValueError(
                f"its .metadata has {len(content):,} bytes, and readers take {LARGEST_METADATA:,}: too many shards"
            )
        return content


def write_marker_files(folder: Path) -> None:
    """Writes the two small files by which Megatron-Core's own loader recognises a checkpoint. One rank calls it."""
    torch.save({}, folder / _COMMON_FILE)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


@dataclass
class LoadedTensors:
    """The tensors that one rank read.

    Attributes:
        state: the sharded state with the checkpoint's values in place of the sharded tensors.
        not_finite: as TensorsToWrite's.
    """

    state: dict[str, Any]
    not_finite: str


def load_shards(folder: Path, sharded_state: dict[str, Any], metadata: Any) -> LoadedTensors:
    """Loads this rank's part of a checkpoint, in place of the sharded tensors of ``sharded_state``. Collective.

    Values that are no sharded tensors stay unchanged. ``metadata``: the checkpoint's, from ``read_metadata``.

    Raises ValueError, on every rank: a file does not match the metadata.
    """
    _, rest = extract_nonpersistent(sharded_state)
    _, common = extract_sharded_base(rest)
    reading, state = TensorsOnly(metadata), {}
    error_here: Exception | None = None
    try:
        # Each rank reads its own shards. Megatron-Core's validation would gather all ranks' requests.
        state = dist_checkpointing.load(
            sharded_state,
            str(folder),
            sharded_strategy=reading,
            common_strategy=_Current(common),
            validate_access_integrity=False,
        )
    except Exception as error:  # any failure is raised on all ranks
        error_here = error
    if (found := first_rank_with(None if error_here is None else _describe_error(error_here))) is not None:
        rank, (why, text) = found
        raise ValueError(f"the checkpoint {str(folder)!r} {why} (rank {rank}: {text})") from error_here
    return LoadedTensors(state, reading.not_finite)


def _describe_error(error: Exception) -> tuple[str, str]:
    text = " ".join(str(error).split()) or type(error).__name__
    return "is damaged" if isinstance(error, CheckpointingException) else "cannot be read", text


def root_cause(error: BaseException) -> BaseException:
    """Returns the OSError behind ``error``, if any: torch.save reports a full disk as an unexpected position."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return error if found is None else found


class _SavePlanner(torch_dist.MCoreSavePlanner):
    """Megatron-Core's planner; creates a meta tensor's values when they are written."""

    def __init__(self, make: Make | None) -> None:
        super().__init__(flatten_state_dict=False, can_run_decentralized_global_plan=False)
        self._make = make

    def resolve_data(self, write_item: Any) -> Any:
        described = super().resolve_data(write_item)
        if not described.is_meta:
            return described
        assert self._make is not None, f"{write_item.index.fqn} has no values"
        tensor = self._make(write_item.index.fqn)
        assert (tensor.shape, tensor.dtype) == (described.shape, described.dtype), write_item.index.fqn
        return tensor


class _Writer(dcp.FileSystemWriter):
    """Writes one file a rank, with one tensor in memory at a time, and syncs it; .metadata has no folder name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        self._folder = folder

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def write_data(self, plan: Any, planner: Any) -> Any:
        name = f"{plan.storage_data.prefix}0.distcp"
        written: Future[list[WriteResult]] = Future()
        try:
            with (self._folder / name).open("wb") as stream:
                written.set_result([_write(item, planner.resolve_data(item), stream) for item in plan.items])
                stream.flush()
                os.fsync(stream.fileno())
        except RuntimeError as error:
            raise root_cause(error) from error
        return written


def _write(item: WriteItem, tensor: torch.Tensor, stream: BinaryIO) -> WriteResult:
    """Appends a tensor to a file, as torch.distributed.checkpoint does; returns its position."""
    start, data = stream.tell(), tensor.detach().cpu()
    if data.untyped_storage().size() != data.nbytes:  # torch.save writes whole storages
        data = data.clone()
    torch.save(data, stream)
    length = stream.tell() - start
    return WriteResult(item.index, length, _StorageInfo(Path(stream.name).name, start, length))


class _Planner(torch_dist.MCoreLoadPlanner):
    """Megatron-Core's planner, without torch's torch.load of arbitrary objects."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is a pickled object: only tensors are loaded")


class TensorsOnly(torch_dist.TorchDistLoadShardedStrategy):
    """Megatron-Core's loading strategy with this file's planner and the safely unpickled ``.metadata``."""

    def __init__(self, metadata: Any) -> None:
        super().__init__()
        self.metadata, self.not_finite = metadata, ""

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any) -> dict[str, Any]:
        shards = list(nested_values(sharded_state_dict))
        by_key, flat_mapping, renamed = torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict
        )
        loading = torch_dist.mcore_to_pyt_state_dict(by_key, True)
        reader = dcp.FileSystemReader(checkpoint_dir)
        planner = _Planner(shapes_validation_sharded_tensors=shards)
        planner.set_up_planner(loading, self.metadata, True)
        reader.set_up_storage_reader(self.metadata, True)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.read_data(plan, planner).wait()
        tensors = {key: torch_dist._unwrap_pyt_sharded_tensor(value) for key, value in loading.items()}
        self.not_finite = _first_not_finite([(key, data) for key, parts in tensors.items() for data in parts])
        loaded = torch_dist._replace_sharded_keys_with_state_dict_keys(tensors, flat_mapping, renamed)
        torch_dist._restore_dict_types(loaded, sharded_state_dict)
        return loaded


class _Current(LoadCommonStrategy):
    """Common (unsharded) values are this run's own: nothing is read."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
        return self.values

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        raise ValueError("only tensors are loaded")

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        assert loaded_backend == "torch", loaded_backend

    def check_version_compatibility(self, loaded_version: int) -> None:
        assert loaded_version == 1, loaded_version
