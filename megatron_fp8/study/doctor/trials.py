"""Trials: each recipe on each backend here, against the exact product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch

from ...backends import BACKENDS, emulated
from ...backends import transformer_engine as engine
from ...recipe import RECIPES, CustomRecipe, Recipe
from ...state.collectives import own_device

_GEMM_TOLERANCE, _LINEAR_TOLERANCE = 1e-3, 0.1


@dataclass(frozen=True)
class Trial:
    """Result of a recipe on a backend here.

    Attributes:
        recipe: its name; None: the backend cannot run here with any recipe.
        result: 'good', 'wrong', or 'refused' by the backend before running.
        error: native and emulated: largest error over the largest value of the exact product of the same
            codes. Transformer Engine: root mean square error, relative to the unquantised product.
        reason: why it was refused, or what is wrong besides the error.
        cure: remedy for a refusal.
    """

    backend: str
    recipe: str | None
    result: Literal["good", "wrong", "refused"]
    error: float | None = None
    reason: str | None = None
    cure: str | None = None


def trials() -> Iterator[Trial]:
    """Every recipe on every backend. A backend that cannot run here yields one trial for itself and one per recipe."""
    device = own_device()
    for backend in BACKENDS.values():
        yield from _of_backend(backend, device)
    yield from _of_transformer_engine(device)


def _of_backend(backend: ModuleType, device: torch.device) -> Iterator[Trial]:
    if (reason := backend.supports(device)) is not None:
        yield Trial(backend.name, None, "refused", reason=reason)
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(128, 256, generator=generator, dtype=torch.float32, device="cpu").to(device)
        for _ in range(2)
    )
    for name, made in RECIPES.items():
        if name == "custom":
            continue
        scaling = made()
        refused = reason or backend.supports(device, scaling)
        yield (
            Trial(backend.name, name, "refused", reason=refused)
            if refused is not None
            else _gemm(backend, name, scaling, x, w)
        )


def _gemm(backend: ModuleType, name: str, scaling: Recipe, x: torch.Tensor, w: torch.Tensor) -> Trial:
    rules = [scaling.rule(role) for role in ("input", "weight")]
    a, b = (
        backend.quantize(t, rule, "rowwise").tensor.rowwise for t, rule in zip((x, w), rules, strict=True)
    )
    found = backend.gemm(a, b, out_dtype=torch.float32)
    exact = emulated.gemm(a, b, out_dtype=torch.float64, exact=True)
    error = ((found.double() - exact).abs().max() / exact.abs().max()).item()
    return Trial(backend.name, name, "good" if error < _GEMM_TOLERANCE else "wrong", error)


def _of_transformer_engine(device: torch.device) -> Iterator[Trial]:
    cure = engine.INSTALL if engine.missing() is not None else None
    if (reason := engine.supports(device)) is not None:
        yield Trial(engine.name, None, "refused", reason=reason, cure=cure)
    for name, made in RECIPES.items():
        scaling = made() if name != "custom" else CustomRecipe(lambda role: None)
        refused = reason or engine.supports(device, scaling)
        if refused is not None:
            yield Trial(engine.name, name, "refused", reason=refused, cure=cure)
            continue
        error, differs = engine.try_linear(scaling, device)
        good = error < _LINEAR_TOLERANCE and not differs
        yield Trial(engine.name, name, "good" if good else "wrong", error, "; ".join(differs) or None)
