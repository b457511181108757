"""The state dict of delayed scaling, apart from the model's.

A converted model's ``state_dict()`` has the keys of the unconverted one, so weights load either way, strictly. Here is
what a training needs besides, to go on bit for bit: amax histories, scales and the number of the iteration.

Rejected: buffers of the modules. Every BF16 checkpoint would then lack keys, and every FP8 one have too many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from ..numerics.scaling import compute_amax
from ..state.arena import Slot
from ..state.saved import SAVED_PARTS, check_saved, load_slots, saved_slots
from .find import fp8_linears, groups_of
from .linear import Fp8Layer
from .sites import delayed_slots


def fp8_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Everything that training in FP8 remembers from one iteration to the next, except the weights.

    Returns:
        Tensors on the CPU, to be saved with torch.save or safetensors, between two iterations (after ``fp8_step``). For
        each FP8 linear ``NAME.iteration`` (int64 []); with delayed scaling also, for each of its operands,
        ``NAME.ROLE.scale`` (float32 [1]), ``NAME.ROLE.amax_history`` (float32 [length]) and ``NAME.ROLE.warm`` (uint8
        [1]), and ``NAME.weight.amax`` (float32 [1]): how large the weight is, if training may have left it beyond its
        scale, else 0; Inf of weights that are computed or sharded. The same on all data-parallel ranks. Delayed
        scaling that ``fp8_autocast`` put in place is kept as ``NAME@RECIPE.ROLE...``, RECIPE being its repr.

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
            saved[f"{name}.weight.amax"] = _amax_left(linear)
    return saved


def load_fp8_state_dict(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Put back what ``fp8_state_dict`` gave: training goes on with the bits it would have had.

    The order does not matter: before or after the weights are loaded. Of a history of another length the latest entries
    that fit are taken. A recipe of ``fp8_autocast``'s takes its own when it is first called; one that the saved state
    lacks starts cold. Until the next iteration ends, evaluation saturates a weight beyond its scale only if it is no
    larger than the one that was saved; of a state without ``NAME.weight.amax``, if it is up to twice beyond it.

    Raises:
        ValueError: the model has no FP8 linear, or its FP8 linears or recipes are not those that were saved.
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
            linear.fp8_group.left.note_saved(linear.fp8_name, math.inf if amax is None else float(amax))
        load_slots(own, saved)
        histories = {
            label: {key: saved[f"{name}@{label}.{key}"] for key in keys}
            for label, keys in by_recipe[name].items()
        }
        linear.fp8_sites.load_histories(linear.fp8_device, histories)


def _by_recipe(linears: Iterable[str], keys: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """Linear -> recipe's label -> ROLE.PART, of the saved keys that are so named."""
    found: dict[str, dict[str, list[str]]] = {name: {} for name in linears}
    for key in keys:
        head, ends, rest = key.rpartition(").")  # a label is a repr, and ends so
        owners = [name for name in found if head.startswith(f"{name}@")]
        if ends and owners:
            name = max(owners, key=len)
            found[name].setdefault(f"{head.removeprefix(f'{name}@')})", []).append(rest)
    return found


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, Fp8Layer]]:
    for linear in fp8_linears(model).values():
        if linear.fp8_group.is_lone and linear.fp8_group.awaits:  # graphs hold sites that are replaced here
            raise RuntimeError(
                "linears that were not converted together are in their first iteration: save and load FP8 state before"
                " it, or call fp8_step(model) at its end first"
            )
    for group in groups_of(model):
        for linear in group.linears:
            group.make_sites(linear.fp8_device)
    yield from fp8_linears(model).items()


def _amax_left(linear: Fp8Layer) -> torch.Tensor:
    """float32 [1], on the CPU: how large training left a weight that may lie beyond its scale, else 0; Inf: unknown."""
    if linear.held is None or hasattr(linear.held, "to_local") or linear.fp8_device.type == "meta":
        return torch.full((1,), math.inf, device="cpu", dtype=torch.float32)
    known = linear.fp8_sites.known()
    if known.limit == 1:
        return torch.zeros(1, device="cpu", dtype=torch.float32)
    return compute_amax(linear.matrix.detach()).clamp(max=known.amax).view(1).cpu()


def _own_slots(name: str, linear: Fp8Layer) -> dict[str, Slot]:
    return {f"{name}.{role}": slot for role, slot in delayed_slots(linear.fp8_site).items()}
