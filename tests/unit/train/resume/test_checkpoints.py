"""A checkpoint is read by all ranks together, and what one finds is every rank's error."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_fp8.files import checkpoint as files
from megatron_fp8.files.manifest import Manifest
from megatron_fp8.train.config.run_config import parse
from megatron_fp8.train.health.loss_spikes import Rollbacks
from megatron_fp8.train.resume import checkpoints
from megatron_fp8.train.resume.checkpoints import Checkpoints
from megatron_fp8.train.stop import TrainingFailed


def reads(folder, manifest):
    """A rank case: the names whose digests this rank has computed, and what it was told."""
    names, digest, listed = [], files.digest, checkpoints.check_listed
    files.digest = lambda path: names.append(path.name) or digest(path)
    checkpoints.check_listed = lambda *_: None
    try:
        checkpoints.check_together(Path(folder), manifest)
        return names, ""
    except ValueError as error:
        return names, str(error)
    finally:
        files.digest, checkpoints.check_listed = digest, listed


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    for name, size in (("a", 1), ("b", 4000), ("c", 2), ("d", 3000)):
        (folder / name).write_bytes(b"x" * size)
    return folder, Manifest(1, files={path.name: files.file_record(path) for path in folder.iterdir()})


def test_each_rank_reads_a_share(ranks, saved):
    folder, manifest = saved
    assert ranks(2).run(reads, str(folder), manifest) == [(["b", "c"], ""), (["d", "a"], "")]
    (folder / "a").write_bytes(b"y")  # which rank 1 reads
    (_, said), (_, other) = ranks(2).run(reads, str(folder), manifest)
    assert said == other and "is damaged: a is not what was written (its SHA-256 differs)" in said


def test_what_the_manifest_does_not_list_is_refused(alone, saved):
    with pytest.raises(ValueError, match=r"\.metadata is missing"):
        checkpoints.check_together(*saved)


def test_a_run_does_not_go_back_to_what_is_damaged(alone, saved):
    folder, manifest = saved
    manifest.write(folder)
    (folder / "b").write_bytes(b"y" * 4000)
    rewinds = Rollbacks(1, 1, folder.parent, lambda chosen: pytest.fail("it was read"), lambda: None, [])
    with pytest.raises(TrainingFailed, match=r"cannot go back: .* is damaged: b is not what was written"):
        rewinds.back(2, 8, "the loss is high")


def test_a_runs_checkpoints_wait_as_long_as_its_other_collectives(monkeypatch):
    made = {}
    monkeypatch.setattr(checkpoints, "Saver", lambda folder, **options: made.update(options))
    run = parse(["--train.distributed_timeout_minutes=7"])
    Checkpoints(run, SimpleNamespace(checkpoints=None, still_ours=None), [], None, None, {})
    assert made["timeout"].total_seconds() == 420


@pytest.mark.parametrize(
    ("interval", "saved", "when_stopped"), [("0", [7], True), ("3", [3, 6, 7], True), ("never", [], False)]
)
def test_a_run_saves_at_its_end_unless_it_never_saves(monkeypatch, interval, saved, when_stopped):
    monkeypatch.setattr(checkpoints, "Saver", lambda folder, **options: None)
    run = parse(["--train.train_iters=7", f"--checkpoint.save_interval={interval}"])
    saves = Checkpoints(run, SimpleNamespace(checkpoints=None, still_ours=None), [], None, None, {})
    assert [n for n in range(1, 8) if saves.due(n)] == saved
    assert saves.due(5, stopped=True) is when_stopped
