"""Checkpoints through the command: runs that go on, that find their checkpoint damaged, and that find the disk full."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_fp8.commands.inspect_checkpoint import main as inspect
from megatron_fp8.files.checkpoint import (
    check_files,
    complete_checkpoints,
    latest_checkpoint,
    read_manifest,
    read_metadata,
)
from megatron_fp8.train.run_record import record_of
from tests.support.command import APP, MEASURED, MODEL, environment, lines, run, run_all
from tests.support.manifests import edit, relist

FIELDS = {**MODEL, "num_layers": 2, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0}
FIELDS |= {"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def config(folder) -> Path:
    words = random.Random(0).choices(["spam", "eggs", "ham", "toast", "tea", "\n"], k=40_000)
    (folder / "text.txt").write_text(" ".join(words))
    content = {
        "model": FIELDS,
        "train": {
            "train_iters": 3, "micro_batch_size": 2, "global_batch_size": 2, "seq_length": 32,
            "eval_interval": 1, "eval_iters": 1, "threads": 1,
        },
        "data": {"paths": [str(folder / "text.txt")], "split": "80,20,0", "cache_dir": str(folder / "cache")},
        "checkpoint": {"save_interval": 1, "keep_last": 0},
    }  # fmt: skip
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def trained(folder, config) -> Path:
    """The folder of a run of three iterations with a checkpoint after each."""
    out = folder / "runs" / "first"
    assert run_all(folder, [["train", f"--config={config}", f"--run_dir={out}"]]) == [(0, "")]
    return out


DAMAGE: dict[str, str] = {
    "altered": "__0_0.distcp is not what was written",
    "unreadable": "__0_0.distcp cannot be read (Is a directory)",
}
"""The other kinds: tests/unit/files/test_checkpoint.py."""


def damage(checkpoint: Path, kind: str) -> None:
    shard = checkpoint / "__0_0.distcp"
    size = shard.stat().st_size
    if kind == "altered":
        with shard.open("r+b") as stream:
            stream.seek(size // 2)
            stream.write(b"\0\1\2\3")
    else:
        # A folder of the very size, which nobody may read as a file, not even root.
        shard.unlink()
        shard.mkdir()
        size = shard.stat().st_size
        edit(checkpoint, lambda content: content["files"][shard.name].update(bytes=size))


NOT_FINITE = {
    "a weight is NaN": "decoder.layers.1.mlp.linear_fc2.weight",
    "a moment is NaN": "optimizer.state.exp_avg_sq.decoder.layers.1.mlp.linear_fc2.weight",
}


def put_nan(checkpoint: Path, name: str) -> None:
    """One NaN into a tensor, under checksums that fit: as a save that did not look would have written it."""
    metadata = read_metadata(checkpoint)
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == name)
    shard = checkpoint / place.relative_path
    with shard.open("r+b") as stream:
        stream.seek(place.offset)
        tensor = torch.load(io.BytesIO(stream.read(place.length)), weights_only=True)
        tensor.view(-1)[0] = torch.nan
        torch.save(tensor, changed := io.BytesIO())
        assert len(changed.getvalue()) == place.length
        stream.seek(place.offset)
        stream.write(changed.getvalue())
    relist(checkpoint, shard.name)


NO_SAVES = ["--checkpoint.save_interval=never"]


@pytest.fixture(scope="module")
def results(folder, config, trained) -> dict[str, tuple[int, str]]:
    """What each of the runs below ended with."""
    commands: dict[str, list[str]] = {}

    def command(name: str, *more: str, copy: bool = True) -> Path:
        out = folder / "runs" / name
        if copy:
            shutil.copytree(trained, out)
        commands[name] = ["train", f"--config={config}", f"--run_dir={out}", *more]
        return out / "checkpoints"

    went_back = command("goes on")
    shutil.rmtree(went_back / "iter_0000003")
    (went_back / "latest").write_text("iter_0000002\n")
    with (went_back.parent / "metrics.jsonl").open("a") as stream:
        stream.write('{"iteration": 4, "lm_lo')  # a rank was killed while it wrote
    other, saves = f"--resume={trained / 'checkpoints' / 'iter_0000001'}", folder / "saves"
    command("from another run", other, f"--checkpoint.folder={os.path.relpath(saves)}", copy=False)
    command("finished")
    (command("cut records").parent / "metrics.jsonl").write_text("")
    command("nothing left", f"--resume={trained}")
    command("unsaved", f"--resume={trained / 'checkpoints' / 'iter_0000001'}", *NO_SAVES, copy=False)
    commands["unsaved again"] = [word for word in commands["unsaved"] if not word.startswith("--resume")]
    command("starts anew", "--resume=never", "--train.train_iters=1")
    for kind in DAMAGE:
        damage(command(kind) / "iter_0000003", kind)
    for kind, name in NOT_FINITE.items():
        put_nan(command(kind) / "iter_0000003", name)
    command("refused as it loads", f"--resume={folder / 'runs' / 'a weight is NaN'}", copy=False)
    killed = command("killed as it loads", copy=False)
    from_there = f"--resume={trained / 'checkpoints' / 'iter_0000001'}"
    done = run(APP, "killed", "load", *commands["killed as it loads"], from_there)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert complete_checkpoints(killed) == []
    return dict(zip(commands, run_all(folder, commands.values()), strict=True))


def test_an_interrupted_run_goes_on_as_if_nothing_had_been(folder, trained, results):
    assert results["goes on"] == (0, "")
    out = folder / "runs" / "goes on"
    first, again = lines(trained / "metrics.jsonl"), lines(out / "metrics.jsonl")
    assert [line["iteration"] for line in again] == [1, 2, 3]
    assert again[:2] == first[:2]
    for name in set(first[2]) - MEASURED:
        assert again[2][name] == first[2][name], name
    assert lines(out / "validation.jsonl") == lines(trained / "validation.jsonl")
    assert not list(out.glob("previous-*"))
    ones, others = (read_manifest(run / "checkpoints" / "iter_0000003") for run in (trained, out))
    assert ones.files == others.files and ones.state == others.state


def test_where_a_relative_folder_of_checkpoints_was_is_known_elsewhere(folder, results, monkeypatch):
    monkeypatch.chdir(folder)
    found = complete_checkpoints(record_of(folder / "runs" / "from another run").checkpoints())
    assert found == [folder / "saves" / f"iter_{number:07d}" for number in (2, 3)]


def test_a_path_starts_another_run_from_there(folder, trained, results):
    assert results["from another run"] == (0, "")
    metrics = lines(folder / "runs" / "from another run" / "metrics.jsonl")
    assert [line["iteration"] for line in metrics] == [2, 3]
    assert metrics[-1]["lm_loss"] == lines(trained / "metrics.jsonl")[-1]["lm_loss"]
    assert [line["tokens"] for line in metrics] == [128, 192]


def test_a_run_without_a_checkpoint_of_its_own_goes_on_from_where_it_began(folder, trained, results):
    """It was ended before its first save. From the beginning it would start with random weights."""
    assert results["unsaved"] == results["unsaved again"] == (0, "")
    out = folder / "runs" / "unsaved"
    for place in (out, out / "previous-1"):
        metrics = lines(place / "metrics.jsonl")
        assert [line["iteration"] for line in metrics] == [2, 3]
        assert metrics[-1]["lm_loss"] == lines(trained / "metrics.jsonl")[-1]["lm_loss"]
    assert os.listdir(out / "checkpoints") == ["started_from.json"]


def test_a_start_that_was_killed_as_it_loaded_goes_on_from_what_it_loaded(folder, trained, results):
    """One that was refused then leaves nothing that a later start would go on from."""
    assert results["killed as it loads"] == (0, "")
    metrics = lines(folder / "runs" / "killed as it loads" / "metrics.jsonl")
    assert [line["iteration"] for line in metrics] == [2, 3]
    assert metrics[-1]["lm_loss"] == lines(trained / "metrics.jsonl")[-1]["lm_loss"]
    code, said = results["refused as it loads"]
    assert code == 2 and "holds NaN or Inf" in said
    assert not (folder / "runs" / "refused as it loads").exists()


def test_where_nothing_is_left_to_train_nothing_is_moved(folder, trained, results):
    assert results["nothing left"] == (0, "")
    there, here = (
        {path.relative_to(run): path.is_file() and path.read_bytes() for path in run.rglob("*")}
        for run in (trained, folder / "runs" / "nothing left")
    )
    assert there == here


def test_records_that_are_gone_are_said(results):
    code, said = results["cut records"]
    assert code == 0 and len(said.splitlines()) == 1
    assert "metrics.jsonl' has no record of 3 of the iterations 1 to 3, which are done" in said


def test_a_finished_run_has_nothing_to_do_and_never_starts_anew(folder, trained, results):
    assert results["finished"] == (0, "")
    out = folder / "runs" / "finished"
    assert lines(out / "metrics.jsonl") == lines(trained / "metrics.jsonl")
    assert results["starts anew"] == (0, "")
    out = folder / "runs" / "starts anew"
    assert len(lines(out / "metrics.jsonl")) == 1 and len(lines(out / "previous-1" / "metrics.jsonl")) == 3
    assert (out / "previous-1" / "checkpoints" / "iter_0000003").is_dir()
    assert sorted(os.listdir(out / "checkpoints")) == ["iter_0000001", "latest"]


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_left_alone(folder, results, kind):
    code, said = results[kind]
    assert code == 2 and said.startswith("error: ") and len(said.splitlines()) == 1, said
    assert DAMAGE[kind] in said
    checkpoints = folder / "runs" / kind / "checkpoints"
    good = checkpoints / "iter_0000002"
    check_files(good, read_manifest(good))
    assert f"--resume={good}" in said
    assert not list(checkpoints.parent.glob("previous-*"))


@pytest.mark.parametrize("kind", NOT_FINITE)
def test_nothing_is_trained_from_nan(folder, results, kind, capsys):
    code, said = results[kind]
    assert code == 2 and len(said.splitlines()) == 1, said
    assert f"{NOT_FINITE[kind]} on rank 0 holds NaN or Inf" in said and "iter_0000002" in said
    out = folder / "runs" / kind
    assert inspect([str(out), "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_finite"] == [NOT_FINITE[kind]]
    assert inspect([str(out), "--check"]) == 0
    assert f"not finite  {NOT_FINITE[kind]}" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path) -> Iterator[tuple[Path, Any]]:
    """(a folder on a disk of 4 MiB, what a child process does before it starts).

    Where mounting is not permitted, no file of the child can be as large as a checkpoint's.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    try:
        yield disk, None if mounted.returncode == 0 else _no_large_files
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def _no_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))


def test_a_full_disk_leaves_the_last_good_checkpoint(trained, config, small_disk):
    """The disk has room for the checkpoint that is there, and perhaps for another, but not for three."""
    disk, limit = small_disk
    first = trained / "checkpoints" / "iter_0000001"
    shutil.copytree(first, disk / "iter_0000001")
    (disk / "latest").write_text("iter_0000001\n")
    train = ["-m", "megatron_fp8", "train", f"--config={config}", f"--checkpoint.folder={disk}"]
    train.append(f"--run_dir={trained.parent / 'full'}")
    if limit is None:
        done = run(*train)
    else:
        done = subprocess.run(
            [sys.executable, *train],
            capture_output=True, text=True, timeout=150, env=environment(), check=False, preexec_fn=limit,
        )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line for line in done.stderr.splitlines() if "arning" not in line] == [
        next(
            line
            for line in done.stderr.splitlines()
            if line.startswith("error: the checkpoint could not be saved")
        )
    ]
    assert "No space left on device" in done.stderr or "File too large" in done.stderr
    assert "iteration     2/3" in done.stdout
    there = complete_checkpoints(disk)
    assert there and latest_checkpoint(disk) == there[-1]
    assert sorted(os.listdir(disk)) == [*(path.name for path in there), "latest"]
    for path in there:
        check_files(path, read_manifest(path))


# -------------------------------------------------------------------------------------------------------- inspect


def test_inspect_shows_what_is_inside(trained, capsys):
    assert inspect([str(trained), "--json", "--check"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["iteration"], found["layout"]["tensor"], found["precision"]["fp8_recipe"]) == (
        3,
        1,
        "delayed",
    )
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    qkv = "decoder.layers.1.self_attention.linear_qkv"
    assert tensors[f"{qkv}.weight"] == {
        "name": f"{qkv}.weight", "kind": "weights", "shape": [128, 64], "dtype": "bfloat16", "bytes": 16384,
        "shards": 1,
    }  # fmt: skip
    kinds = {tensor["kind"] for tensor in found["tensors"]}
    assert kinds == {"weights", "delayed scaling", "optimizer", "random streams"}
    slots = {slot["name"]: slot for slot in found["delayed_scaling"]}
    assert len(slots) == 12 and not any("layers.0" in name for name in slots)
    weight = slots[f"{qkv}.weight"]
    assert weight["warm"] and (weight["recorded"], weight["history_length"]) == (3, 4)
    assert weight["scale"] == pytest.approx(448 / weight["largest_amax"]) and weight["running_amax"] == 0
    assert inspect([str(trained)]) == 0
    shown = capsys.readouterr().out
    for fact in ("iteration   3", "FP8 hybrid, delayed", f"{qkv}.grad_output", "[128, 64]", "3 of 4"):
        assert fact in shown
