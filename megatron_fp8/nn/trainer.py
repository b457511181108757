"""Fp8Trainer: one optimizer step of a PyTorch model in FP8.

    trainer = Fp8Trainer(model, optimizer, compute_loss, scaler=LossScaler(), clip_grad=1.0)
    for batch in batches:
        step = trainer.train_step(batch)

``train_step`` is a readable template for your own training loop. The order matters in two places. Gradients
are unscaled before clipping, since the norm must be that of true gradients. And the FP8 iteration ends before
the optimizer steps: a cast saturates Inf, so gradients may not show it, and the decision to skip needs the
casts' NaN/Inf counts.

Rejected: torch.amp.GradScaler. Each rank would decide alone, and by gradients only.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ..files.argument_check import check_model, check_optimizer
from ..files.atomic_io import sync
from ..params.fp8_parameter import Fp8Parameter
from ..plan.overrides import check_overrides_match, check_parts
from ..state.collectives import checked_group
from ..state.loss_scaler import LossScaler, agree, unscale_
from ..state.precision_schedule import PrecisionSchedule
from .linear import Fp8Layer
from .module_lookup import groups_of
from .sites import STANDALONE
from .state_dict import fp8_state_dict, load_fp8_state_dict
from .step import fp8_step


@dataclass(frozen=True)
class Step:
    """Result of one ``train_step``.

    Attributes:
        loss: this rank's mean over its microbatches, unscaled; NaN and Inf as they are.
        skipped: whether the weights were left unchanged, on all ranks, because of NaN or Inf.
        grad_norm: 2-norm of the gradient before clipping; None if the step was skipped or clipping is off.
        loss_scale: factor of the loss; 1 without a scaler.
        nonfinite: NaN and Inf values in FP8 casts, over all ranks.
    """

    loss: float
    skipped: bool
    grad_norm: float | None
    loss_scale: float
    nonfinite: int


class Fp8Trainer:
    """Trains a model, converted to FP8 or not, bare or in DistributedDataParallel or fully_shard, on its
    device.

    Args:
        model, optimizer: of torch. The optimizer's parameters are float32 or bfloat16; for float16 keep them
            float32 and use torch.autocast(dtype=torch.float16) in ``compute_loss``.
        compute_loss: (model, microbatch) -> the microbatch's mean loss, a scalar.
        scaler: loss scaler, needed for float16 activations and gradients; None: no scaling. With or without
            it, a step with NaN or Inf in a gradient or an FP8 cast is skipped.
        clip_grad: largest norm of the whole gradient; None: no clipping.
        warmup, healing: first and last fraction of the training in high precision (precision_schedule.py).
        healing_parts: linears or GEMMs in high precision in the last fraction, as keys of overrides (``["*:fprop"]``);
            None: everything.
        length: steps of the whole training; needed with ``warmup`` or ``healing``.
        group: the ranks that train this model; None: all, if torch.distributed is initialised.

    ``iteration`` counts calls of ``train_step``, ``skipped`` the skipped ones.

    Raises:
        ValueError: the optimizer is another model's; a fraction is not in [0, 1), leaves nothing to FP8,
            comes without a length or an FP8 model, or with weights stored as FP8; healing_parts name no linear
            of the model, or come without healing; clip_grad is not above 0.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        compute_loss: Callable[[torch.nn.Module, Any], Tensor],
        *,
        scaler: LossScaler | None = None,
        clip_grad: float | None = None,
        warmup: float = 0.0,
        healing: float = 0.0,
        healing_parts: Sequence[str] | None = None,
        length: int | None = None,
        group: Any = None,
    ) -> None:
        if clip_grad is not None and not clip_grad > 0:
            raise ValueError(f"clip_grad={clip_grad!r} must be above 0; None switches clipping off")
        check_model(model)
        checked_group(group)
        check_optimizer(optimizer, model)
        self.model, self.optimizer, self.compute_loss = model, optimizer, compute_loss
        self.scaler, self.clip_grad, self.group = scaler, clip_grad, group
        self.is_fp8 = any(isinstance(module, Fp8Layer) for module in model.modules())
        self.iteration = self.skipped = 0
        self._set_phases(warmup, healing, healing_parts, length)

    def train_step(self, *microbatches: Any) -> Step:
        """One optimizer step on the mean loss of the microbatches. Collective over all ranks of the group.

        It calls fp8_step, so do not combine it with register_fp8_step.

        Raises RuntimeError as fp8_step does; ValueError for float16 gradients, or without a microbatch.
        """
        if not microbatches:
            raise ValueError("train_step() was given no microbatch: give one, or several to accumulate")
        scale = self.scaler.scale if self.scaler else 1.0
        loss = 0.0
        self.model.train()
        self.optimizer.zero_grad()
        for number, microbatch in enumerate(microbatches, start=1):
            with self._reducing(number == len(microbatches)):
                part = self.compute_loss(self.model, microbatch).float() / len(microbatches)
                (self.scaler.scale_loss(part) if self.scaler else part).backward()
            loss += float(part.detach())

        # The FP8 iteration ends: amaxes and NaN/Inf counts are reduced over ranks, scales and histories updated.
        nonfinite = fp8_step(self.model, group=self.group).nonfinite if self.is_fp8 else 0
        found = unscale_(self._gradients(), scale)
        overflow = agree(found or nonfinite > 0, self.group)

        norm = None
        if not overflow:
            if self.clip_grad is not None:
                norm = float(clip_grad_norm_(self._parameters(), self.clip_grad))
            self.optimizer.step()
        if self.scaler:
            self.scaler.update(overflow)
        self.iteration += 1
        self.skipped += overflow
        return Step(loss, overflow, norm, scale, nonfinite)

    def state_dict(self) -> dict[str, Any]:
        """The complete training state between two steps: tensors and plain numbers.

        The caller saves random streams and the data position. With fully_shard use
        torch.distributed.checkpoint for model and optimizer.
        """
        return {
            "model": self._bare_model().state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "fp8": fp8_state_dict(self.model) if self.is_fp8 else {},
            "counters": {"iteration": self.iteration, "skipped": self.skipped},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``: bit for bit, given the same data and random streams.

        A scaler missing from the state starts fresh. So do FP8 scales of a state saved without FP8.

        Raises ValueError: not a trainer's state, or FP8 state of another model or recipe.
        """
        parts = ("model", "optimizer", "scaler", "fp8", "counters")
        missing = [part for part in parts if not isinstance(state, dict) or part not in state]
        if missing:
            raise ValueError(f"this is not the state of an Fp8Trainer: it has no {', '.join(missing)}")
        if self.is_fp8 and state["fp8"]:
            load_fp8_state_dict(self.model, state["fp8"])
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self._bare_model().load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration, self.skipped = (int(state["counters"][name]) for name in ("iteration", "skipped"))

    def save(self, path: str | Path) -> None:
        """Write ``state_dict`` to a file, atomically and synced to disk. One rank calls it."""
        temporary = Path(f"{path}.new")
        torch.save(self.state_dict(), temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(temporary.parent)

    def load(self, path: str | Path) -> None:
        """Continue from a file of ``save``. Reads tensors and plain values only, so a file cannot run code.

        Raises ValueError: the file is unreadable, or no trainer's state.
        """
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{str(path)!r} is not a file of Fp8Trainer.save: {why}") from error
        self.load_state_dict(state)

    def _set_phases(
        self, warmup: float, healing: float, parts: Sequence[str] | None, length: int | None
    ) -> None:
        if parts is not None:
            check_parts(parts, "healing_parts")
            if not healing:
                raise ValueError(
                    f"healing_parts={parts!r} are of the phase that healing={healing!r} leaves out"
                )
        if not (warmup or healing):
            return
        options = f"warmup={warmup!r}, healing={healing!r}, length={length!r}"
        if not (0 <= warmup < 1 and 0 <= healing < 1):
            raise ValueError(
                f"{options}: both are fractions of the training, from 0 up to but not including 1"
            )
        if length is None:
            raise ValueError(f"{options}: the fractions need the number of steps of the whole training")
        if not self.is_fp8:
            raise ValueError(f"{options}: the model has no FP8 linear; call convert_to_fp8(model) first")
        if any(isinstance(parameter, Fp8Parameter) for parameter in self.model.parameters()):
            raise ValueError(
                f"{options}: weights are stored as FP8, and a phase in high precision needs high-precision ones"
            )
        phases = PrecisionSchedule(warmup, healing, length, tuple(parts or ()))
        groups = groups_of(self.model)
        members = [sites for group in groups for sites, _ in group.members]
        names = [name for sites in members for name in (sites.name or STANDALONE, *sites.also)]
        check_overrides_match(dict.fromkeys(phases.parts), names, "healing_parts")
        for group in groups:
            group.set_phases(phases)

    def _reducing(self, last: bool) -> Any:
        """Context: DistributedDataParallel reduces gradients once a step, in the backward of the last microbatch."""
        if last or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()

    def _bare_model(self) -> torch.nn.Module:
        model = self.model
        if isinstance(model, DistributedDataParallel):
            model = model.module
        return getattr(model, "_orig_mod", model)  # torch.compile's wrapper

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
