"""Loss spikes and skipped steps: when to warn, and rollback to the last checkpoint.

Rollback is PaLM's remedy (Chowdhery et al., arXiv 2204.02311, section 5.1): its loss spiked about twenty times, at
batches that did no harm to an earlier state of the weights. Training went back about 100 steps and left out 200 to 500
batches. Here it goes back to a checkpoint, so `checkpoint.save_interval` decides how many batches a spike costs. The
running means are saved and restored, so an interrupted run judges losses like an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...files.atomic_io import as_value_error
from ...files.checkpoint import Manifest, complete_checkpoints, iteration_of, read_manifest
from ..launch.parallel import on_first_rank
from ..resume.checkpoints import Start, check_together
from ..stop import TrainingFailed
from . import skipped_samples

_MEMORY = 0.9
"""Decay of the running means: about the last ten losses count."""
_FAR = 2.0
"""A spike is a loss of at least this many times the running mean,"""
_DEVIATIONS = 6.0
"""and above the mean by at least this many mean absolute deviations."""

Chosen = tuple[Path, Manifest]


@dataclass
class LossMonitor:
    """Counts steps and judges losses. Every rank has one and gives it the same steps, so all ranks decide the same.

    Attributes:
        max_skipped_steps: this many skipped steps in a row end the training; 0: no limit.
        skipped_row: counted skipped steps in a row.
        taken: steps that were not skipped.
        skipped: steps that were skipped.
        spike: describes the first loss spike; empty if there was none.
        spike_now: the same for the last step.
    """

    max_skipped_steps: int
    skipped_row: int = 0
    taken: int = 0
    skipped: int = 0
    spike: str = ""
    spike_now: str = ""
    _mean: float = field(default=0.0, repr=False)
    _deviation: float = field(default=0.0, repr=False)
    _losses: int = field(default=0, repr=False)

    @property
    def too_many_skipped(self) -> bool:
        """Whether too many steps in a row were skipped, so that training must end."""
        return 0 < self.max_skipped_steps <= self.skipped_row

    def step(self, iteration: int, loss: float | None, *, skipped: bool, scale_can_fall: bool) -> str:
        """Record a step; return a line to print, or ''.

        Args:
            loss: None if it is not finite.
            scale_can_fall: a loss scale can still decrease; a step skipped meanwhile neither counts nor ends the row.
        """
        if not skipped:
            self.taken, self.skipped_row = self.taken + 1, 0
        else:
            self.skipped += 1
            self.skipped_row += not scale_can_fall
        self.spike_now = ""
        return "" if loss is None else self._loss(iteration, loss)

    def memory(self) -> dict[str, float]:
        """The running means, for a checkpoint."""
        return {"mean": self._mean, "deviation": self._deviation, "losses": self._losses}

    def remember(self, memory: dict[str, float]) -> None:
        """Restore what ``memory()`` returned; an empty ``memory`` resets to the start."""
        self._mean, self._deviation = memory.get("mean", 0.0), memory.get("deviation", 0.0)
        self._losses = int(memory.get("losses", 0))

    def _loss(self, iteration: int, loss: float) -> str:
        warning = ""
        mean, distance = self._mean, loss - self._mean
        far = loss > _FAR * mean and distance > _DEVIATIONS * self._deviation
        if self._losses and far:
            self.spike_now = (
                f"iteration {iteration} had loss {loss:.4f}, far above the running mean {mean:.4f}"
            )
        if self.spike_now and not self.spike:
            self.spike = self.spike_now
            warning = (
                f"warning: {self.spike}. If it does not come back: go back to an earlier checkpoint, with a lower "
                "optimizer.lr, a longer optimizer.lr_warmup_iters or other data."
            )
        weight = _MEMORY if self._losses else 0.0
        self._deviation = self._deviation * weight + (1 - weight) * (abs(distance) if self._losses else 0.0)
        self._mean = mean * weight + (1 - weight) * loss
        self._losses += 1
        return warning


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
        with as_value_error(
            f"training failed: {why}, and it cannot go back", errors=ValueError, raises=TrainingFailed
        ):
            chosen = on_first_rank(lambda: self._newest(iteration - 1))
            if chosen is None:
                return None, f"warning: {why}. No checkpoint is from before, to go back to: training goes on."
            check_together(*chosen)
            start = self._restore(chosen)
            first, last = (
                skipped_samples.sample_position(start.samples, self.ranges),
                skipped_samples.sample_position(samples - 1, self.ranges) + 1,
            )
            record = {
                "first": first,
                "last": last,
                "iteration": iteration,
                "went_back_to": start.iteration,
                "why": why,
            }
            on_first_rank(lambda: self._write([*self.records, record]))
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
        with as_value_error(f"{skipped_samples.FILE} cannot be written", ""):
            skipped_samples.write(self.folder, records)
