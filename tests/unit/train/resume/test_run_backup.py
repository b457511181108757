"""What an earlier run left is moved whole, in an order in which a start may be killed anywhere."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.files.checkpoint import complete_checkpoints, latest_checkpoint
from megatron_fp8.files.manifest import Manifest
from megatron_fp8.train.health import skipped_samples
from megatron_fp8.train.resume import parent_checkpoint, run_folder
from megatron_fp8.train.resume.run_folder import back_up_earlier, back_up_newer, own_name

FILES = {"x": {"bytes": 0, "sha256": "0" * 64}}


def earlier_run(run_dir: Path, checkpoints: Path) -> None:
    """What an earlier run left."""
    for folder in (run_dir, checkpoints / "iter_0000002", checkpoints / "not_finite_0000003"):
        folder.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("earlier")
    (checkpoints / "latest").write_text("iter_0000002\n")
    (checkpoints / "notes.txt").write_text("mine")


MOVED = ["iter_0000002", "latest", "not_finite_0000003"]


def test_records_and_checkpoints_of_an_earlier_run_are_kept(tmp_path):
    for number in (1, 2):
        earlier_run(tmp_path, tmp_path / "checkpoints")
        (line,) = back_up_earlier(tmp_path, tmp_path / "checkpoints")
        moved = tmp_path / f"previous-{number}"
        names = "iter_0000002, not_finite_0000003, latest, metrics.jsonl"
        assert line == f"kept        what an earlier run left is in {moved}: {names}"
        assert sorted(os.listdir(moved)) == ["checkpoints", "metrics.jsonl"]
        assert sorted(os.listdir(moved / "checkpoints")) == MOVED
        assert os.listdir(tmp_path / "checkpoints") == ["notes.txt"]
    assert back_up_earlier(tmp_path, tmp_path / "checkpoints") == []
    assert not (tmp_path / "previous-3").exists()


def test_stacks_of_this_start_stay_where_they_were_said_to_be(tmp_path):
    earlier, own = (
        tmp_path / "stacks" / start / "set-up-data-60s" for start in ("20261122-101500", "20261123-101500")
    )
    for folder in (earlier, own):
        folder.mkdir(parents=True)
    (line,) = back_up_earlier(tmp_path, tmp_path / "checkpoints", stacks=own.parent)
    assert line.endswith("previous-1: stacks")
    assert own.is_dir() and not earlier.exists()
    assert (tmp_path / "previous-1" / "stacks" / "20261122-101500" / "set-up-data-60s").is_dir()


@pytest.mark.parametrize("linked", [False, True])
def test_checkpoints_elsewhere_are_kept_where_they_are(tmp_path, linked):
    """Nothing is moved from one file system to another, and a link stays where it is for the next run."""
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    checkpoints = elsewhere
    earlier_run(run_dir, elsewhere)
    if linked:
        checkpoints = run_dir / "checkpoints"
        checkpoints.symlink_to(elsewhere)
    saved, records = back_up_earlier(run_dir, checkpoints)
    assert saved.endswith("previous-1: iter_0000002, not_finite_0000003, latest")
    assert records.endswith(f"{run_dir / 'previous-1'}: metrics.jsonl")
    assert sorted(os.listdir(elsewhere)) == ["notes.txt", "previous-1"]
    assert sorted(os.listdir(elsewhere / "previous-1")) == MOVED
    assert os.listdir(run_dir / "previous-1") == ["metrics.jsonl"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_checkpoints_newer_than_where_a_run_goes_on_are_kept_out_of_its_way(tmp_path, elsewhere, monkeypatch):
    run_dir = tmp_path / "run"
    own = tmp_path / "elsewhere" if elsewhere else run_dir / "checkpoints"
    for number in (4, 8, 12):
        (own / f"iter_{number:07d}").mkdir(parents=True)
    (run_dir / "previous-1").mkdir(parents=True)
    (own / "latest").write_text("iter_0000012\n")
    moved = own / "previous-1" if elsewhere else run_dir / "previous-2" / "checkpoints"
    with (
        monkeypatch.context() as patched
    ):  # killed before any is moved: the next start goes on from there too
        patched.setattr(run_folder, "_move", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            back_up_newer(run_dir, own, "iter_0000004")
    assert latest_checkpoint(own) == own / "iter_0000004"
    (line,) = back_up_newer(run_dir, own, "iter_0000004")
    assert "iter_0000008, iter_0000012" in line and str(moved) in line
    assert sorted(os.listdir(moved)) == ["iter_0000008", "iter_0000012"]
    assert [path.name for path in complete_checkpoints(own)] == ["iter_0000004"]
    assert latest_checkpoint(own) == own / "iter_0000004"
    before = sorted(tmp_path.rglob("*"))
    assert back_up_newer(run_dir, own, "iter_0000004") == [] and sorted(tmp_path.rglob("*")) == before


class Killed(BaseException):
    """Stands for SIGKILL: nobody tidies up after it."""


def killed_at(monkeypatch: Any, number: int) -> None:
    """From now on ``number`` renames are done, and no more."""
    left = iter(range(number))

    def counted(original: Any) -> Any:
        def call(path: Path, target: Path) -> Any:
            if next(left, None) is None:
                raise Killed
            return original(path, target)

        return call

    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))


def saved_run(run_dir: Path, own: Path, latest: str | None) -> None:
    """A run with three checkpoints, of which `latest` names one; it began at another run's."""
    base = run_dir.parent / "base" / "iter_0000002"
    for number in (4, 8, 12):
        (own / f"iter_{number:07d}").mkdir(parents=True)
    (own / "not_finite_0000014").mkdir()
    if latest:
        (own / "latest").write_text(f"{latest}\n")
    base.mkdir(parents=True)
    Manifest(2, files=FILES).write(base)
    parent_checkpoint.write(own, base)
    skipped_samples.write(own, [{"first": 4, "last": 8}])
    run_dir.mkdir(exist_ok=True)
    for name in RECORDS:
        (run_dir / name).write_text("earlier")


RECORDS = ("config.yaml", "metrics.jsonl", "events.jsonl")


def next_start(own: Path) -> Path | None:
    """What --resume=auto takes."""
    return latest_checkpoint(own) or parent_checkpoint.find(own)


@pytest.mark.parametrize(
    ("elsewhere", "anew", "latest"),
    [(True, True, "iter_0000012"), (False, True, None), (False, False, "iter_0000012")],
)
def test_a_start_that_is_killed_anywhere_leaves_the_earlier_run_or_its_own(tmp_path, elsewhere, anew, latest):
    """`latest` that names an older one is of a run that went back, and was killed as it moved the newer ones."""
    seen = []
    for cut in range(30):
        place = tmp_path / str(cut)
        run_dir = place / "run"
        own = place / "elsewhere" if elsewhere else run_dir / "checkpoints"
        saved_run(run_dir, own, latest)
        shutil.copytree(place / "base", place / "other")
        start = None if anew else place / "other" / "iter_0000002"
        ended = False
        with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
            warnings.simplefilter("error")
            killed_at(patched, cut)
            try:
                back_up_earlier(run_dir, own, start)
                ended = True
            except Killed:
                pass
        found = next_start(own)
        seen.append("as asked" if found == start else "whole")
        if found == start:  # what the killed start left is moved by the next one
            assert bool(back_up_earlier(run_dir, own, found)) != ended
            assert not (own / skipped_samples.FILE).exists() and not (run_dir / "metrics.jsonl").exists()
            assert next_start(own) == start
        else:
            assert found == own / (latest or "iter_0000012")
            assert (own / skipped_samples.FILE).exists() and all(
                (run_dir / name).exists() for name in RECORDS
            )
        began = {
            parent_checkpoint.read(path.parent).checkpoint for path in place.rglob(parent_checkpoint.FILE)
        }
        assert place / "base" / "iter_0000002" in began  # where the earlier run began is not forgotten
        if ended:
            break
    assert ended and len(seen) > 9
    assert seen == sorted(seen, reverse=True) and set(seen) == {"whole", "as asked"}


def test_an_earlier_run_stands_where_auto_goes_on_with_it(tmp_path):
    """A file that says where a start began, of which nothing else is there, is of one that was killed as it loaded."""
    own = tmp_path / "run" / "checkpoints"
    saved_run(tmp_path / "run", own, None)
    assert run_folder.can_resume(tmp_path / "run", own)
    for path in own.glob("iter_*"):
        path.rmdir()
    assert run_folder.can_resume(tmp_path / "run", own)
    (own / parent_checkpoint.FILE).rename(tmp_path / "moved")
    assert not run_folder.can_resume(tmp_path / "run", own)
    (tmp_path / "moved").rename(own / parent_checkpoint.FILE)
    for name in RECORDS:
        (tmp_path / "run" / name).unlink()
    assert not run_folder.can_resume(tmp_path / "run", own)
    (own / parent_checkpoint.FILE).write_text("damaged")
    assert run_folder.can_resume(tmp_path / "run", own)


def test_a_latest_that_names_none_stands_in_nobodys_way(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("iter_0000009\n")
    back_up_earlier(tmp_path, tmp_path / "checkpoints")
    assert latest_checkpoint(tmp_path / "checkpoints") is None


def test_a_run_s_own_checkpoint_is_told_from_a_copy_beside_it(tmp_path, monkeypatch):
    """What a copy is called says no iteration, after which others are newer."""
    own, disk = tmp_path / "run" / "checkpoints", tmp_path / "disk"
    for folder in (
        own / "iter_0000004",
        own / "best",
        disk / "iter_0000008",
        tmp_path / "base" / "iter_0000004",
    ):
        folder.mkdir(parents=True)
    (own / "iter_0000008").symlink_to(disk / "iter_0000008")
    (tmp_path / "link").symlink_to(own / "iter_0000004")
    (own / "chosen").symlink_to("iter_0000004")
    monkeypatch.chdir(own)
    for path, name in {
        own / "iter_0000004": "iter_0000004",
        Path("iter_0000004"): "iter_0000004",
        tmp_path / "link": "iter_0000004",
        own / "chosen": "iter_0000004",
        own / "iter_0000008": "iter_0000008",  # on another disk
        own / "not_finite_0000009": "not_finite_0000009",
        own / "best": None,
        tmp_path / "base" / "iter_0000004": None,
    }.items():
        assert own_name(path, own) == name, path
