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
    """A parameter as training left it."""

    parameter: weakref.ref[torch.Tensor]
    version: int
    frozen: bool


class LeftByTraining:
    """The parameters of a model as its training left them.

    Args:
        copied: it is of a deep copy, whose parameters are all at the beginning of their versions.

    Attributes:
        told: the model's user was told of a weight that does not fit its scale.
    """

    def __init__(self, *, copied: bool = False):
        self.told = False
        self._copied = copied
        self._left: dict[int, _Left] = {}

    def note(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The training may have written them until now."""
        self._copied = False
        self._left = {}
        for parameter in parameters:
            if id(parameter) not in self._left and not parameter.is_inference():  # which has no version
                left = _Left(weakref.ref(parameter), parameter._version, not parameter.requires_grad)
                self._left[id(parameter)] = left

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
