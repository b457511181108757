"""Backends: where codes are made and multiplied. A backend is a module with name, supports, notes, quantize and gemm.

``supports(device, recipe)`` returns the reason why the backend cannot run there, or not that recipe, or None;
``notes(device, recipe)`` says what of the recipe it does in another way than its own. An explicit request that cannot be
met is an error; 'auto' takes the first that can, in the order of BACKENDS. No request is ever replaced in silence.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ..recipe import Recipe
from . import emulated, native

BACKENDS: dict[str, ModuleType] = {"native": native, "emulated": emulated}
"""Backends of this release, best first."""


def choose_backend(
    request: str | None, device: torch.device, recipe: Recipe | None = None
) -> tuple[ModuleType, str]:
    """The backend for a device and a recipe, and why it was taken.

    Args:
        request: a backend's name, or 'auto' or None.
        device: where the operands live.
        recipe: what they are quantised as; None asks for any.

    Raises:
        ValueError: the name is unknown or that backend cannot run there; the message says what can.
    """
    if request not in (None, "auto"):
        if request not in BACKENDS:
            raise ValueError(
                f"fp8_backend {request!r} is not in this release: use 'auto' or one of {', '.join(BACKENDS)}"
                " ('emulated' runs on every device)"
            )
        reason = BACKENDS[request].supports(device, recipe)
        if reason is not None:
            raise ValueError(
                f"fp8_backend {request!r} cannot run on {device}: {reason}; use fp8_backend='auto'"
                " ('emulated' runs on every device)"
            )
        return BACKENDS[request], "; ".join(["asked for", *_notes(BACKENDS[request], device, recipe)])
    reasons: list[str] = []
    for backend_name, backend in BACKENDS.items():
        reason = backend.supports(device, recipe)
        if reason is None:
            return backend, "; ".join([*(reasons or ["the fastest here"]), *_notes(backend, device, recipe)])
        reasons.append(f"not {backend_name}: {reason}")
    raise ValueError(f"no FP8 backend can run on {device}: {'; '.join(reasons)}")


def _notes(backend: ModuleType, device: torch.device, recipe: Recipe | None) -> list[str]:
    return [] if recipe is None else backend.notes(device, recipe)
