"""Codes of a tensor in another recipe, for the same statistics.

Most recipes make their scales of the tensor at hand, so nothing more is needed. Delayed scaling makes its scale of
earlier iterations: ``WhatIfHistory`` keeps their amaxes, and has to be told of every iteration, measured or not.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..backends import specified
from ..numerics.formats import FloatFormat
from ..numerics.rule import Direction, Rule
from ..numerics.scaling import compute_scale
from ..numerics.subnormals import keeping_subnormals
from ..recipe import RECIPES, DelayedScaling
from ..state.rings import Rings
from ..tensor import Float8Tensor
from .names import WHAT_IF


def what_if_rule(recipe: str, role: str, fmt: FloatFormat | None) -> Rule:
    """How a recipe (a prefix of names.WHAT_IF) quantises 'input', 'weight' or 'grad_output', with its defaults.

    Args:
        fmt: the format that the run's own codes of this tensor have, which is kept, as in Transformer Engine: a what-if
            changes the scales. None, where the run has none: the recipe's own.
    """
    rule: Rule | None = RECIPES[WHAT_IF[recipe]]().rule(role)
    assert rule is not None
    return replace(rule, fmt=fmt or rule.fmt)


def what_if(
    x: torch.Tensor,
    recipe: str,
    role: str,
    *,
    fmt: FloatFormat | None = None,
    direction: Direction = "rowwise",
    scale: torch.Tensor | None = None,
) -> Float8Tensor:
    """x [rows, cols] as another recipe quantises it.

    Args:
        recipe, role, fmt: as of ``what_if_rule``.
        direction: the sides that are wanted.
        scale: float32 [], the history's (``WhatIfHistory.scale``) for 'fp8_delayed_scaling'; None: x's own.
    """
    return specified.quantize(x.detach(), what_if_rule(recipe, role, fmt), direction, scale=scale).tensor


class WhatIfHistory:
    """The amaxes of the last iterations of several tensors, and the delayed scales that follow from them.

    It goes by the rules of state/arena.py: a tensor that was not cast in an iteration keeps its history as it is, an
    infinite amax is forgotten, and before the first amax there is no scale.

    Args:
        fmt: of the codes of these tensors.
        count: how many tensors there are.
        recipe: history length, algorithm, margin, epsilon and interval; its own defaults if None.
    """

    def __init__(
        self, fmt: FloatFormat, count: int, device: torch.device, recipe: DelayedScaling | None = None
    ):
        self.fmt, self.recipe = fmt, recipe or DelayedScaling()
        self.rings = Rings(count, self.recipe.amax_history_len, device)
        self.scales = torch.ones(count, dtype=torch.float32, device=device)
        self.warm = [False] * count
        self.updates = 0

    @keeping_subnormals
    def update(self, amax: torch.Tensor) -> None:
        """The end of an iteration, measured or not: amax float32 [count], of the iteration and of all ranks that share a
        scale; 0 where a tensor was not cast. Read back once, while any has no scale yet."""
        amax = torch.where(amax.isinf(), 0.0, amax)
        seen = amax != 0
        self.rings.put(amax)
        if self.updates % self.recipe.interval == 0:
            longest = amax if self.recipe.amax_compute_algo == "most_recent" else self.rings.largest()
            margin, epsilon = self.recipe.margin, self.recipe.amax_epsilon
            fresh = compute_scale(longest, self.fmt, margin=margin, epsilon=epsilon)
            self.scales = torch.where(seen, fresh, self.scales)
            if not all(self.warm):
                told = seen.tolist()
                self.warm = [before or now for before, now in zip(self.warm, told, strict=True)]
        self.rings.roll(seen)
        self.updates += 1

    def scale(self, index: int) -> torch.Tensor | None:
        """float32 [], that this iteration's casts of a tensor would use; None before its first amax."""
        return self.scales[index] if self.warm[index] else None
