"""Saves after a first one: what ranks need not send again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_fp8.files.checkpoint import (
    Manifest,
    check_files,
    complete_checkpoints,
    read_manifest,
    read_metadata,
    read_tensor,
)
from tests.support.saving import state


def saves_again(folder: str) -> list[tuple[int, bool]]:
    """A rank case: saves of the same tensors, then of others on one rank alone, of a file that came out longer, and of
    the same again; of each how often the ranks told the first one something, and whether ``.metadata`` is that of a
    saver that knows of none before."""
    from megatron_fp8.mcore.checkpoint import saver, store

    def more(value: float) -> dict[str, Any]:
        made = state(value)
        if dist.get_rank() == 1:
            made["b"] = dataclasses.replace(made["a"], key="b", global_shape=(1000,), global_offset=(0,))
        return made

    def longer(item: Any, tensor: Any, stream: Any) -> Any:
        stream.write(b" " * 64 * dist.get_rank())
        return _write(item, tensor, stream)

    _write, found = store._write, []
    kept = saver.Saver(Path(folder, "kept"))
    for iteration, make, write in (
        (1, state, _write), (2, state, _write), (3, more, _write), (4, more, _write), (5, more, longer), (6, more, _write)
    ):  # fmt: skip
        with (
            mock.patch.object(saver, "gather_to_first", wraps=saver.gather_to_first) as told,
            mock.patch.object(store, "_write", write),
        ):
            kept.save(make(iteration), Manifest(iteration))
            count = told.call_count
            saver.Saver(Path(folder, "fresh")).save(make(iteration), Manifest(iteration))
        one, other = (
            Path(folder, name, f"iter_000000{iteration}", ".metadata") for name in ("kept", "fresh")
        )
        found.append((count, one.read_bytes() == other.read_bytes()))
    return found


def test_a_save_like_the_one_before_collects_no_plans(ranks, tmp_path):
    """Plans, places and files' records are told; then records alone. Where only the places differ plans come after."""
    found = ranks(2).run(saves_again, str(tmp_path))
    assert found[0] == found[1] == [(3, True), (1, True), (3, True), (1, True), (3, True), (3, True)]
    for folder in complete_checkpoints(tmp_path / "kept"):
        check_files(folder, read_manifest(folder))
        whole = read_tensor(folder, read_metadata(folder), "a")
        assert torch.equal(whole, torch.arange(2000.0) + read_manifest(folder).iteration)
