"""FP8 training state of a model, saved apart from the model's state dict.

A converted model's ``state_dict()`` has the keys of the unconverted one, so weights load strictly in both
directions. The FP8 state dict has the rest that a bit-exact resume needs: amax histories, scales and the
iteration number.

Rejected: module buffers. BF16 checkpoints would then lack keys, and FP8 checkpoints would have too many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from ..numerics.scaling import compute_amax
from ..state.arena import SAVED_PARTS, Slot, check_saved, load_slots, saved_slots
from .linear import Fp8Layer
from .module_lookup import fp8_linears, groups_of
from .sites import delayed_slots


def fp8_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All FP8 state that carries over to the next iteration, except the weights.

    Returns:
        CPU tensors, for torch.save or safetensors. Call it between two iterations (after ``fp8_step``). Each
        FP8 linear has ``NAME.iteration`` (int64 []). With delayed scaling each operand has
        ``NAME.ROLE.scale`` (float32 [1]), ``NAME.ROLE.amax_history`` (float32 [length]) and
        ``NAME.ROLE.warm`` (uint8 [1]), and the linear has ``NAME.weight.amax`` (float32 [1]): the weight's
        amax if training may have left it beyond its scale, else 0; Inf for computed or sharded weights. All
        data-parallel ranks have the same values. Delayed scaling of ``fp8_autocast``'s recipes has keys
        ``NAME@RECIPE.ROLE...``, with RECIPE as its repr.

    Raises ValueError: the model has no FP8 linear.
    """
    saved = {}
    for name, linear in _linears(model):
        saved[f"{name}.iteration"] = torch.tensor(linear.fp8_group.iteration, dtype=torch.int64, device="cpu")
        own, by_recipe = _own_slots(name, linear), linear.fp8_sites.histories(linear.fp8_device)
        saved.update(saved_slots(own))
        for label, histories in by_recipe.items():
            saved.update({f"{name}@{label}.{key}": tensor for key, tensor in histories.items()})
        if own or by_recipe:
            saved[f"{name}.weight.amax"] = _saved_amax(linear)
    return saved


def load_fp8_state_dict(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Load the result of ``fp8_state_dict``; training then continues bit for bit.

    Load before or after the weights. If the history length differs, the latest entries that fit are used. A
    recipe of ``fp8_autocast`` gets its history at its first call; recipes missing from the saved state start
    without a history. Until the next iteration ends, evaluation uses the delayed scale for a weight up to its saved amax,
    or, without ``NAME.weight.amax``, up to twice the scale's range.

    Raises:
        ValueError: the model has no FP8 linear, or its FP8 linears or recipes differ from the saved ones.
    """
    linears = dict(_linears(model))
    expected = {f"{name}.iteration" for name in linears}
    for name, linear in linears.items():
        expected |= {f"{slot}.{part}" for slot in _own_slots(name, linear) for part in SAVED_PARTS}
    by_recipe = _by_recipe(linears, saved.keys() - expected)
    for name, labels in by_recipe.items():
        for label, keys in labels.items():
            slots = {key.rpartition(".")[0] for key in keys}
            expected |= {f"{name}@{label}.{slot}.{part}" for slot in slots for part in SAVED_PARTS}
    expected |= saved.keys() & {f"{name}.weight.amax" for name in linears}
    check_saved(expected, saved, "Convert the model as the saved one was")  # before anything changes
    for name, linear in linears.items():
        linear.fp8_group.resume(int(saved[f"{name}.iteration"]))
    for name, linear in linears.items():
        own, amax = _own_slots(name, linear), saved.get(f"{name}.weight.amax")
        if own or by_recipe[name]:
            linear.fp8_group.trained_weights.record_saved_amax(
                linear.fp8_name, math.inf if amax is None else float(amax)
            )
        load_slots(own, saved)
        histories = {
            label: {key: saved[f"{name}@{label}.{key}"] for key in keys}
            for label, keys in by_recipe[name].items()
        }
        linear.fp8_sites.load_histories(linear.fp8_device, histories)


def _by_recipe(linears: Iterable[str], keys: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """Linear -> recipe's label -> ROLE.PART, from saved keys of the form NAME@RECIPE.ROLE.PART."""
    found: dict[str, dict[str, list[str]]] = {name: {} for name in linears}
    for key in keys:
        head, ends, rest = key.rpartition(").")  # a label is a repr, so it ends with ")"
        owners = [name for name in found if head.startswith(f"{name}@")]
        if ends and owners:
            name = max(owners, key=len)
            found[name].setdefault(f"{head.removeprefix(f'{name}@')})", []).append(rest)
    return found


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, Fp8Layer]]:
    for linear in fp8_linears(model).values():
        states = linear.fp8_group.states.values()
        # Autograd graphs hold the sites replaced here.
        if linear.fp8_group.is_standalone and any(state.activity.awaits_backward for state in states):
            raise RuntimeError(
                "linears that were not converted together are in their first iteration: save and load FP8 state before"
                " it, or call fp8_step(model) at its end first"
            )
    for group in groups_of(model):
        for linear in group.linears:
            group.make_sites(linear.fp8_device)
    yield from fp8_linears(model).items()


def _saved_amax(linear: Fp8Layer) -> torch.Tensor:
    """float32 [1] on the CPU: the weight's amax if training may have left it beyond its scale, else 0; Inf if
    unknown."""
    if (
        linear.weight_parameter is None
        or hasattr(linear.weight_parameter, "to_local")
        or linear.fp8_device.type == "meta"
    ):
        return torch.full((1,), math.inf, device="cpu", dtype=torch.float32)
    facts = linear.fp8_sites.weight_facts()
    if facts.limit == 1:
        return torch.zeros(1, device="cpu", dtype=torch.float32)
    return compute_amax(linear.matrix.detach()).clamp(max=facts.amax).view(1).cpu()


def _own_slots(name: str, linear: Fp8Layer) -> dict[str, Slot]:
    return {f"{name}.{role}": slot for role, slot in delayed_slots(linear.fp8_site).items()}
