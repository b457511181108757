"""Fp8Callback for Lightning, installed as ``lightning`` or as ``pytorch_lightning``.

trainer = Trainer(callbacks=[Fp8Callback()])
trainer.fit(module, rows, ckpt_path="last")  # module has a model converted by convert_to_fp8
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from .common import Fp8Iterations, warn_of_cold_start

_INSTALLED = [name for name in ("lightning", "pytorch_lightning") if find_spec(name)]
if not _INSTALLED:
    raise ModuleNotFoundError("megatron_fp8.integrations.lightning needs Lightning: pip install lightning")
_BASES = [import_module("lightning.pytorch" if name == "lightning" else name).Callback for name in _INSTALLED]
KEY = "fp8_state"


class Fp8Callback(*_BASES):  # type: ignore[misc]  # a Callback under each name: a Trainer accepts its own
    """Ends the FP8 iteration before each optimizer step, stores FP8 state in Lightning's checkpoints, logs FP8 counts.

    If an FP8 cast of a step found NaN or Inf, the step is skipped on all ranks: the optimizer finds no gradients, and
    weights and moments do not change; ``global_step`` and the schedule continue. With ``precision="16-mixed"`` the loss
    scaler gets an overflow instead, skips the step and lowers its scale. With several optimizers (manual optimization)
    each step ends an iteration; so does each call of the closure by LBFGS.

    ``fp8_skipped_steps`` and ``fp8_nonfinite``, counted since the training began, are logged with the step.

    Checkpoints have the FP8 state as plain tensors, ``checkpoint["fp8_state"]``; ``fit(ckpt_path=...)`` reads it, and
    training continues bit for bit. A checkpoint without it resumes with cold scales and a warning.
    """

    def __init__(self) -> None:
        self.iterations = Fp8Iterations()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Called inside ``optimizer.step(closure)``, after backward; gradients are reduced, not yet clipped."""
        self.iterations.finish(pl_module, optimizer, getattr(trainer.precision_plugin, "scaler", None))
        pl_module.log_dict({name: float(count) for name, count in self.iterations.logs().items()})

    def on_save_checkpoint(
        self, trainer: Any, pl_module: torch.nn.Module, checkpoint: dict[str, Any]
    ) -> None:
        """Called on all ranks, of which one writes the checkpoint."""
        checkpoint[KEY] = self.iterations.state_dict(pl_module)

    def on_load_checkpoint(
        self, trainer: Any, pl_module: torch.nn.Module, checkpoint: dict[str, Any]
    ) -> None:
        """Called after the weights were loaded, before the optimizer."""
        if KEY in checkpoint:
            self.iterations.load_state_dict(pl_module, checkpoint[KEY])
        else:
            warn_of_cold_start(f"of global step {checkpoint['global_step']}")
