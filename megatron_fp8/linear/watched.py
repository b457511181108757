"""Whether a call in eager mode goes as one operator: where somebody watches operations, it does.

Selective activation checkpointing keeps results of operations to hand them out again, tracers write operations down, fake
and meta tensors have no memory. The steps inside the linear are no business of theirs: it changes results in place, and a
recomputation takes other steps. So they are given a single operator (compiled.py).
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..plan.switch import in_recompute
from ..state.fp8_state import Fp8State


def is_watched(*tensors: torch.Tensor) -> bool:
    """Whether a dispatch mode looks at each operation, or there is nothing to compute with."""
    return _get_current_dispatch_mode() is not None or any(
        x.is_meta or isinstance(x, FakeTensor) for x in tensors
    )


class WatchedForwards:
    """Which forwards of a site's iteration were watched, so that a recomputation goes as they did.

    What a recomputation saves has to match what its forward saved, and the mode that was on around the forward may be off
    when it is recomputed.
    """

    def __init__(self, state: Fp8State):
        self._state = state
        self._iteration = -1
        self._met: set[bool] = set()  # answers given to the forwards of that iteration

    def as_operator(self, *tensors: torch.Tensor) -> bool:
        """Whether a call on these tensors goes as one operator."""
        if self._state.capturing:
            return False  # the mode is the capture's own, which wants all steps
        watched, iteration = is_watched(*tensors), self._state.iteration
        if not in_recompute():
            if iteration != self._iteration:
                self._iteration, self._met = iteration, set()
            self._met.add(watched)
        elif iteration == self._iteration and len(self._met) == 1:
            return next(iter(self._met))
        return watched
