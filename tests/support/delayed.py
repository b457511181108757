"""Delayed scaling of one tensor, one number at a time, written from docs/numerics.md."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.support import reference
from megatron_fp8.recipe import DelayedScaling


class PlainSlot:
    """One tensor's delayed scaling, one number at a time."""

    def __init__(self, recipe: DelayedScaling, largest: float):
        self.recipe, self.largest = recipe, largest
        self.rows = [0.0] * recipe.amax_history_len
        self.scale, self.warm = np.float32(1), False

    def update(self, v: float, iteration: int) -> None:
        """One iteration's end; v is the largest amax that was seen in it."""
        if v == 0 or v == math.inf:
            self.rows[0] = 0.0
            return
        self.rows[0] = v
        if iteration % self.recipe.interval == 0:
            amax = v if self.recipe.amax_compute_algo == "most_recent" else max(self.rows)
            self.scale = reference.scale(
                amax, self.largest, margin=self.recipe.margin, epsilon=self.recipe.amax_epsilon
            )
            self.warm = True
        self.rows = self.rows[1:] + self.rows[:1]
        self.rows[0] = 0.0
