"""Who wrote a model's weights last: its training, or somebody else?

Delayed scaling asks, where it evaluates (linear/fitted.py). A weight that the training wrote may lie a little beyond its
scale, as optimizers let weights grow, and evaluation then saturates it as the training's forward does. One that somebody
else wrote is not to be saturated at all. What tells them apart is noted where the training is known to have written
last: when an optimizer of the model has stepped, and when an iteration ends. No value is looked at.

A write through ``.data`` leaves no trace in a tensor's version. Of a frozen weight, which no optimizer writes, none is
needed: adapters are merged into such. Of others it shows by its size alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..linear.fitted import Known


class _Left(NamedTuple):
    """A weight as training left it."""

    parameter: weakref.ref[torch.Tensor]
    version: int
    frozen: bool


class LeftByTraining:
    """The weights of a model's linears as its training left them.

    Args:
        copied: it is of a deep copy, whose weights are all at the beginning of their versions.

    Attributes:
        told: the model's user was told of a weight that does not fit its scale.
    """

    def __init__(self, *, copied: bool = False):
        self.told = False
        self._copied = copied
        self._left: dict[int, _Left] = {}

    def note(self, weights: Iterable[torch.nn.Parameter | None]) -> None:
        """The training may have written them until now. A weight that is computed is None."""
        self._copied = False
        left: dict[int, _Left] = {}
        for weight in weights:
            if weight is None or id(weight) in left or weight.is_inference():  # which has no version
                continue
            left[id(weight)] = _Left(weakref.ref(weight), weight._version, not weight.requires_grad)
        self._left = left

    def known(self, parameter: torch.Tensor | None, *, doubted: bool = False) -> Known:
        """What is known of one now. ``doubted``: of a copy, that the original may not have been what training left."""
        if parameter is None or parameter.is_inference():
            return Known(told=self.told)
        left = self._left.get(id(parameter))
        if left is None or left.parameter() is not parameter:
            written, frozen = self._copied and (doubted or parameter._version > 0), False
        else:
            written, frozen = parameter._version != left.version, left.frozen
        return Known(1.0, written, self.told) if written or frozen else Known(told=self.told)
