"""The folders of a run: tried before training, named with their option, and what was there kept."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_fp8.files.checkpoint import iteration_of
from megatron_fp8.files.manifest import Manifest
from megatron_fp8.files.run_lock import RunLock
from megatron_fp8.train.health import loss_spikes
from megatron_fp8.train.resume import checkpoints, parent_checkpoint, run_folder
from megatron_fp8.train.resume.run_folder import RunFolders


def run_of(run_dir: Path, folder: Path | None = None) -> Any:
    """The part of a run's config that says where it writes."""
    return SimpleNamespace(run_dir=str(run_dir), checkpoint=SimpleNamespace(folder=folder and str(folder)))


@pytest.fixture
def alone():
    """This process as the only rank; what a run holds is given back."""
    from megatron_fp8.train.launch.parallel import leave

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    leave()


def refusal(run: Any, size: int = 0) -> str:
    """What a run is told that cannot have its folders."""
    from megatron_fp8.train.launch.parallel import _held

    folders = RunFolders(run)
    with pytest.raises(ValueError) as refused:
        folders.claim()
        folders.check_room(size)
    _held.close()
    return str(refused.value)


def test_what_is_wrong_is_said_with_the_option_that_set_it(tmp_path, alone):
    file, good = tmp_path / "file", tmp_path / "good"
    file.write_text("")
    for option, run, folder in (
        ("run_dir", run_of(file), file),
        ("run_dir", run_of(file / "a" / "b"), file / "a" / "b"),
        ("checkpoint.folder", run_of(good, file), file),
    ):
        words = f"{option}={str(folder)!r} cannot be written ({str(file)!r} is a file)"
        assert words in refusal(run)
        assert not good.exists()
    (good / "checkpoints").parent.mkdir()
    (good / "checkpoints").write_text("")
    said = refusal(run_of(good))
    assert f"run_dir={str(good)!r} cannot be written" in said and repr(str(good / "checkpoints")) in said


def test_no_room_is_said_before_training(tmp_path, alone):
    said = refusal(run_of(tmp_path / "run"), 1 << 60)
    assert f"run_dir={str(tmp_path / 'run')!r}: there is room for" in said
    assert "a checkpoint takes about 1,099,511,627,776 MiB" in said and "--checkpoint.folder=FOLDER" in said
    assert not (tmp_path / "run").exists()


def test_folders_are_held_until_the_ranks_part(tmp_path, alone):
    from megatron_fp8.train.launch.parallel import _held

    run = run_of(tmp_path / "run", tmp_path / "saves")
    folders = RunFolders(run)
    folders.claim()
    folders.still_ours()
    for other in (run, run_of(tmp_path / "run"), run_of(tmp_path / "other", tmp_path / "saves")):
        with pytest.raises(ValueError, match="is in use by another run"):
            RunFolders(other).claim()
    _held.close()
    assert not os.listdir(tmp_path)
    for folder in ("run", "saves"):
        lock = RunLock(tmp_path / folder, "run_dir")
        lock.take(print)
        lock.release()


def in_their_folders(folders: list[str]) -> str:
    """A rank case: each rank's checkpoint.folder; what is said."""
    run_folder.PATIENCE_S = 0.3
    folder = Path(folders[dist.get_rank()])
    claimed = RunFolders(run_of(folder.parent / "run", folder))
    try:
        claimed.claim()
        return ""
    except ValueError as error:
        return str(error)
    finally:
        from megatron_fp8.train.launch.parallel import _held

        dist.barrier()  # as ranks that part do: a folder goes when each rank has taken its file out of it
        _held.close()


def test_a_folder_that_is_not_shared_is_said_before_training(ranks, tmp_path):
    one, other, missing = (str(tmp_path / name) for name in ("one", "other", "missing"))
    Path(other).mkdir()
    assert ranks(2).run(in_their_folders, [one, one]) == ["", ""]
    for folders in ([one, other], [one, missing]):
        first, second = ranks(2).run(in_their_folders, folders)
        assert "is not shared by all ranks: rank 1 on" in first and f"checkpoint.folder={one!r}" in first
        assert f"does not have there what rank 0 has written, and was given {folders[1]!r}" in second
    assert os.listdir(tmp_path) == ["other"] and not os.listdir(other)


def test_a_spike_goes_back_to_what_is_saved_at_regular_times(tmp_path, monkeypatch):
    """A run that was stopped, and saved then, goes back as far as one that was not."""
    for number in (4, 8, 9):
        (tmp_path / f"iter_{number:07d}").mkdir()
    monkeypatch.setattr(loss_spikes, "read_manifest", lambda *_: None)
    for every, iteration, name in ((4, 9, 8), (4, 8, 8), (4, 7, 4), (9, 12, 9), (5, 12, 9), (4, 3, None)):
        found = loss_spikes.Rollbacks(1, every, tmp_path, lambda _: None, lambda: None, [])._newest(iteration)
        assert (found and iteration_of(found[0])) == name


def test_a_checkpoint_newer_than_the_one_taken_is_said(tmp_path):
    for number in (3, 6):
        (tmp_path / f"iter_{number:07d}").mkdir()
    with pytest.warns(UserWarning, match="names iter_0000003, and iter_0000006 is newer"):
        checkpoints._say_what_is_passed_over(tmp_path, tmp_path / "iter_0000003")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints._say_what_is_passed_over(tmp_path, tmp_path / "iter_0000006")


def another_run_s(folder: Path, iteration: int) -> Path:
    """A checkpoint that this run may go on from."""
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    Manifest(iteration, files={"x": {"bytes": 0, "sha256": "0" * 64}}).write(path)
    return path


class Killed(BaseException):
    """Stands for whatever ends a process but a refusal."""


@pytest.mark.parametrize("earlier", [False, True])
def test_a_start_that_ends_while_it_loads_is_remembered_and_one_that_is_refused_is_not(
    tmp_path, alone, earlier
):
    """``earlier``: one that was to begin elsewhere was killed as it loaded, too."""
    folders = RunFolders(run_of(tmp_path / "run"))
    folders.checkpoints.mkdir(parents=True)
    start, other = another_run_s(tmp_path / "base", 3), another_run_s(tmp_path / "other", 5)
    if earlier:
        parent_checkpoint.write(folders.checkpoints, other)
    before = parent_checkpoint.content(folders.checkpoints)
    with pytest.raises(ValueError, match="refused"), folders.recording_parent(start):
        assert parent_checkpoint.find(folders.checkpoints) == start
        raise ValueError("refused")
    assert parent_checkpoint.content(folders.checkpoints) == before
    assert os.listdir(folders.checkpoints) == [parent_checkpoint.FILE] * earlier
    for end in (Killed, RuntimeError):  # another rank is lost, say
        with pytest.raises(end), folders.recording_parent(start):
            raise end
        assert parent_checkpoint.find(folders.checkpoints) == start
        with pytest.raises(ValueError), folders.recording_parent(None):
            raise ValueError
        assert parent_checkpoint.find(folders.checkpoints) == start


def test_an_earlier_run_that_stands_is_remembered_until_all_is_loaded(tmp_path, alone):
    """Its checkpoints, or where it began: --resume=auto goes on with it, and not from where a killed start was to."""
    folders = RunFolders(run_of(tmp_path / "run"))
    folders.checkpoints.mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    start, other = another_run_s(tmp_path / "base", 3), another_run_s(tmp_path / "other", 5)
    parent_checkpoint.write(folders.checkpoints, other)
    with folders.recording_parent(start):
        assert parent_checkpoint.find(folders.checkpoints) == other
    (line,) = folders.keep_earlier(start)
    assert line.endswith("previous-1: started_from.json, metrics.jsonl")
    assert parent_checkpoint.find(folders.checkpoints) == start
    assert parent_checkpoint.find(tmp_path / "run" / "previous-1" / "checkpoints") == other
    assert folders.keep_earlier(start) == []
    own = another_run_s(folders.checkpoints, 4)
    with folders.recording_parent(other):
        assert parent_checkpoint.find(folders.checkpoints) == start
    (folders.checkpoints / parent_checkpoint.FILE).unlink()
    with folders.recording_parent(own):
        assert os.listdir(folders.checkpoints) == [own.name]


def test_what_cannot_be_put_back_is_said(tmp_path, monkeypatch):
    base = another_run_s(tmp_path / "base", 3)
    parent_checkpoint.write(tmp_path, base)
    (tmp_path / parent_checkpoint.FILE).unlink()
    with pytest.warns(UserWarning, match=r"is of the refused start .*: remove it before"):
        parent_checkpoint.put_back(tmp_path, None)


def test_a_copy_beside_the_checkpoints_is_another_run_s_and_stays(tmp_path, alone):
    """From it a record begins anew; a link to one of the run's own is that one."""
    folders = RunFolders(run_of(tmp_path))
    for name in ("iter_0000002", "iter_0000004", "best"):
        (folders.checkpoints / name).mkdir(parents=True)
    (folders.checkpoints / "chosen").symlink_to("iter_0000002")
    Manifest(2, files={"x": {"bytes": 0, "sha256": "0" * 64}}).write(folders.checkpoints / "best")
    assert not folders.has(folders.checkpoints / "best") and folders.has(folders.checkpoints / "chosen")
    (line,) = folders.keep_newer(folders.checkpoints / "chosen")
    assert line.startswith("kept        iter_0000004, of what was trained from iter_0000002 before")
    assert (folders.checkpoints / "latest").read_text() == "iter_0000002\n"
    (line,) = folders.keep_earlier(folders.checkpoints / "best")
    assert "iter_0000002, latest" in line and (folders.checkpoints / "best").is_dir()
