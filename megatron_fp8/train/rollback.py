"""Rollback after a loss spike: the last checkpoint, without the samples since.

This is PaLM's remedy (Chowdhery et al., arXiv 2204.02311, section 5.1): its loss spiked about twenty times, at batches
that did no harm to an earlier state of the weights. Training went back about 100 steps and left out 200 to 500 batches.
Here it goes back to a checkpoint, so `checkpoint.save_interval` decides how many batches a spike costs.
train/loss_monitor.py defines a spike. Its running means are saved and restored, so an interrupted run judges losses like
an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files.checkpoint import Manifest, complete_checkpoints, iteration_of, read_manifest
from . import skipped_samples
from .checkpoints import Start
from .failure import TrainingFailed
from .launch.parallel import on_first_rank
from .verify_files import check_together

Chosen = tuple[Path, Manifest]


class Rollbacks:
    """The rollbacks of one run. Made and called on every rank.

    Args:
        most: limit of rollbacks, including those of earlier attempts.
        every: iterations between two saves.
        folder: folder of this run's checkpoints.
        restore: loads a checkpoint into model, optimizer, schedule and random streams; returns the new start.
        wait: waits for a running save.
        records: samples left out before.

    ``ranges``: ranges of the samples that are left out.
    """

    def __init__(
        self,
        most: int,
        every: int,
        folder: Path,
        restore: Callable[[Chosen], Start],
        wait: Callable[[], None],
        records: list[dict[str, Any]],
    ) -> None:
        self.most, self._every, self.folder = most, every, folder
        self._restore, self._wait = restore, wait
        self.records = list(records)

    @property
    def ranges(self) -> list[skipped_samples.Range]:
        return skipped_samples.ranges_of(self.records)

    def back(self, iteration: int, samples: int, why: str) -> tuple[Start | None, str]:
        """Roll back from the end of an iteration. Return the new start (None: no rollback) and a line to print.

        Args:
            samples: samples consumed so far.
            why: describes the spike.

        Collective. Raises TrainingFailed if the checkpoint is damaged, or if the record cannot be written.
        """
        if len(self.records) >= self.most:
            return None, f"warning: {why}. All {self.most} rewinds are used up: training goes on."
        self._wait()
        try:
            chosen = on_first_rank(lambda: self._newest(iteration - 1))
            if chosen is None:
                return None, f"warning: {why}. No checkpoint is from before, to go back to: training goes on."
            check_together(*chosen)
            start = self._restore(chosen)
            first, last = (
                skipped_samples.place(start.samples, self.ranges),
                skipped_samples.place(samples - 1, self.ranges) + 1,
            )
            record = {
                "first": first,
                "last": last,
                "iteration": iteration,
                "went_back_to": start.iteration,
                "why": why,
            }
            on_first_rank(lambda: self._write([*self.records, record]))
        except ValueError as error:
            raise TrainingFailed(f"training failed: {why}, and it cannot go back: {error}") from error
        self.records.append(record)
        return start, (
            f"rewind      {why}: back to {chosen[0].name}, samples {first} to {last - 1} are left out"
            f" ({len(self.records)} of at most {self.most} times)"
        )

    def _newest(self, iteration: int) -> Chosen | None:
        """This run's newest checkpoint of at most `iteration`.

        A checkpoint of a regular save takes precedence over one saved at a stop: an uninterrupted run would have only
        the former.
        """
        by_iteration = {iteration_of(path): path for path in complete_checkpoints(self.folder)}
        candidates = [done for done in by_iteration if done <= iteration]
        if not candidates:
            return None
        path = by_iteration[max(candidates, key=lambda done: (done % self._every == 0, done))]
        return path, read_manifest(path)

    def _write(self, records: list[dict[str, Any]]) -> None:
        try:
            skipped_samples.write(self.folder, records)
        except OSError as error:
            raise ValueError(f"{skipped_samples.FILE} cannot be written ({error.strerror})") from error
