"""What is ambient, and little is: which layer is being built, and whether the user switched FP8 off around a call.

While a model is built, ``building_layer`` tells the linears inside it their global layer number. At run time a context
can only switch sites off (``fp8_disabled``); it cannot switch on what the plan does not have. Leaving one does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerBeingBuilt:
    """Global 0-based number of the layer under construction, and why it stays in BF16 (None: it does not)."""

    number: int
    bf16_reason: str | None


_building: ContextVar[LayerBeingBuilt | None] = ContextVar("building", default=None)
_disabled: ContextVar[str | None] = ContextVar("disabled", default=None)


@contextmanager
def building_layer(number: int, bf16_reason: str | None) -> Iterator[None]:
    """Linears made inside belong to this layer."""
    token = _building.set(LayerBeingBuilt(number, bf16_reason))
    try:
        yield
    finally:
        _building.reset(token)


def layer_being_built() -> LayerBeingBuilt | None:
    """The layer under construction here, None outside."""
    return _building.get()


@contextmanager
def fp8_disabled(reason: str | None) -> Iterator[None]:
    """Sites called inside run in high precision; None leaves things as they are around it."""
    token = _disabled.set(reason if reason is not None else _disabled.get())
    try:
        yield
    finally:
        _disabled.reset(token)


def disabled_reason() -> str | None:
    """Why FP8 is switched off here, None if it is not."""
    return _disabled.get()


def in_recompute() -> bool:
    """Whether this forward runs inside a backward pass: a recomputation, whose amax was recorded the first time."""
    return torch._C._current_graph_task_id() != -1
