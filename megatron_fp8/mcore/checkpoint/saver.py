"""Atomic saves: all files to the disk, one rename, then ``latest``.

    .saving-iter_0000100-...   every rank writes and syncs its tensors; rank 0 checks that it sees every rank's files
    in
                               full size, and adds the manifest with all checksums
    iter_0000100               rank 0 renames: from here on the checkpoint exists
    latest                     rank 0 replaces it atomically
    iter_0000070               rank 0 removes checkpoints older than the last ones to keep

If a rank is killed before the rename, a folder remains that the next save removes; after it, the checkpoint is complete.
A full disk, a folder that is not shared by all ranks, or any other failure of any rank, raises on all ranks together,
and the folder is removed at once. If only ``latest`` cannot be written, the checkpoint stays and the error names it.

Training cannot continue from weights, masters or moments with NaN or Inf. They are saved under another name,
``not_finite_0000100``, for debugging: no reader loads it without its explicit path, ``latest`` does not change, and
no earlier checkpoint is removed for it.

An asynchronous save copies to the CPU and writes in a thread. Its error is raised at the next collective point: the
next save, or the end.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...files.atomic_io import discard, error_text, files_not_visible, remedy, replace_file, sync
from ...files.checkpoint import (
    LATEST,
    METADATA,
    Manifest,
    complete_checkpoints,
    file_record,
    folder_name,
    not_finite_checkpoints,
    not_finite_name,
)
from ...files.terminal import warn_user
from ...state.collectives import broadcast_value, first_rank_with, gather_to_first, sum_over_ranks
from .store import Make, Shards, TensorsToWrite, prepare, root_cause, write_marker_files

_UNFINISHED = ".saving-"
_PATIENCE_S = 60.0
"""How long rank 0 waits to see other ranks' files: NFS clients refresh a folder after at most 60 s."""


class SaveError(RuntimeError):
    """A checkpoint could not be saved; earlier ones are intact. Raised on every rank."""


@dataclass
class _PreviousSave:
    """The previous save: this rank's plan, the positions of its shards, and on the first rank ``.metadata``."""

    planned: Any = None
    written: Any = None
    metadata: bytes = b""


class _NotShared(OSError):
    """Rank 0 does not see other ranks' files."""


class _FailedAfterCommit(OSError):
    """The checkpoint is complete, but a later step failed; the message names it and the remedy."""


class Saver:
    """Writes the checkpoints of one run into one folder, the same for all ranks. All ranks create and call it together.

    Args:
        folder: created with the first save.
        keep_last: complete checkpoints to keep, with the new one; 0 keeps all.
        asynchronous: write while training continues.
        patience: seconds that rank 0 waits to see the files of the others.
        still_ours: called on rank 0 before it changes anything in the folder; raises OSError if another run uses it.
        timeout: of the ranks' collectives; None: torch's.

    ``not_finite`` names a tensor with NaN or Inf at the start of the latest save, and its rank; '' if there was none.
    ``seconds``: duration of the latest complete save, from its start to its rename.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 0,
        asynchronous: bool = False,
        patience: float = _PATIENCE_S,
        still_ours: Callable[[], None] = lambda: None,
        timeout: timedelta | None = None,
    ) -> None:
        self.folder, self.keep_last, self.asynchronous = folder, keep_last, asynchronous
        self.patience, self.still_ours = patience, still_ours
        self.not_finite, self.seconds = "", 0.0
        # A separate group: the thread's collectives must not mix with training's.
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._first = dist.get_rank() == 0
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._before = _PreviousSave()

    def save(self, sharded_state: dict[str, Any], manifest: Manifest, make: Make | None = None) -> None:
        """Saves; with ``asynchronous`` returns as soon as training may change the tensors. Waits for the previous save.

        Args:
            make: creates the tensors of shards on the meta device and ensures that they are finite; only without
                ``asynchronous``.

        Raises SaveError: this save failed, or with ``asynchronous`` the previous one.
        """
        self.finish()
        since = time.monotonic()
        prepared = prepare(sharded_state, copy=self.asynchronous)
        self._note_not_finite(prepared, manifest)
        if not self.asynchronous:
            self._write(since, prepared, manifest, make)
            return
        assert make is None, "an asynchronous save cannot copy tensors that are made later"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending = self._thread.submit(self._write, since, prepared, manifest)

    def finish(self) -> None:
        """Waits for the running save, if there is one. Raises SaveError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits, and ends the thread."""
        try:
            self.finish()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    # ------------------------------------------------------------------------------------- on all ranks together

    def _note_not_finite(self, prepared: TensorsToWrite, manifest: Manifest) -> None:
        found = first_rank_with(prepared.not_finite or None, self._group)
        self.not_finite = "" if found is None else f"{found[1]} on rank {found[0]}"
        if found is None:
            return
        manifest.facts = {**manifest.facts, "not_finite": self.not_finite}
        if self._first:
            good = complete_checkpoints(self.folder)
            warn_user(
                f"iteration {manifest.iteration} is saved as {not_finite_name(manifest.iteration)}, since"
                f" {self.not_finite} holds NaN or Inf: the checkpoint to go back to is {good[-1] if good else 'none'}."
            )

    def _write(
        self, since: float, prepared: TensorsToWrite, manifest: Manifest, make: Make | None = None
    ) -> None:
        folder_here = self._on_each(lambda: self._begin(manifest.iteration) if self._first else "")
        unfinished = self.folder / broadcast_value(0, folder_here, self._group)
        try:
            self._shards(unfinished, prepared, make)
            own_files = self._on_each(lambda: self._own_files(unfinished))
            records = gather_to_first(list(own_files.items()), self._group)
            manifest.files = {name: record for _, (name, record) in records}
            writers = {name: rank for rank, (name, _) in records}
            self._on_first(lambda: self._see(unfinished, manifest.files, writers))
            self._on_first(lambda: self._commit(unfinished, manifest))
            self.seconds = time.monotonic() - since
        except SaveError as error:
            if self._first or isinstance(error.__cause__, _NotShared):
                with _warn_if_not_removed(unfinished):
                    discard(unfinished)
            raise

    def _shards(self, unfinished: Path, prepared: TensorsToWrite, make: Make | None) -> None:
        """Writes all ranks' files and ``.metadata``.

        If every rank's tensors and their positions in the files equal the previous save's, the previous ``.metadata``
        is reused and nothing is collected.
        """
        shards = Shards(unfinished, prepared.tensors, dist.get_rank(), make)
        before, plan = self._before, self._on_each(shards.plan)
        planned = not sum_over_ranks(int(plan.items != before.planned), self._group)
        if not planned:
            self._settle(shards, plan)
        positions = self._on_each(shards.write)
        if planned and not sum_over_ranks(int(positions != before.written), self._group):
            self._on_first(lambda: (unfinished / METADATA).write_bytes(before.metadata))
            return
        if planned:
            self._settle(shards, plan)
        results = gather_to_first([positions] if positions else [], self._group)
        metadata = self._on_each(
            lambda: shards.finish([result for _, result in results]) if self._first else b""
        )
        self._before = _PreviousSave(plan.items, positions, metadata)

    def _settle(self, shards: Shards, plan: Any) -> None:
        plans = gather_to_first([plan] if plan.items else [], self._group)
        self._on_first(lambda: shards.settle([plan for _, plan in plans]))

    def _on_each(self, work: Callable[[], Any]) -> Any:
        """Returns this rank's ``work()``; raises SaveError on all ranks if it failed on any."""
        result: Any = None
        error_here: Exception | None = None
        try:
            result = work()
        except (_NotShared, _FailedAfterCommit) as error:
            error_here = error
        except Exception as error:  # whatever it is, the others must not wait for this rank
            cause = root_cause(error)  # without its traceback, which cannot be sent
            error_here = OSError(*cause.args) if isinstance(cause, OSError) else RuntimeError(str(cause))
        if (found := first_rank_with(error_here, self._group)) is not None:
            raise self._failure(*found) from (found[1] if isinstance(found[1], _NotShared) else None)
        return result

    def _on_first(self, work: Callable[[], Any]) -> None:
        self._on_each(lambda: work() if self._first else None)

    def _failure(self, rank: int, cause: BaseException) -> SaveError:
        if isinstance(cause, _FailedAfterCommit):
            return SaveError(str(cause))
        reason = " ".join(str(cause).split()) or type(cause).__name__
        what = f"the checkpoint could not be saved in {str(self.folder)!r} (rank {rank}: {reason})."
        if isinstance(cause, _NotShared):
            return SaveError(
                f"{what} The folder is not shared: give a checkpoint.folder on a file system that all nodes have, under"
                " the same path. Earlier checkpoints are intact."
            )
        if not self._has_earlier():
            return SaveError(
                f"{what} There is no earlier checkpoint: {remedy(cause)} and start again, or give another folder with"
                " --checkpoint.folder=FOLDER."
            )
        return SaveError(
            f"{what} Earlier checkpoints are intact: {remedy(cause)} and start again, or go on in another folder with"
            f" --checkpoint.folder=FOLDER --resume={self.folder}."
        )

    def _has_earlier(self) -> bool:
        try:
            return bool(complete_checkpoints(self.folder))
        except ValueError:  # it cannot be listed
            return True

    # -------------------------------------------------------------------------------------------------- on one rank

    def _begin(self, iteration: int) -> str:
        """Removes the folders of killed saves and makes a new one; returns its name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.still_ours()
        self._remove_leftovers()
        unfinished = self.folder / f"{_UNFINISHED}{folder_name(iteration)}-{uuid.uuid4().hex[:8]}"
        unfinished.mkdir()
        return unfinished.name

    def _own_files(self, unfinished: Path) -> dict[str, dict[str, Any]]:
        """Returns checksums of this rank's files, after syncing them to the disk."""
        own_name = f"__{dist.get_rank()}_0.distcp"  # not listed: the folder has one file per rank
        names = [own_name] if (unfinished / own_name).exists() else []
        if self._first:
            write_marker_files(unfinished)
            names += sorted(path.name for path in unfinished.iterdir() if not path.name.startswith("__"))
        for name in names:
            sync(unfinished / name)
        return {name: file_record(unfinished / name) for name in names}

    def _see(self, unfinished: Path, files: dict[str, dict[str, Any]], writers: dict[str, int]) -> None:
        """Raises unless this rank sees every rank's files in full size."""
        sizes = {name: record["bytes"] for name, record in files.items()}
        if missing := files_not_visible(unfinished, sizes, self.patience):
            raise _NotShared(
                f"{len(missing)} of {len(sizes)} files that were written cannot be seen after {self.patience:.0f} s,"
                f" such as {missing[0]} of rank {writers[missing[0]]}"
            )

    def _commit(self, unfinished: Path, manifest: Manifest) -> None:
        manifest.write(unfinished)
        sync(unfinished)
        self.still_ours()
        name = not_finite_name if self.not_finite else folder_name
        final = self.folder / name(manifest.iteration)
        replaced = self._put_aside(final)  # this iteration was saved before a rollback
        try:
            unfinished.rename(final)
        except OSError:
            if replaced:
                replaced.rename(final)
            raise
        try:
            sync(self.folder)
        except OSError as error:
            raise _FailedAfterCommit(
                f"the checkpoint {final} is complete, but the disk does not confirm its name ({error_text(error)}): after"
                f" a loss of power it may be gone. {remedy(error).capitalize()} and start again with --resume={final}."
            ) from error
        if not self.not_finite:
            self._name_latest(final)
        self._remove_old(final)

    def _name_latest(self, final: Path) -> None:
        pointer = self.folder / LATEST
        try:
            replace_file(pointer, final.name + "\n")
        except OSError as error:
            raise _FailedAfterCommit(
                f"the checkpoint {final} is complete, but {str(pointer)!r} cannot be written ({error_text(error)})."
                f" It may name an earlier one: {remedy(error)} and start again with --resume={final}."
            ) from error

    def _remove_old(self, newest: Path) -> None:
        superseded: list[Path] = []
        if self.not_finite:
            superseded = [path for path in not_finite_checkpoints(self.folder) if path != newest]
        elif self.keep_last:
            checkpoints = complete_checkpoints(self.folder)
            superseded = checkpoints[: checkpoints.index(newest) + 1][: -self.keep_last]
        for path in superseded:
            with _warn_if_not_removed(path):
                self._put_aside(path)
        self._remove_leftovers()

    def _put_aside(self, path: Path) -> Path | None:
        """Renames a checkpoint before its removal, so that none is left half removed; returns the new name."""
        if not os.path.lexists(path):
            return None
        aside = self.folder / f"{_UNFINISHED}{path.name}-old-{uuid.uuid4().hex[:8]}"
        path.rename(aside)
        return aside

    def _remove_leftovers(self) -> None:
        for leftover in self.folder.glob(f"{_UNFINISHED}*"):
            with _warn_if_not_removed(leftover):
                discard(leftover)


@contextmanager
def _warn_if_not_removed(path: Path) -> Iterator[None]:
    """Turns a failed removal into a warning: the leftover only uses space."""
    try:
        yield
    except OSError as error:
        warn_user(f"{str(path)!r} cannot be removed ({error_text(error)}): remove it by hand.")
