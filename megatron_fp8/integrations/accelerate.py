"""register_fp8 for loops with Hugging Face's accelerate.

model, optimizer = accelerator.prepare(convert_to_fp8(model), optimizer)
fp8 = register_fp8(accelerator, model, optimizer)
...                                          # the loop as it is, with accelerator.save_state and load_state
accelerator.log({"loss": loss, **fp8.logs()})
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from .common import Fp8Iterations


def register_fp8(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> Fp8Iterations:
    """End the FP8 iteration before each step of the optimizer; keep FP8 state where ``accelerator.save_state`` saves.

    A step whose FP8 casts met NaN or Inf is skipped, on all ranks: the optimizer finds no gradients, and weights and
    moments stay as they were. With fp16 the loss scaler gets an overflow instead, so that it lowers its scale.

    ``save_state`` writes ``fp8_state.safetensors`` into its folder (``fp8_state_1`` for the second model that was
    prepared), and ``load_state`` reads it: training goes on to the same bits. A folder without it loads with a warning.
    Rejected: ``register_for_checkpointing``, which writes a pickle.

    Args:
        model, optimizer: as ``accelerator.prepare`` returned them.

    Returns:
        The counts: ``skipped_steps``, ``nonfinite``, and ``logs()`` for ``accelerator.log``.

    Raises ValueError: the model or the optimizer was not prepared by this accelerator, or steps elsewhere (DeepSpeed's).
    """
    bare = accelerator.unwrap_model(
        model, keep_torch_compile=False
    )  # accelerate keeps some wrapped, some not
    prepared = [accelerator.unwrap_model(one, keep_torch_compile=False) for one in accelerator._models]
    places = [place for place, one in enumerate(prepared) if one is bare]
    if not places:
        raise ValueError(
            f"register_fp8 was given a {type(model).__name__} that this accelerator did not prepare: give it the model"
            " that accelerator.prepare(model, optimizer) returned"
        )
    if type(optimizer) not in (AcceleratedOptimizer, _Fp8Optimizer):
        raise ValueError(
            f"register_fp8 was given a {type(optimizer).__name__}: give it the AcceleratedOptimizer that"
            " accelerator.prepare(model, optimizer) returned; for one of DeepSpeed's, which steps in backward, call"
            " fp8_step(model) after accelerator.backward(loss)"
        )
    iterations = Fp8Iterations()
    optimizer.__class__ = _Fp8Optimizer
    optimizer.fp8_iterations, optimizer.fp8_model = iterations, model
    name = f"fp8_state_{places[0]}.safetensors" if places[0] else "fp8_state.safetensors"

    def save(models: Any, weights: Any, folder: str) -> None:
        on_each_node = accelerator.project_configuration.save_on_each_node
        if accelerator.is_local_main_process if on_each_node else accelerator.is_main_process:
            iterations.save(model, Path(folder) / name)

    def load(models: Any, folder: str) -> None:
        iterations.load(model, Path(folder) / name)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return iterations


class _Fp8Optimizer(AcceleratedOptimizer):
    """An AcceleratedOptimizer that ends the iteration before it steps.

    Rejected: a hook of torch's optimizer, which does not run where the scaler skips the step.

    Attributes:
        fp8_iterations, fp8_model: what is counted, of which model.
    """

    fp8_iterations: Fp8Iterations
    fp8_model: torch.nn.Module

    def step(self, closure: Any = None) -> None:
        """The optimizer's own, where gradients are synchronised; between them, as ever, nothing."""
        if closure is not None:
            raise ValueError(
                "a closure runs the model inside of the optimizer's step, after which the iteration ends:"
                " call register_fp8_step(optimizer, model) in place of register_fp8"
            )
        if self.gradient_state.sync_gradients:
            self.fp8_iterations.finish(self.fp8_model, self, self.scaler)
        super().step()
