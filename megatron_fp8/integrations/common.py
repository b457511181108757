"""Shared steps of all integrations: end of iteration, skipped steps, FP8 state.

A step is skipped if an FP8 cast of its iteration found NaN or Inf on any rank. A cast saturates an Inf, so the
gradients do not show it, and neither a loss scaler nor a check of the gradient norm finds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from ..files.atomic_io import replace_file
from ..files.terminal import warn_user
from ..nn.state_dict import fp8_state_dict, load_fp8_state_dict
from ..nn.step import fp8_step

COUNTERS = ("skipped_steps", "nonfinite")
"""A run's counts, saved under these names; names of linears' entries differ, as they have a dot."""


class Fp8Iterations:
    """Ends the FP8 iterations of one model's training, and counts.

    Attributes:
        skipped_steps: skipped optimizer steps since the training began.
        nonfinite: NaN and Inf found by FP8 casts, over all ranks, since the training began.
    """

    def __init__(self) -> None:
        self.skipped_steps = self.nonfinite = 0

    def finish(self, model: torch.nn.Module, optimizer: Any, scaler: Any = None) -> None:
        """End an iteration, after its last backward and before ``optimizer.step()``. Collective, as ``fp8_step``.

        If a cast found NaN or Inf, the next step changes nothing on any rank: neither weights nor the optimizer's
        state. Without a scaler it finds no gradients; a scaler gets an overflow, and lowers its scale.

        Args:
            optimizer: torch's, or a wrapper with it as ``.optimizer``.
            scaler: the torch.amp.GradScaler that will call ``optimizer.step()``; None: no loss scaling.
        """
        nonfinite = fp8_step(model).nonfinite
        self.nonfinite += nonfinite
        if nonfinite and _skip_step(optimizer, scaler):
            self.skipped_steps += 1

    def logs(self) -> dict[str, int]:
        """The counts by their names in logs."""
        return {f"fp8_{name}": getattr(self, name) for name in COUNTERS}

    def state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """``fp8_state_dict(model)`` and the counts (int64 [])."""
        counts = {
            name: torch.tensor(getattr(self, name), dtype=torch.int64, device="cpu") for name in COUNTERS
        }
        return {**fp8_state_dict(model), **counts}

    def load_state_dict(self, model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
        """Load the result of ``state_dict``, with counts. Raises ValueError for another model or recipe."""
        load_fp8_state_dict(model, {key: saved[key] for key in saved.keys() - set(COUNTERS)})
        for name in COUNTERS:
            setattr(self, name, int(saved.get(name, 0)))

    def save(self, model: torch.nn.Module, path: Path) -> None:
        """Write the state to a safetensors file atomically. One rank calls it."""
        replace_file(path, save(self.state_dict(model)))

    def load(self, model: torch.nn.Module, path: Path) -> None:
        """Load a file of ``save``. All ranks call it.

        A checkpoint without one was saved without this integration: a warning reports that the scales start anew.

        Raises ValueError if the file cannot be read, or is of another model or recipe.
        """
        if not path.exists():
            warn_of_cold_start(str(path.parent))
            return
        try:
            saved = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"the FP8 state {str(path)!r} cannot be read ({error}): resume from another checkpoint, or remove"
                " the file to start with cold scales"
            ) from error
        self.load_state_dict(model, saved)


def warn_of_cold_start(checkpoint: str) -> None:
    """Warn that a checkpoint has no FP8 state."""
    warn_user(
        f"the checkpoint {checkpoint} has no FP8 state: delayed scaling starts anew, and this run will differ from an"
        " uninterrupted one. That is right for a checkpoint that was trained without FP8"
    )


def _skip_step(optimizer: Any, scaler: Any) -> bool:
    """Make the next ``optimizer.step()`` change nothing; return whether any parameter has a gradient."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        return False
    if scaler is None or not scaler.is_enabled():
        for parameter in parameters:
            parameter.grad = None  # zero gradients would still decay weights and moments
        return True
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner  # a scaler uses the innermost optimizer
    if not scaler._found_inf_per_device(optimizer):
        scaler.unscale_(optimizer)
    for found_inf in scaler._found_inf_per_device(optimizer).values():
        found_inf.fill_(1.0)  # without gradients the scaler would step, and raise its scale
    return True
