"""The sections of a benchmark by name, in order of measurement."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from ...plan.size_table import Gemm
from ...recipe import Recipe
from .collectives import collectives
from .gemm_bench import Bench, gemm, linear, quantise
from .models import inference, layer, step

SECTIONS: dict[str, Callable[[Bench, Gemm, Recipe, ModuleType], None]] = {
    "quantise": quantise,
    "gemm": gemm,
    "linear": linear,
    "layer": layer,
    "step": step,
    "inference": inference,
    "collectives": collectives,
}
