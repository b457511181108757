"""The state of delayed scaling as plain tensors by name, apart from the model's state dict.

A converted model's ``state_dict()`` has the keys of the unconverted one, so weights load either way, strictly. Here is
what a training needs besides, to go on bit for bit: amax histories, scales and the number of the iteration.

Rejected: buffers of the modules. Every BF16 checkpoint would then lack keys, and every FP8 one have too many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ..linear.site import GemmSite
from ..state.arena import Slot
from ..state.saved import check_saved, load_slots, saved_slots
from .find import fp8_linears, groups_of
from .linear import Fp8Layer


def fp8_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Everything that training in FP8 remembers from one iteration to the next, except the weights.

    Returns:
        Tensors on the CPU, to be saved with torch.save or safetensors, between two iterations (after ``fp8_step``). For
        each FP8 linear ``NAME.iteration`` (int64 []); with delayed scaling also, for each of its operands,
        ``NAME.ROLE.scale`` (float32 [1]), ``NAME.ROLE.amax_history`` (float32 [length]) and ``NAME.ROLE.warm`` (uint8
        [1]). The same on all data-parallel ranks. Histories of recipes that ``fp8_autocast`` put in place are not kept.

    Raises ValueError: the model has no FP8 linear.
    """
    saved = {}
    for name, linear in _linears(model):
        saved[f"{name}.iteration"] = torch.tensor(linear.fp8_group.iteration, dtype=torch.int64, device="cpu")
        saved.update(saved_slots(_delayed_slots(name, linear.fp8_site)))
    return saved


def load_fp8_state_dict(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Put back what ``fp8_state_dict`` gave: training goes on with the bits it would have had.

    The order does not matter: before or after the weights are loaded. Of a history of another length the latest entries
    that fit are taken.

    Raises:
        ValueError: the model has no FP8 linear, or its FP8 linears or recipes are not those that were saved.
    """
    check_saved(
        fp8_state_dict(model), saved, "Convert the model as the saved one was"
    )  # before anything changes
    for name, linear in _linears(model):
        linear.fp8_group.resume(int(saved[f"{name}.iteration"]))
        load_slots(_delayed_slots(name, linear.fp8_site), saved)


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, Fp8Layer]]:
    for group in groups_of(model):
        for linear in group.linears:
            group.make_sites(linear.weight.device)
    yield from fp8_linears(model).items()


def _delayed_slots(name: str, site: GemmSite) -> dict[str, Slot]:
    return {
        f"{name}.{role}": quantizer.slot
        for role, quantizer in site.quantizers.items()
        if quantizer is not None and quantizer.slot.delayed is not None
    }
