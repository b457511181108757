"""Warns of repeated skipped steps, and of losses far above earlier ones."""

from __future__ import annotations

from dataclasses import dataclass, field

_MEMORY = 0.9
"""Of the running means: the last ten losses or so."""
_FAR = 2.0
"""A loss is a spike when it is at least this many times its running mean,"""
_DEVIATIONS = 6.0
"""and above it by at least this many times the mean difference of losses from it."""


@dataclass
class Liveness:
    """What the steps so far say. Every rank has one and gives it the same steps, so that all decide the same.

    Attributes:
        max_skipped_steps: so many skipped steps in a row end the training; 0: none do.
        row: skipped steps in a row, of those that count.
        taken: steps that were not skipped.
        skipped: steps that were.
        spike: the first loss far above its running mean, in words; empty: there was none.
        now: the same of the last step.
    """

    max_skipped_steps: int
    row: int = 0
    taken: int = 0
    skipped: int = 0
    spike: str = ""
    now: str = ""
    _mean: float = field(default=0.0, repr=False)
    _deviation: float = field(default=0.0, repr=False)
    _losses: int = field(default=0, repr=False)

    @property
    def hopeless(self) -> bool:
        """Whether so many steps in a row were skipped that training has to end."""
        return 0 < self.max_skipped_steps <= self.row

    def step(self, iteration: int, loss: float | None, *, skipped: bool, curable: bool) -> str:
        """Take note of a step; a line to say now, or ''.

        Args:
            loss: None: not finite.
            curable: a loss scale can still fall; a step that is skipped meanwhile is neither counted nor the row's end.
        """
        if not skipped:
            self.taken, self.row = self.taken + 1, 0
        else:
            self.skipped += 1
            self.row += not curable
        self.now = ""
        return "" if loss is None else self._loss(iteration, loss)

    def memory(self) -> dict[str, float]:
        """What the losses so far left, for a checkpoint."""
        return {"mean": self._mean, "deviation": self._deviation, "losses": self._losses}

    def remember(self, memory: dict[str, float]) -> None:
        """Judge the next losses as after ``memory()``; of an empty one as at the start."""
        self._mean, self._deviation = memory.get("mean", 0.0), memory.get("deviation", 0.0)
        self._losses = int(memory.get("losses", 0))

    def _loss(self, iteration: int, loss: float) -> str:
        said = ""
        mean, distance = self._mean, loss - self._mean
        far = loss > _FAR * mean and distance > _DEVIATIONS * self._deviation
        if self._losses and far:
            self.now = f"iteration {iteration} had loss {loss:.4f}, far above the running mean {mean:.4f}"
        if self.now and not self.spike:
            self.spike = self.now
            said = (
                f"warning: {self.spike}. If it does not come back: go back to an earlier checkpoint, with a lower "
                "optimizer.lr, a longer optimizer.lr_warmup_iters or other data."
            )
        weight = _MEMORY if self._losses else 0.0
        self._deviation = self._deviation * weight + (1 - weight) * (abs(distance) if self._losses else 0.0)
        self._mean = mean * weight + (1 - weight) * loss
        self._losses += 1
        return said
