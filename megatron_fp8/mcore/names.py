"""Global module names: layers over all stages, experts over all expert-parallel ranks.

Each rank numbers its own layers and experts from 0. Names that are shown, matched or saved have the numbers of the
whole model, so that a name means the same linear on every rank and in every layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

_LAYER = re.compile(r"(?:.*?\.)??layers\.\d+(?=\.|$)")
_EXPERT = re.compile(r"(.*\blocal_experts\.)(\d+)(?=\.|$)")
_IN_CHECKPOINTS, _IN_MODELS = ".experts.experts.", ".experts.local_experts."


def in_whole_model(model: Any) -> Callable[[str], str]:
    """Returns a function from a name in ``model`` (a module's or parameter's) to the name in the whole model."""
    return _in_whole_model(model.named_modules())


def _in_whole_model(modules: Iterable[tuple[str, Any]]) -> Callable[[str], str]:
    layers, first = {}, {}
    for name, module in modules:
        found = _LAYER.match(name)
        if found and found[0] == name and hasattr(module, "layer_number"):  # Megatron-Core counts from 1
            layers[name] = f"{name.rpartition('.')[0]}.{module.layer_number - 1}"
        elif "local_experts" in module._modules and hasattr(module, "ep_group"):
            first[f"{name}.local_experts.".removeprefix(".")] = module.ep_group.rank() * len(
                module.local_experts
            )

    def whole(name: str) -> str:
        layer, expert = _LAYER.match(name), _EXPERT.match(name)
        if expert and expert[1] in first:
            name = f"{expert[1]}{first[expert[1]] + int(expert[2])}{name[expert.end() :]}"
        if layer and layer[0] in layers:
            name = f"{layers[layer[0]]}{name[layer.end() :]}"
        return name

    return whole


def named_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """A model chunk's modules under their names in the whole model."""
    modules = list(model.named_modules())
    whole = _in_whole_model(modules)
    return ((whole(name), module) for name, module in modules)


def named_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """A model chunk's parameters under their names in the whole model."""
    whole = in_whole_model(model)
    return ((whole(name), parameter) for name, parameter in model.named_parameters())


def expert_name(name: str, expert: int) -> str:
    """Returns the name of the same part in another expert of the layer; any other name unchanged."""
    found = _EXPERT.match(name)
    return f"{found[1]}{expert}{name[found.end() :]}" if found else name


def name_of_key(key: str) -> str:
    """Returns the model's name for a checkpoint key: Megatron-Core's checkpoints name experts differently."""
    return key.replace(_IN_CHECKPOINTS, _IN_MODELS)


def split_expert(name: str) -> tuple[str, int]:
    """Splits an expert's name into the part common to the layer's experts and the number; other names: itself and 0."""
    found = _EXPERT.match(name)
    return (found[1], int(found[2])) if found else (name, 0)
