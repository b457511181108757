"""Fp8Callback for transformers' Trainer.

trainer = Trainer(convert_to_fp8(model), arguments, train_dataset=rows, callbacks=[Fp8Callback()])
trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from .common import Fp8Iterations

FILE = "fp8_state.safetensors"


class Fp8Callback(TrainerCallback):
    """Ends the FP8 iteration before each optimizer step, stores FP8 state in Trainer's checkpoints, logs FP8 counts.

    If an FP8 cast of a step found NaN or Inf, the step is skipped on all ranks. Trainer cannot skip a step, so its
    optimizer finds no gradients, and weights and moments do not change; ``global_step`` and the schedule continue. With
    fp16 the loss scaler gets an overflow instead: it skips the step and lowers its scale, and the schedule waits, as
    after any overflow. DeepSpeed is untested: it steps inside ``backward``, where no step can be skipped.

    Each row of logs with a loss has ``fp8_skipped_steps`` and ``fp8_nonfinite``, counted since the training began.

    Checkpoints get a file ``fp8_state.safetensors``. ``train(resume_from_checkpoint=...)`` reads it after weights and
    optimizer, and training continues bit for bit; ``load_best_model_at_end`` reads it too. A checkpoint without the
    file resumes with cold scales and a warning. So do checkpoints of ``enable_jit_checkpoint``, which calls no
    callbacks.
    """

    def __init__(self) -> None:
        self.iterations = Fp8Iterations()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Called after the checkpoint's weights and optimizer were loaded and the model was wrapped."""
        trainer, local = _calling_trainer()
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(
            0, callbacks.pop(callbacks.index(self))
        )  # on_log before the callbacks that write the row
        self.iterations = Fp8Iterations()
        if checkpoint := local.get("resume_from_checkpoint"):
            self.iterations.load(model, Path(checkpoint) / FILE)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Called when gradients are accumulated, reduced and clipped."""
        self.iterations.finish(model, optimizer, getattr(optimizer, "scaler", None))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Called when the row is in the history, before the other callbacks get it."""
        if "loss" in logs:
            logs.update(self.iterations.logs())
            state.log_history[-1].update(self.iterations.logs())

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Called when the checkpoint is written."""
        if args.should_save:
            trainer, local = _calling_trainer()
            runs = Path(trainer._get_output_dir(local.get("trial")))
            self.iterations.save(model, runs / f"checkpoint-{state.global_step}" / FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Called after the best weights were loaded, if that is configured."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            Fp8Iterations().load(model, Path(state.best_model_checkpoint) / FILE)


def _calling_trainer() -> tuple[Trainer, dict[str, Any]]:
    """The Trainer that now runs callbacks, and the local variables of its calling method.

    They are found on the stack: events contain neither the resumed checkpoint nor the folder of a search's trial.
    """
    frame = sys._getframe(1)
    while not isinstance(frame.f_locals.get("self"), Trainer):
        if frame.f_back is None:
            raise RuntimeError(
                "Fp8Callback was called by no transformers.Trainer: give it as Trainer(callbacks=[...])"
            )
        frame = frame.f_back
    return frame.f_locals["self"], frame.f_locals
