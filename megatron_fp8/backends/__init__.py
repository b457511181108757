"""Backends: where codes are made and multiplied. A backend is a module with name, supports, quantize and gemm.

``supports(device)`` returns the reason why the backend cannot run there, or None. An explicit request that cannot be met
is an error; 'auto' takes the first that can, in the order of BACKENDS. No request is ever replaced in silence.
"""

from __future__ import annotations

from types import ModuleType

import torch

from . import emulated

BACKENDS: dict[str, ModuleType] = {"emulated": emulated}
"""Backends of this release, best first."""


def choose_backend(request: str | None, device: torch.device) -> tuple[ModuleType, str]:
    """The backend for a device, and why it was taken.

    Args:
        request: a backend's name, or 'auto' or None.
        device: where the operands live.

    Raises:
        ValueError: the name is unknown or that backend cannot run on the device; the message says what can.
    """
    if request not in (None, "auto"):
        if request not in BACKENDS:
            raise ValueError(
                f"fp8_backend {request!r} is not in this release: use 'auto' or one of {', '.join(BACKENDS)}"
                " ('emulated' runs on every device)"
            )
        reason = BACKENDS[request].supports(device)
        if reason is not None:
            raise ValueError(
                f"fp8_backend {request!r} cannot run on {device}: {reason}; use fp8_backend='auto'"
            )
        return BACKENDS[request], "asked for"
    reasons: list[str] = []
    for backend_name, backend in BACKENDS.items():
        reason = backend.supports(device)
        if reason is None:
            why = "; ".join(reasons) or f"the only backend of this release for {device.type}"
            return backend, why
        reasons.append(f"{backend_name}: {reason}")
    raise ValueError(f"no FP8 backend can run on {device}: {'; '.join(reasons)}")
