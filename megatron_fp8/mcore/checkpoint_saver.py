"""Saving: everything down to the disk under a name nobody reads, then one rename, then ``latest``.

    .saving-iter_0000100-...   every rank writes and syncs its tensors; rank 0 adds the manifest with all checksums
    iter_0000100               rank 0 renames: from here on the checkpoint exists
    latest                     rank 0 replaces it atomically
    iter_0000070               rank 0 removes what is older than the last ones to keep

A rank that is killed before the rename leaves a folder that the next save removes; after it, a complete checkpoint. A
full disk, or any other failure of any rank, is an error on all ranks together, and the folder is removed at once.

An asynchronous save copies to the CPU and does the rest in a thread. Its error is raised where all ranks meet: at the
next save, or at the end.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from ..checkpoint_files import (
    LATEST,
    Manifest,
    complete_checkpoints,
    file_record,
    folder_name,
    replace_file,
    sync,
)
from .checkpoint_store import prepare, root_cause, write_companions, write_shards

_UNFINISHED = ".saving-"


class SaveError(RuntimeError):
    """A checkpoint could not be saved; earlier ones are intact. The same on every rank."""


class Saver:
    """Writes the checkpoints of one run into one folder. Made, and called, on all ranks together.

    Args:
        folder: made with the first save.
        keep_last: complete checkpoints to keep, the new one included; 0 keeps all.
        asynchronous: write while training goes on.
    """

    def __init__(self, folder: Path, *, keep_last: int = 0, asynchronous: bool = False) -> None:
        self.folder, self.keep_last, self.asynchronous = folder, keep_last, asynchronous
        self._group = dist.new_group(backend="gloo")  # a thread's collectives must not meet training's
        self._first = dist.get_rank() == 0
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[Path] | None = None

    def save(self, sharded_state: dict[str, Any], manifest: Manifest) -> None:
        """Save; with ``asynchronous`` return as soon as training may change the tensors. Waits for the save before.

        Raises SaveError: this save failed, or, asynchronous, the one before.
        """
        self.finish()
        prepared = prepare(sharded_state, copy=self.asynchronous)
        if not self.asynchronous:
            self._write(prepared, manifest)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending = self._thread.submit(self._write, prepared, manifest)

    def finish(self) -> None:
        """Wait for the save that is under way, if one is. Raises SaveError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.finish()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    # ------------------------------------------------------------------------------------- on all ranks together

    def _write(self, prepared: dict[str, Any], manifest: Manifest) -> Path:
        unfinished = self.folder / self._on_first(lambda: self._begin(manifest.iteration), self.folder)
        try:
            self._shards(unfinished, prepared)
            records = self._on_all(lambda: self._own_files(unfinished), unfinished)
            manifest.files = {name: record for part in records for name, record in part.items()}
            self._on_first(lambda: self._commit(unfinished, manifest), unfinished)
        except SaveError:
            if self._first:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return self.folder / folder_name(manifest.iteration)

    def _shards(self, unfinished: Path, prepared: dict[str, Any]) -> None:
        try:
            write_shards(unfinished, prepared, self._group)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise _failure(unfinished, rank, cause) from None

    def _on_all(self, work: Callable[[], Any], where: Path) -> list[Any]:
        """Every rank's ``work()``, on every rank; SaveError on all if it failed on any."""
        outcome: tuple[Any, Exception | None]
        try:
            outcome = (work(), None)
        except (OSError, RuntimeError) as error:
            outcome = (None, OSError(*root_cause(error).args))  # without frames, which do not travel
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, outcome, group=self._group)
        for rank, (_, failed) in enumerate(everyone):
            if failed is not None:
                raise _failure(where, rank, failed)
        return [value for value, _ in everyone]

    def _on_first(self, work: Callable[[], Any], where: Path) -> Any:
        return self._on_all(lambda: work() if self._first else None, where)[0]

    # -------------------------------------------------------------------------------------------------- on one rank

    def _begin(self, iteration: int) -> str:
        """Remove what killed saves left, make a new folder; its name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover)
        unfinished = self.folder / f"{_UNFINISHED}{folder_name(iteration)}-{uuid.uuid4().hex[:8]}"
        unfinished.mkdir()
        return unfinished.name

    def _own_files(self, unfinished: Path) -> dict[str, dict[str, Any]]:
        """Checksums of the files that this rank has written, which are on the disk."""
        names = [path.name for path in unfinished.glob(f"__{dist.get_rank()}_*")]
        if self._first:
            write_companions(unfinished)
            names += sorted(path.name for path in unfinished.iterdir() if not path.name.startswith("__"))
        for name in names:
            sync(unfinished / name)
        return {name: file_record(unfinished / name) for name in names}

    def _commit(self, unfinished: Path, manifest: Manifest) -> None:
        manifest.write(unfinished)
        sync(unfinished)
        final = self.folder / folder_name(manifest.iteration)
        if final.exists():  # this iteration was saved before, and training went back behind it
            final.rename(self.folder / f"{_UNFINISHED}{final.name}-replaced-{uuid.uuid4().hex[:8]}")
        unfinished.rename(final)
        sync(self.folder)
        replace_file(self.folder / LATEST, final.name + "\n")
        self._remove_old(final)

    def _remove_old(self, newest: Path) -> None:
        for leftover in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if self.keep_last:
            up_to_now = [path for path in complete_checkpoints(self.folder) if path.name <= newest.name]
            for path in up_to_now[: -self.keep_last]:
                # Renamed first, so that a removal that is cut short leaves no half checkpoint under its name.
                doomed = self.folder / f"{_UNFINISHED}{path.name}-old"
                path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _failure(where: Path, rank: int, cause: BaseException) -> SaveError:
    reason = " ".join(str(cause).split()) or type(cause).__name__
    return SaveError(
        f"the checkpoint could not be saved in {str(where.parent)!r} (rank {rank}: {reason}). Earlier checkpoints are"
        " intact: make room, or set another checkpoint.folder, and start again with --resume=auto."
    )
