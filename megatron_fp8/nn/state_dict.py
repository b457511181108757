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
        for key, slot in _delayed_slots(name, linear.fp8_site):
            for part, tensor in slot.arena.saved_slot(slot).items():
                saved[f"{key}.{part}"] = tensor.cpu()
    return saved


def load_fp8_state_dict(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Put back what ``fp8_state_dict`` gave: training goes on with the bits it would have had.

    The order does not matter: before or after the weights are loaded. Of a history of another length the latest entries
    that fit are taken.

    Raises:
        ValueError: the model has no FP8 linear, or its FP8 linears or recipes are not those that were saved.
    """
    expected = fp8_state_dict(model)
    missing, unknown = sorted(expected.keys() - saved.keys()), sorted(saved.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            f"the saved FP8 state is of another model or recipe: {len(missing)} entries are missing"
            f" ({', '.join(missing[:3])}), {len(unknown)} are unknown ({', '.join(unknown[:3])}). Convert the model as"
            " the saved one was, or start with cold scales by not loading this"
        )
    for key, tensor in saved.items():  # all of it before anything changes
        fits = (
            tensor.ndim == 1 and tensor.numel() > 0 if key.endswith(".amax_history") else tensor.numel() == 1
        )
        if not fits:
            raise ValueError(f"the saved FP8 state is damaged: {key} has the shape {tuple(tensor.shape)}")
    for name, linear in _linears(model):
        linear.fp8_group.resume(int(saved[f"{name}.iteration"]))
        for key, slot in _delayed_slots(name, linear.fp8_site):
            slot.arena.load_slot(slot, {part: saved[f"{key}.{part}"] for part in slot.arena.saved_slot(slot)})


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, Fp8Layer]]:
    for group in groups_of(model):
        for linear in group.linears:
            group.make_sites(linear.weight.device)
    yield from fp8_linears(model).items()


def _delayed_slots(name: str, site: GemmSite) -> Iterator[tuple[str, Slot]]:
    for role, quantizer in site.quantizers.items():
        if quantizer is not None and quantizer.slot.delayed is not None:
            yield f"{name}.{role}", quantizer.slot
