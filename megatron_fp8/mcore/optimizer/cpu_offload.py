"""optimizer_cpu_offload: Megatron-Core's HybridDeviceOptimizer in checkpoints, and its masters after a load.

Under the distributed optimizer it steps float32 masters, this rank's pieces, of FP8 and BF16 weights alike: gradients go
to the CPU, its Adam steps a copy of the master there, and the copy comes back. So codes are cast from the same masters as
without it. Only CPU and GPU Adam differ in their last bits, and so do numbers where another weight is offloaded
(optimizer_offload_fraction below 1 offloads the first ones, and FP8 weights come in another order).

Megatron-Core stores and loads this state only where the masters are made by it, from BF16 weights. Here

* moments exist from the start, as for other optimizers (``create_moments``);
* its state's ``step`` and second master are no part of a checkpoint;
* a loaded master is copied to the CPU, where the next step would use the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from ..patches.patching import PatchList
from .adam import Adam

patches = PatchList()
_HYBRID = "optimizer.cpu_offloading.hybrid_optimizer.HybridDeviceOptimizer"


def create_moments(optimizer: HybridDeviceOptimizer, config: Any = None) -> None:
    """Creates Adam's moments as zeros where no step was taken. Megatron-Core's ``init_state_fn``."""
    for sub in optimizer.sub_optimizers:
        counts_in_group = isinstance(sub, Adam)
        for group in sub.param_groups:
            for param in group["params"]:
                if sub.state[param]:
                    continue
                state = sub.state[param]
                if not counts_in_group:
                    state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
    optimizer._sync_sub_optimizers_state_to_hdo()


def _hybrids(optimizer: Any) -> Iterator[HybridDeviceOptimizer]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            yield part.optimizer


def steps_taken(optimizer: Any) -> set[int]:
    """The numbers of steps of Megatron-Core's optimizer that is offloaded, or of any such in a chain."""
    found = set()
    for hybrid in _hybrids(optimizer):
        for sub in hybrid.sub_optimizers:
            found |= {int(group["step"]) for group in sub.param_groups if "step" in group}
            found |= {int(state["step"]) for state in sub.state.values() if "step" in state}
    return found


def set_steps(optimizer: Any, step: int) -> None:
    """Sets the number of steps that offloaded optimizers have taken.

    A load leaves a step in their own groups too, from which each step would set the others back.
    """
    for hybrid in _hybrids(optimizer):
        for group in hybrid.param_groups:
            group.pop("step", None)
        for sub in hybrid.sub_optimizers:
            for group in sub.param_groups:
                if isinstance(sub, Adam):
                    group["step"] = step
            for state in sub.state.values():
                if "step" in state:
                    state["step"].fill_(step)


@patches.wrap(
    "optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
    "it asks a checkpoint for a step and a second master, and leaves the CPU's copy of the master as it was",
)
@torch.no_grad()
def set_master(original: Callable[..., None], self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    """Copies a loaded master and moments, also to the CPU's copy."""
    hybrid = self.optimizer
    if not isinstance(hybrid, HybridDeviceOptimizer):
        original(self, model_param, tensors)
        return
    group, order = self.model_param_group_index_map[model_param]
    master = hybrid.param_groups[group]["params"][order]
    held = {"param": master, **hybrid.state[master]}
    for name in held.keys() - {"step", "master_param"}:
        held[name].copy_(tensors[name])
    inner = hybrid.state[master]["master_param"] = hybrid.param_to_inner_param[master]
    if inner is not master:
        inner.data.copy_(master)


@patches.wrap(
    f"{_HYBRID}._update_fp32_params_by_new_state", "it looks for masters of masters that are float32"
)
def update_own_masters(original: Callable[[Any], None], self: Any) -> None:
    """Updates only the masters that it made itself."""
    whole = self.state
    try:
        self.state = {param: state for param, state in whole.items() if param in self.param_to_fp32_param}
        original(self)
    finally:
        self.state = whole
