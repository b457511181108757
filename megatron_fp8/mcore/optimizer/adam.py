"""Adam that counts steps once a parameter group, as Megatron-Core's checkpoints expect.

Megatron-Core uses Transformer Engine's or apex's FusedAdam, which store ``step`` in the parameter group. Without them it
uses torch's AdamW, which stores a step per parameter, and its distributed optimizer then cannot resume: saving before
the first step fails an assertion, and after a load all parameters share one step tensor, which each of them increments.
This Adam has FusedAdam's interface; its arithmetic is torch's own function, so its bits equal torch.optim.AdamW's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam

from .. import environment as compat
from ..patches.patching import PatchList


class Adam(torch.optim.Optimizer):
    """Adam (``adam_w_mode``: with decoupled weight decay) with float32 parameters and state.

    Args:
        params: parameters or parameter groups; parameters without a gradient are skipped.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        adam_w_mode: decoupled weight decay; False adds it to the gradient.

    A parameter's state is ``exp_avg`` and ``exp_avg_sq``; ``step`` (an int) is the group's, and counts from the first
    step of a group that has parameters. NaN and Inf in a gradient enter the state as in torch.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Steps every group that has parameters; returns the result of ``closure``, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"]:
                self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        before = group.get("step", 0)
        group["step"] = before + 1
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        moments = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq")]
        self._update(group, before, params, *moments)

    def _update(
        self,
        group: dict[str, Any],
        before: int,
        params: list[torch.Tensor],
        exp_avgs: list[torch.Tensor],
        exp_avg_sqs: list[torch.Tensor],
    ) -> None:
        """Runs torch's own step on these parameters and float32 moments, in place, after ``before`` steps."""
        beta1, beta2 = group["betas"]
        # On GPUs fused, in one pass; torch's foreach implementation copies a moment of all parameters at once.
        devices = {p.device for p in params}
        fused = len(devices) == 1 and params[0].is_cuda
        device = params[0].device if fused else "cpu"
        steps = torch.full((len(params),), float(before), dtype=torch.float32, device=device)
        adam(
            params,
            [p.grad for p in params if p.grad is not None],
            exp_avgs,
            exp_avg_sqs,
            [],
            list(steps.unbind()),  # separate tensors: torch's function increments each
            foreach=False if fused else None,
            fused=fused or None,
            decoupled_weight_decay=self.adam_w_mode,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def patches() -> PatchList:
    """Returns the patches that make Megatron-Core use this Adam; none on a GPU machine that has a fused one."""
    found = PatchList("megatron.core.optimizer")
    if (compat.has_cuda() and compat.has_te()) or compat.uses_apex("amp_C"):
        return found
    for name, replacement in {
        "Adam": Adam,
        "USING_PYTORCH_OPTIMIZER": False,
        "distrib_optimizer.Adam": Adam,
        "distrib_optimizer.HAVE_APEX_OR_TE": True,
        "distrib_optimizer.USING_TE_OPTIMIZER": True,
    }.items():
        why = "torch's AdamW counts steps per parameter, and the distributed optimizer cannot resume with it"
        found.replace(name, replacement, why)
    return found
