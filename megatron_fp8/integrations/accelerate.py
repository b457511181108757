"""register_fp8 for loops with Hugging Face's accelerate.

model, optimizer = accelerator.prepare(convert_to_fp8(model), optimizer)
fp8 = register_fp8(accelerator, model, optimizer)
...                                          # the unchanged loop, with accelerator.save_state and load_state
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
    """End the FP8 iteration before each optimizer step; store FP8 state in the folder of ``accelerator.save_state``.

    If an FP8 cast of a step found NaN or Inf, the step is skipped on all ranks: the optimizer finds no gradients, and
    weights and moments do not change. With fp16 the loss scaler gets an overflow instead, so that it lowers its scale.

    ``save_state`` writes ``fp8_state.safetensors`` into its folder (``fp8_state_1`` for the second prepared model), and
    ``load_state`` reads it: training continues bit for bit. A folder without it loads with a warning. Rejected:
    ``register_for_checkpointing``, which writes a pickle.

    Args:
        model, optimizer: the results of ``accelerator.prepare``.

    Returns:
        The counts: ``skipped_steps``, ``nonfinite``, and ``logs()`` for ``accelerator.log``.

    Raises ValueError if this accelerator did not prepare the model or the optimizer, or if another library steps
    (DeepSpeed).
    """
    bare = accelerator.unwrap_model(model, keep_torch_compile=False)  # accelerate keeps some models wrapped
    prepared = [
        accelerator.unwrap_model(prepared_model, keep_torch_compile=False)
        for prepared_model in accelerator._models
    ]
    indices = [index for index, prepared_model in enumerate(prepared) if prepared_model is bare]
    if not indices:
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
    name = f"fp8_state_{indices[0]}.safetensors" if indices[0] else "fp8_state.safetensors"

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
    """An AcceleratedOptimizer that ends the FP8 iteration before it steps.

    Rejected: a hook of torch's optimizer, which does not run if the scaler skips the step.

    Attributes:
        fp8_iterations, fp8_model: the counts, and their model.
    """

    fp8_iterations: Fp8Iterations
    fp8_model: torch.nn.Module

    def step(self, closure: Any = None) -> None:
        """Step if gradients are synchronised; during accumulation do nothing, as accelerate does."""
        if closure is not None:
            raise ValueError(
                "a closure runs the model inside of the optimizer's step, after which the iteration ends:"
                " call register_fp8_step(optimizer, model) in place of register_fp8"
            )
        if self.gradient_state.sync_gradients:
            self.fp8_iterations.finish(self.fp8_model, self, self.scaler)
        super().step()
