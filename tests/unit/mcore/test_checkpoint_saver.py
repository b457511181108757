"""A save is whole or not there: on all ranks together, whatever fails, on whichever rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fp8.checkpoint_files import (
    Manifest,
    check_files,
    complete_checkpoints,
    latest_checkpoint,
    read_manifest,
    read_metadata,
    read_tensor,
)


def state(value: float) -> dict[str, Any]:
    """A vector of which every rank holds 1000 values."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    part = torch.arange(1000.0) + 1000 * dist.get_rank() + value
    return {"a": ShardedTensor.from_rank_offsets("a", part, (0, dist.get_rank(), dist.get_world_size()))}


def saves(folder: str, asynchronous: bool) -> list[str]:
    """A rank case: five saves, two of one iteration, over what a killed save left; what is in the folder."""
    from megatron_fp8.mcore.checkpoint_saver import Saver

    leftover = Path(folder, ".saving-iter_0000001-killed")
    leftover.mkdir(parents=True, exist_ok=True)
    saver = Saver(Path(folder), keep_last=2, asynchronous=asynchronous)
    for iteration in (1, 2, 10, 3, 3):
        live = state(iteration)
        parameter = live["a"].data
        saver.save(live, Manifest(iteration))
        parameter.fill_(-1)  # what training does meanwhile
    saver.close()
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_complete_ones_are_kept_and_latest_names_the_newest(ranks, tmp_path, asynchronous):
    """Going back behind iteration 10 leaves it alone: what is removed is older."""
    listed = ranks(2).run(saves, str(tmp_path), asynchronous)[0]
    assert listed == ["iter_0000002", "iter_0000003", "iter_0000010", "latest"]
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000003"
    for folder in complete_checkpoints(tmp_path):
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        assert set(manifest.files) == {p.name for p in folder.iterdir()} - {"manifest.json"}
        assert sum(name.endswith(".distcp") for name in manifest.files) == 2
        whole = read_tensor(folder, read_metadata(folder), "a")
        assert torch.equal(whole, torch.arange(2000.0) + manifest.iteration)


FAULTS = {
    "a shard": ("torch.distributed.checkpoint.FileSystemWriter.write_data", 1),
    "the metadata": ("torch.distributed.checkpoint.FileSystemWriter.finish", 0),
    "the companions": ("megatron_fp8.mcore.checkpoint_saver.write_companions", 0),
    "a checksum": ("megatron_fp8.mcore.checkpoint_saver.file_record", 1),
    "the manifest": ("megatron_fp8.manifest.Manifest.write", 0),
    "the folder": ("pathlib.Path.mkdir", 0),
    "the rename": ("pathlib.Path.rename", 0),
}


def failing_save(folder: str, target: str, rank: int, asynchronous: bool) -> str:
    """A rank case: a good save, then one in which ``target`` finds the disk full on one rank; what is said."""
    from megatron_fp8.mcore.checkpoint_saver import SaveError, Saver

    saver = Saver(Path(folder), asynchronous=asynchronous)
    saver.save(state(1), Manifest(1))
    saver.finish()
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    here = dist.get_rank() == rank
    try:
        if here:
            patch = mock.patch(target, full)
            patch.start()
        saver.save(state(2), Manifest(2))
        saver.close()
    except SaveError as error:
        return str(error)
    finally:
        if here:
            patch.stop()
    return "nothing"


@pytest.mark.parametrize("name", FAULTS)
def test_a_failure_on_one_rank_is_an_error_on_all(ranks, tmp_path, name):
    target, rank = FAULTS[name]
    said = ranks(2).run(failing_save, str(tmp_path), target, rank, False, timeout=60)
    assert said[0] == said[1] and f"rank {rank}" in said[0] and "No space left on device" in said[0]
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", "latest"]
    check_files(tmp_path / "iter_0000001", read_manifest(tmp_path / "iter_0000001"))
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000001"


def test_an_asynchronous_failure_is_raised_where_all_ranks_meet(ranks, tmp_path):
    said = ranks(2).run(failing_save, str(tmp_path), FAULTS["a shard"][0], 1, True, timeout=60)
    assert said[0] == said[1] and "rank 1" in said[0]
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000001"


def order_of_events(folder: str) -> list[str]:
    """A rank case: what the commit of a save does, in order."""
    from megatron_fp8 import checkpoint_files
    from megatron_fp8.mcore import checkpoint_saver

    events: list[str] = []
    sync, rename, replace = checkpoint_files.sync, Path.rename, Path.replace

    def seen(verb: str, original: Any) -> Any:
        def call(path: Path, *args: Any) -> Any:
            name = "the folder" if path == Path(folder) else path.name.split("-iter")[0]
            events.append(f"{verb} {name}")
            return original(path, *args)

        return call

    with (
        mock.patch.object(checkpoint_files, "sync", seen("sync", sync)),
        mock.patch.object(checkpoint_saver, "sync", seen("sync", sync)),
        mock.patch.object(Path, "rename", seen("rename", rename)),
        mock.patch.object(Path, "replace", seen("replace", replace)),
    ):
        saver = checkpoint_saver.Saver(Path(folder))
        saver.save(state(1), Manifest(1))
        saver.close()
    return events


def test_everything_is_on_the_disk_before_the_name_and_the_name_before_latest(ranks, tmp_path):
    events = ranks(1).run(order_of_events, str(tmp_path))[0]
    files = {"sync __0_0.distcp", "sync .metadata", "sync common.pt", "sync metadata.json"}
    commit = ["sync .saving", "rename .saving", "sync the folder", "replace .latest.new", "sync the folder"]
    assert events[-5:] == commit
    assert set(events[:-5]) - {"rename .metadata.tmp"} == files
