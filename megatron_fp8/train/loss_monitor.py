"""Warns of repeated skipped steps, and of losses far above earlier ones."""

from __future__ import annotations

from dataclasses import dataclass, field

_MEMORY = 0.9
"""Decay of the running means: about the last ten losses count."""
_FAR = 2.0
"""A spike is a loss of at least this many times the running mean,"""
_DEVIATIONS = 6.0
"""and above the mean by at least this many mean absolute deviations."""


@dataclass
class LossMonitor:
    """Counts steps and judges losses. Every rank has one and gives it the same steps, so all ranks decide the same.

    Attributes:
        max_skipped_steps: this many skipped steps in a row end the training; 0: no limit.
        row: counted skipped steps in a row.
        taken: steps that were not skipped.
        skipped: steps that were skipped.
        spike: describes the first loss spike; empty if there was none.
        now: the same for the last step.
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
        """Whether too many steps in a row were skipped, so that training must end."""
        return 0 < self.max_skipped_steps <= self.row

    def step(self, iteration: int, loss: float | None, *, skipped: bool, curable: bool) -> str:
        """Record a step; return a line to print, or ''.

        Args:
            loss: None if it is not finite.
            curable: a loss scale can still decrease; a step skipped meanwhile neither counts nor ends the row.
        """
        if not skipped:
            self.taken, self.row = self.taken + 1, 0
        else:
            self.skipped += 1
            self.row += not curable
        self.now = ""
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
            self.now = f"iteration {iteration} had loss {loss:.4f}, far above the running mean {mean:.4f}"
        if self.now and not self.spike:
            self.spike = self.now
            warning = (
                f"warning: {self.spike}. If it does not come back: go back to an earlier checkpoint, with a lower "
                "optimizer.lr, a longer optimizer.lr_warmup_iters or other data."
            )
        weight = _MEMORY if self._losses else 0.0
        self._deviation = self._deviation * weight + (1 - weight) * (abs(distance) if self._losses else 0.0)
        self._mean = mean * weight + (1 - weight) * loss
        self._losses += 1
        return warning
