"""A save is whole or not there: on all ranks together, whatever fails, on whichever rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fp8.files import atomic_io
from megatron_fp8.files.checkpoint import (
    Manifest,
    check_files,
    complete_checkpoints,
    latest_checkpoint,
    read_manifest,
    read_metadata,
    read_tensor,
)
from megatron_fp8.mcore.checkpoint import saver as checkpoint_saver
from megatron_fp8.mcore.checkpoint import store as checkpoint_store
from megatron_fp8.mcore.checkpoint.saver import SaveError, Saver
from tests.support.saving import state


def saves(folder: str, asynchronous: bool) -> list[str]:
    """A rank case: five saves, two of one iteration, over what a killed save left; what is in the folder."""
    leftover = Path(folder, ".saving-iter_0000001-killed")
    leftover.mkdir(parents=True, exist_ok=True)
    saver = Saver(Path(folder), keep_last=2, asynchronous=asynchronous, timeout=timedelta(minutes=7))
    limit = saver._group._get_backend(torch.device("cpu")).options._timeout
    assert saver.seconds == 0.0 and limit == timedelta(minutes=7)
    start = time.monotonic()
    for iteration in (1, 2, 10, 3, 3):
        live = state(iteration)
        parameter = live["a"].data
        saver.save(live, Manifest(iteration))
        parameter.fill_(-1)  # what training does meanwhile
    saver.close()
    assert 0 < saver.seconds < time.monotonic() - start
    return sorted(os.listdir(folder))


def refusal(save: Callable[[], None]) -> str:
    """What a save says that fails; 'nothing' if it does not."""
    try:
        save()
    except SaveError as error:
        return str(error)
    return "nothing"


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
    "a shard": ("megatron_fp8.mcore.checkpoint.store._write", 1),
    "the metadata": ("torch.distributed.checkpoint.FileSystemWriter.finish", 0),
    "a checksum": ("megatron_fp8.mcore.checkpoint.saver.file_record", 1),
    "the rename": ("pathlib.Path.rename", 0),
    "another kind of error": ("megatron_fp8.files.manifest.json.dumps", 0),
}


def failing_save(folder: str, target: str, rank: int, asynchronous: bool) -> str:
    """A rank case: a good save, then one in which ``target`` finds the disk full on one rank; what is said."""
    saver = Saver(Path(folder), asynchronous=asynchronous)
    saver.save(state(1), Manifest(1))
    saver.finish()
    if target.endswith("finish"):  # which a saver calls that knows of no save before
        saver = Saver(Path(folder), asynchronous=asynchronous)
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    if target.endswith("dumps"):
        full.side_effect = ValueError("Out of range float values are not JSON compliant")

    def save() -> None:
        saver.save(state(2), Manifest(2))
        saver.close()

    with mock.patch(target, full) if dist.get_rank() == rank else nullcontext():
        return refusal(save)


@pytest.mark.parametrize("name", FAULTS)
def test_a_failure_on_one_rank_is_an_error_on_all(ranks, tmp_path, name):
    target, rank = FAULTS[name]
    said = ranks(2).run(failing_save, str(tmp_path), target, rank, False)
    assert said[0] == said[1] and f"{str(tmp_path)!r} (rank {rank}: " in said[0]
    wanted = (
        ["Out of range float"] if target.endswith("dumps") else ["No space left on device", "make room there"]
    )
    assert all(words in said[0] for words in [*wanted, f"--checkpoint.folder=FOLDER --resume={tmp_path}"])
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", "latest"]
    check_files(tmp_path / "iter_0000001", read_manifest(tmp_path / "iter_0000001"))
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000001"


def test_an_asynchronous_failure_is_raised_where_all_ranks_meet(ranks, tmp_path):
    said = ranks(2).run(failing_save, str(tmp_path), FAULTS["a shard"][0], 1, True)
    assert said[0] == said[1] and "rank 1" in said[0]
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000001"


HELPS = "make room there and start again with"


@pytest.mark.parametrize(
    ("target", "auto", "asynchronous"),
    [("pathlib.Path.replace", 1, False), ("megatron_fp8.files.atomic_io.sync", 2, True)],
)
def test_where_latest_cannot_be_written_the_checkpoint_stays_and_is_named(
    ranks, tmp_path, target, auto, asynchronous
):
    """The last fails after ``latest`` was replaced. Whoever goes on from the one before saves the same one again."""
    said = ranks(2).run(failing_save, str(tmp_path), target, 0, asynchronous)
    whole = tmp_path / "iter_0000002"
    assert (
        said[0] == said[1]
        and f"the checkpoint {whole} is complete, but '{tmp_path}/latest' cannot" in said[0]
    )
    assert said[0].endswith(
        f"(No space left on device). It may name an earlier one: {HELPS} --resume={whole}."
    )
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", "iter_0000002", "latest"]
    check_files(whole, read_manifest(whole))
    assert latest_checkpoint(tmp_path) == tmp_path / f"iter_000000{auto}"
    ranks(2).run(again, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", "iter_0000002", "latest"]
    check_files(whole, read_manifest(whole))
    assert latest_checkpoint(tmp_path) == whole


def again(folder: str) -> None:
    """A rank case: iteration 2 is saved once more."""
    Saver(Path(folder)).save(state(2), Manifest(2))


def order_of_events(folder: str) -> list[str]:
    """A rank case: what the commit of a save does, in order."""
    events: list[str] = []
    sync, rename, replace = atomic_io.sync, Path.rename, Path.replace

    def seen(verb: str, original: Any) -> Any:
        def call(path: Path, *args: Any) -> Any:
            name = "the folder" if path == Path(folder) else path.name.split("-iter")[0]
            events.append(f"{verb} {name}")
            return original(path, *args)

        return call

    with (
        mock.patch.object(atomic_io, "sync", seen("sync", sync)),
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


def in_its_own_folder(folder: str, asynchronous: bool) -> tuple[str, list[str]]:
    """A rank case: a save, then one in which rank 1's folder is another one; what is said, what each has."""
    saver = Saver(Path(folder), keep_last=1, asynchronous=asynchronous, patience=0.3)
    saver.save(state(1), Manifest(1))
    saver.finish()
    if dist.get_rank():
        saver.folder = Path(folder, "of rank 1")
    saver.save(state(2), Manifest(2))
    return refusal(saver.close), sorted(os.listdir(saver.folder))


def test_a_folder_that_is_not_shared_keeps_what_was_there(ranks, tmp_path):
    first, second = ranks(2).run(in_its_own_folder, str(tmp_path), True)
    assert "The folder is not shared" in first[0] and "such as __1_0.distcp of rank 1" in first[0]
    assert "The folder is not shared" in second[0]
    assert first[1] == ["iter_0000001", "latest", "of rank 1"] and second[1] == []
    check_files(tmp_path / "iter_0000001", read_manifest(tmp_path / "iter_0000001"))


def late_files(folder: str) -> list[str]:
    """A rank case: rank 0 sees what rank 1 has written half a second late."""
    size, asked = atomic_io._size, []

    def late(path: Path) -> int | None:
        asked.append(path)
        return None if path.name.startswith("__1") and len(asked) < 20 else size(path)

    with mock.patch.object(atomic_io, "_size", late):
        saver = Saver(Path(folder))
        saver.save(state(1), Manifest(1))
        saver.close()
    return sorted(os.listdir(folder))


def test_files_that_are_seen_late_are_waited_for(ranks, tmp_path):
    assert ranks(2).run(late_files, str(tmp_path))[0] == ["iter_0000001", "latest"]


def over_obstacles(folder: str) -> list[str]:
    """A rank case: saves over links and files that have the names of checkpoints and unfinished saves."""
    saver = Saver(Path(folder), keep_last=2)
    for iteration in (3, 4, 5):
        saver.save(state(iteration), Manifest(iteration))
    saver.close()
    return sorted(os.listdir(folder))


def test_links_and_files_in_the_way_are_removed_and_what_they_point_to_is_left(ranks, tmp_path):
    folder, other = tmp_path / "checkpoints", tmp_path / "other"
    for made in (folder, other / "in it"):
        made.mkdir(parents=True)
    links = [
        "iter_0000001",
        "iter_0000003",
        ".saving-iter_0000001-a",
        ".saving-iter_0000001-old",
        ".latest.new",
    ]
    for name in links:
        (folder / name).symlink_to(other)
    (folder / "iter_0000004").symlink_to("nowhere")
    (folder / ".saving-iter_0000001-b").symlink_to("nowhere")
    for name in ("iter_0000005", ".saving-iter_0000001-c", "iter_0000002"):
        (folder / name).write_text("a file")
    (folder / "latest").symlink_to(other / "in it")
    listed = ranks(1).run(over_obstacles, str(folder))[0]
    assert listed == ["iter_0000002", "iter_0000004", "iter_0000005", "latest"]  # the file is no checkpoint
    assert latest_checkpoint(folder) == folder / "iter_0000005"
    for iteration in (4, 5):
        saved = folder / f"iter_000000{iteration}"
        check_files(saved, read_manifest(saved))
    assert os.listdir(other) == ["in it"] and not os.listdir(other / "in it")


def ruined_saves(folder: str, asynchronous: bool) -> tuple[list[str], list[str]]:
    """A rank case: two good saves, then three in which rank 1's part holds a NaN, an Inf, and what sums to infinity."""
    saver = Saver(Path(folder), keep_last=2, asynchronous=asynchronous)
    found = []
    for iteration, bad in enumerate([0.0, 0.0, float("nan"), float("-inf"), 3e38], start=1):
        live = state(iteration)
        if dist.get_rank() and bad:
            live["a"].data[1:3] = bad
        saver.save(live, Manifest(iteration))
        found.append(saver.not_finite)
    saver.close()
    return found, sorted(os.listdir(folder))


def test_what_is_not_finite_has_another_name_and_takes_no_ones_place(ranks, tmp_path):
    for found, listed in ranks(2).run(ruined_saves, str(tmp_path), True):
        assert found == ["", "", "a on rank 1", "a on rank 1", ""]
        assert listed == ["iter_0000002", "iter_0000005", "latest", "not_finite_0000004"]
    ruined = tmp_path / "not_finite_0000004"
    manifest = read_manifest(ruined)
    check_files(ruined, manifest)
    assert (manifest.iteration, manifest.facts["not_finite"]) == (4, "a on rank 1")
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000005"


def taken_over(folder: str) -> str:
    """A rank case: before the second save another run has taken the folder."""
    still_ours = mock.Mock(side_effect=[None, None, OSError("another run has taken over")])
    saver = Saver(Path(folder), keep_last=1, still_ours=still_ours)
    saver.save(state(1), Manifest(1))
    return refusal(lambda: saver.save(state(2), Manifest(2)))


def test_who_lost_the_folder_changes_nothing_in_it(ranks, tmp_path):
    (said,) = ranks(1).run(taken_over, str(tmp_path))
    assert f"in {str(tmp_path)!r} (rank 0: another run has taken over)" in said
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", "latest"]


def first_save_fails(folder: str) -> str:
    """A rank case: there is no room for the first save."""
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    return refusal(lambda: Saver(Path(folder), still_ours=full).save(state(1), Manifest(1)))


def test_who_has_no_checkpoint_is_not_told_to_go_on_from_one(ranks, tmp_path):
    (said,) = ranks(1).run(first_save_fails, str(tmp_path))
    assert "There is no earlier checkpoint: make room there and start again" in said
    assert "--resume" not in said and "--checkpoint.folder=FOLDER" in said


def test_tensors_of_an_offloaded_optimizer_are_checked_where_they_are(monkeypatch):
    """Its masters are on the CPU, the weights on the GPU, and one stack holds tensors of one device."""

    def shard(key: str, device: str, value: float) -> Any:
        values = torch.full((4,), value)
        data = mock.Mock(numel=values.numel, isfinite=values.isfinite, is_meta=False)
        data.device = torch.device(device)
        data.detach.return_value.sum.side_effect = lambda dtype: (device, torch.tensor(value, dtype=dtype))
        return key, data

    def stack(sums: list[Any]) -> torch.Tensor:
        assert len({device for device, _ in sums}) == 1
        return torch.tensor([value for _, value in sums])

    monkeypatch.setattr(torch, "stack", stack)
    shards = [shard("weight", "cuda:0", 1.0), shard("master", "cpu", 2.0), shard("bias", "cuda:0", 3.0)]
    assert checkpoint_store._first_not_finite(shards) == ""
    assert checkpoint_store._first_not_finite([*shards, shard("moment", "cpu", float("nan"))]) == "moment"


def wrong_shards(folder: str, kind: str) -> str:
    """A rank case: a save of shards that do not make up their tensor; what is said."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    rank = dist.get_rank()
    values, place, parts = {
        "twice": (8, 0, 1),
        "missing": (4, rank, 3),
        "overlapping": (4 + 4 * rank, 0, 2 - rank),
        "missing, of one rank": (4, 0, 2),
    }[kind]
    replica = rank if kind == "missing, of one rank" else 0
    shard = ShardedTensor.from_rank_offsets("a", torch.zeros(values), (0, place, parts), replica_id=replica)
    return refusal(lambda: Saver(Path(folder)).save({"a": shard}, Manifest(1)))


@pytest.mark.parametrize("kind", ["twice", "missing", "overlapping", "missing, of one rank"])
def test_shards_that_do_not_make_up_a_tensor_are_not_saved(ranks, tmp_path, kind):
    said = ranks(2).run(wrong_shards, str(tmp_path), kind)
    assert said[0] == said[1] and "(rank 0: " in said[0]
    assert ("a at [0] is written by two ranks" in said[0]) == (kind == "twice")
    assert os.listdir(tmp_path) == []


def too_many_shards(folder: str) -> str:
    from megatron_fp8.mcore.checkpoint import saver, store

    with mock.patch.object(store, "LARGEST_METADATA", 100):
        return refusal(lambda: saver.Saver(Path(folder)).save(state(1), Manifest(1)))


def test_a_checkpoint_that_nobody_could_read_is_not_called_complete(ranks, tmp_path):
    said = ranks(2).run(too_many_shards, str(tmp_path))
    assert said[0] == said[1] and "bytes, and readers take 100: too many shards" in said[0]
    assert os.listdir(tmp_path) == []


def unconfirmed_save(folder: str) -> str:
    """A rank case: the disk takes all files and the new name, and does not confirm the name."""
    from megatron_fp8.mcore.checkpoint import saver

    def fails(path: Path) -> None:
        if path == Path(folder):
            raise OSError(5, "Input/output error")

    with mock.patch.object(saver, "sync", fails):
        return refusal(lambda: saver.Saver(Path(folder)).save(state(1), Manifest(1)))


def test_a_name_that_the_disk_does_not_confirm_is_of_a_complete_checkpoint(ranks, tmp_path):
    said, whole = ranks(2).run(unconfirmed_save, str(tmp_path)), tmp_path / "iter_0000001"
    assert said[0] == said[1] and said[0].endswith(f"--resume={whole}.")
    assert said[0].startswith(
        f"the checkpoint {whole} is complete, but the disk does not confirm its name (Input"
    )
    check_files(whole, read_manifest(whole))
