"""Checks native FP8 of a config on another device, by the support matrix.

`estimate` takes the FP8 peak from a data sheet, even if this package does not run the recipe there. So it
looks up the same cells that `doctor` prints.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...backends import emulated, transformer_engine
from ...backends.native import backend as native
from ...estimate.model import Model
from ...estimate.peaks import Device
from ...estimate.sites import recipe_of
from ...recipe import RECIPES
from .generations import GENERATIONS, Generation
from .matrix import documented


@dataclass(frozen=True)
class Elsewhere:
    """Support of a run's FP8 on a device.

    Attributes:
        native: False: a recipe of the run would not run natively; None: unknown.
        reason: why it is not True.
        notes: substitutes used for a product, if any.
    """

    native: bool | None
    reason: str | None = None
    notes: tuple[str, ...] = ()


def asked_of(model: Model, device: Device) -> Elsewhere | None:
    """The result; None if there is nothing to check: a BF16 run, or measured FP8 rates.

    Raises:
        ValueError: the device's file names a generation without a column in the matrix.
    """
    generation = _generation(device)
    if not model.fp8 or device.measured:
        return None
    if model.fp8_backend == emulated.name:
        return Elsewhere(False, "fp8_backend=emulated multiplies the values of codes in BF16 or float32")
    if generation is None:
        return Elsewhere(None, "its file has no line `generation`, a column of doctor's matrix such as sm90")
    request = model.fp8_backend
    backend = transformer_engine.name if request == transformer_engine.name else native.name
    recipes, notes = recipe_of(model), []
    for name in dict.fromkeys([str(model.fp8_recipe), *_override_recipes(model.fp8_overrides)]):
        cell = documented(backend, name, generation, recipes(name))
        if not cell.supported:
            place = f"{backend} {name} on {generation.name}"
            return Elsewhere(cell.supported, f"{place}: {cell.reason or cell.note}")
        if cell.note:
            notes.append(f"{name} on {generation.name}: {cell.note}; the times assume the peak nevertheless")
    return Elsewhere(True, notes=tuple(notes))


def _generation(device: Device) -> Generation | None:
    known = {generation.key: generation for generation in GENERATIONS}
    if device.generation is None or device.generation in known:
        return known.get(device.generation or "")
    near = difflib.get_close_matches(device.generation, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(
        f"--device={device.name}: generation={device.generation!r} must be one of {', '.join(known)}.{hint}"
    )


def _override_recipes(overrides: Mapping[str, Any]) -> Iterator[str]:
    """Recipes named in overrides, including those for single GEMMs and operands."""
    for value in overrides.values():
        if isinstance(value, Mapping):
            yield from _override_recipes(value)
        elif isinstance(value, str) and value in RECIPES:
            yield value
