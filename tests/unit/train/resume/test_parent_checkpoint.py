"""Where a run began that has no checkpoint of its own yet: what is said of it, and what --resume=auto makes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fp8.files.manifest import Manifest, checksum
from megatron_fp8.train.resume import checkpoints, parent_checkpoint

FILES = {"x": {"bytes": 0, "sha256": "0" * 64}}


@pytest.fixture
def base(tmp_path) -> Path:
    folder = tmp_path / "base" / "iter_0000003"
    folder.mkdir(parents=True)
    Manifest(3, files=FILES).write(folder)
    return folder


@pytest.fixture
def own(tmp_path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def test_what_is_written_is_found_from_everywhere(base, own, monkeypatch):
    assert parent_checkpoint.read(own) is None and parent_checkpoint.find(own) is None
    assert parent_checkpoint.iterations_before(own) == 0
    monkeypatch.chdir(base.parent)
    parent_checkpoint.write(own, Path(base.name))
    monkeypatch.chdir(own)
    assert parent_checkpoint.find(own) == base
    assert parent_checkpoint.iterations_before(own) == 3


def test_a_checkpoint_that_is_gone_or_another_one_is_refused_with_remedies(base, own):
    parent_checkpoint.write(own, base)
    Manifest(3, facts={"other": 1}, files=FILES).write(base)
    words = r"began at '.*iter_0000003', and another checkpoint is there now: .*--resume=PATH"
    with pytest.raises(ValueError, match=words):
        parent_checkpoint.find(own)
    shutil.rmtree(base)
    words = r"cannot be read \(No such file.*--resume=never to start with random weights"
    with pytest.raises(ValueError, match=words):
        parent_checkpoint.find(own)


@pytest.mark.parametrize("content", ["[]", '{"checkpoint": 3}'])
def test_something_else_in_its_place_is_refused(own, content):
    (own / parent_checkpoint.FILE).write_text(content)
    with pytest.raises(ValueError, match=r"does not say where this run began.*--resume=never"):
        parent_checkpoint.find(own)
    with pytest.warns(UserWarning, match="does not say"):  # of a run that has checkpoints of its own
        assert parent_checkpoint.iterations_before(own) == 0


def run_of(own: Path, folder: Path | None = None) -> Any:
    """A run whose checkpoints are in RUN_DIR/checkpoints, or in ``folder``."""
    section = SimpleNamespace(folder=folder and str(folder))
    return SimpleNamespace(run_dir=str(own.parent), resume="auto", checkpoint=section)


@pytest.fixture
def chosen(monkeypatch):
    """A function: which checkpoint a run starts from. Its files are not looked at."""
    monkeypatch.setattr(checkpoints, "on_first_rank", lambda work: work())
    for name in ("_check_state", "check_together"):
        monkeypatch.setattr(checkpoints, name, lambda *_: None)
    monkeypatch.setattr(checkpoints.checkpoint_compat, "check", lambda *_: [])

    def choose(run: Any) -> Path | None:
        found = checkpoints.choose(run, None)
        return found and found[0]

    return choose


def test_auto_goes_on_from_there_until_the_run_has_a_checkpoint_of_its_own(base, own, chosen):
    run = run_of(own)
    assert chosen(run) is None
    parent_checkpoint.write(own, base)
    assert chosen(run) == base
    run.resume = "never"
    assert chosen(run) is None
    run.resume = "auto"
    (own / "not_finite_0000005").mkdir()
    with pytest.warns(UserWarning, match=r"not_finite_0000005.*goes on from .*base.iter_0000003"):
        assert chosen(run) == base
    (own / "not_finite_0000005").rmdir()
    saved = own / "iter_0000004"
    saved.mkdir()
    Manifest(4, files=FILES).write(saved)
    assert chosen(run) == saved


@pytest.mark.parametrize("resume", ["never", "base"])
def test_another_attempt_of_a_job_goes_on_from_what_the_job_has_saved(own, base, chosen, monkeypatch, resume):
    """Its command still says how the first attempt began; with `never` it would do everything again, each time."""
    for name, value in {"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    run = run_of(own)
    run.resume = "never" if resume == "never" else str(base)
    assert chosen(run) == (None if resume == "never" else base)
    saved = own / "iter_0000004"
    saved.mkdir()
    Manifest(4, facts={"job": "torchrun mine"}, files=FILES).write(saved)
    assert chosen(run) == saved
    Manifest(4, facts={"job": "torchrun other"}, files=FILES).write(saved)
    assert chosen(run) == (None if resume == "never" else base)
    Manifest(4, facts={"job": "torchrun mine"}, files=FILES).write(saved)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert chosen(run) == (None if resume == "never" else base)


def said(checkpoint: Path) -> str:
    """A file that somebody else may have made."""
    content = {
        "checkpoint": str(checkpoint),
        "iteration": 3,
        "manifest": "",
        "job": "SLURM job 4711 of this cluster",
    }
    return json.dumps({**content, "sha256": checksum(content)})


def test_another_attempt_that_saved_nothing_begins_where_the_first_did(own, base, chosen, monkeypatch):
    """--resume=BASE means another checkpoint as soon as that run has saved one, or removed this one."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)
    run = run_of(own)
    run.resume = str(base.parent)
    assert chosen(run) == base
    parent_checkpoint.write(own, base)
    newer = base.with_name("iter_0000008")
    newer.mkdir()
    Manifest(8, files=FILES).write(newer)
    assert chosen(run) == newer  # the same command again is no attempt of the same job
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    words = r"--resume=.*base now selects .*iter_0000008\. Training goes on from .*iter_0000003"
    with pytest.warns(UserWarning, match=words):
        assert chosen(run) == base
    run.resume = str(newer)  # not what this job was given before
    assert chosen(run) == newer
    run.resume = str(base.parent)
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    assert chosen(run) == newer
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    (base.parent / "round").symlink_to("round")
    (own / parent_checkpoint.FILE).write_text(said(base.parent / "round"))  # a link that leads to itself
    with pytest.warns(UserWarning, match="the earlier ones may not have.*symbolic links"):
        assert chosen(run) == newer
    parent_checkpoint.write(own, base)
    shutil.rmtree(base)
    with pytest.warns(
        UserWarning, match=r"goes on from .*iter_0000008, the earlier ones may not have.*No such"
    ):
        assert chosen(run) == newer


def test_before_its_first_save_a_run_that_fails_goes_back_to_where_it_began(base, own):
    run = run_of(own)
    assert checkpoints.checkpoint_before(run, 9, base) == base
    (own / "iter_0000006").mkdir()
    assert checkpoints.checkpoint_before(run, 9, base) == own / "iter_0000006"
    assert checkpoints.checkpoint_before(run, 5, base) == base
    shutil.rmtree(base)
    assert checkpoints.checkpoint_before(run, 5, base) is None
    assert checkpoints.checkpoint_before(run, 5, None) is None
