"""Adapters of PEFT in live models: merged weights, and adapters alone.

A merge adds in float32, tensor by tensor, and rounds once: to the codes of a stream, or to the model's dtype.

    LoRA    W + scaling * B A
    DoRA    m / |W + scaling * B A| * (W + scaling * B A)        norms over each output row

W is what the layer multiplies: frozen codes dequantized exactly, else the weight. PEFT's own ``merge`` computes the same
in the weight's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..params.fp8_parameter import Fp8Parameter


@dataclass
class PlainModel:
    """A model as it is without PEFT's wrappers.

    Attributes:
        model: the inner model.
        modules: name in the unwrapped model -> module; for an adapted linear, its base layer.
        adapted: name of a linear -> PEFT's layer around it, if adapters change its weight.
    """

    model: Any
    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    adapted: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any) -> PlainModel:
        """The plain model inside any model. Raises ValueError for active adapters other than LoRA or DoRA on linears."""
        prompt = getattr(model, "active_peft_config", None) if hasattr(model, "peft_config") else None
        if getattr(prompt, "is_prompt_learning", False):
            raise ValueError(
                f"{type(prompt).__name__} adds tokens and changes no weight: there is nothing to merge."
            )
        get_base = getattr(model, "get_base_model", None)
        inner = model if get_base is None or not hasattr(model, "peft_config") else get_base()
        found = cls(inner)
        found._add("", inner)
        return found

    def _add(self, name: str, module: Any) -> None:
        if hasattr(module, "original_module") and hasattr(module, "modules_to_save"):
            active = [one for one in module.active_adapters if one in module.modules_to_save]
            replaced = bool(active) and not module.disable_adapters
            self._add(name, module.modules_to_save[active[0]] if replaced else module.original_module)
            return
        if hasattr(module, "base_layer") and hasattr(module, "active_adapters"):
            if adapters := _active(module):
                _check(name, module, adapters)
                self.adapted[name] = module
            self._add(name, module.base_layer)
            return
        self.modules[name] = module
        for child, inside in module.named_children():
            self._add(f"{name}.{child}" if name else child, inside)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Name -> parameter, each once, and persistent buffers. An adapted weight is another than the one it shares."""
        found: dict[str, torch.Tensor] = {}
        seen: set[tuple[int, str | None]] = set()
        for path, module in self.modules.items():
            own = {**module._parameters, **module._buffers}
            for name, tensor in own.items():
                key = id(tensor), path if path in self.adapted else None
                if tensor is None or key in seen or name in module._non_persistent_buffers_set:
                    continue
                seen.add(key)
                found[f"{path}.{name}" if path else name] = tensor
        return found

    def exact(self, name: str, weight: torch.Tensor) -> torch.Tensor | None:
        """The float32 value [N, K] of an adapted or frozen weight; None for others, which are what they are."""
        layer = self.adapted.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if layer is None and not isinstance(weight, Fp8Parameter):
            return None
        whole = whole_tensor(weight)
        value = whole.dequantize(torch.float32) if isinstance(whole, Fp8Parameter) else whole.float()
        return value if layer is None else merge_adapters(layer, value)


def whole_tensor(tensor: Any) -> torch.Tensor:
    """A parameter without gradients, gathered if FSDP shards it. Collective then."""
    found: torch.Tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()
    return found


@torch.no_grad()
def merge_adapters(layer: Any, base: torch.Tensor) -> torch.Tensor:
    """float32 [N, K]: a base weight, float32 [N, K], with the active adapters of PEFT's layer, in their order."""
    weight = base
    for adapter in _active(layer):
        a, b = (whole_tensor(part[adapter].weight).float() for part in (layer.lora_A, layer.lora_B))
        delta = b @ a * layer.scaling[adapter]  # [N, r] @ [r, K]
        weight = weight + delta
        if adapter in layer.lora_magnitude_vector:
            magnitude = whole_tensor(layer.lora_magnitude_vector[adapter].weight).float()
            norm = torch.linalg.vector_norm(base + delta, dim=1)
            weight = (magnitude / norm)[:, None] * weight
    return weight


def _active(layer: Any) -> list[str]:
    """The adapters, of any kind, that act in the layer's forward and that its base weight does not hold already."""
    if layer.disable_adapters:
        return []
    names = {adapter for part in layer.adapter_layer_names for adapter in getattr(layer, part)}
    return [one for one in layer.active_adapters if one in names and one not in layer.merged_adapters]


def _check(name: str, layer: Any, adapters: list[str]) -> None:
    """Raises ValueError unless these adapters are LoRA or DoRA on a linear, without a bias of their own."""
    kind = type(layer)
    is_linear = (kind.__module__, kind.__name__) == ("peft.tuners.lora.layer", "Linear")
    for adapter in adapters:
        variant = type(layer.lora_variant.get(adapter)).__name__ if is_linear else kind.__name__
        known = is_linear and variant in ("NoneType", "DoraLinearVariant") and not layer.fan_in_fan_out
        if not known or layer.lora_bias[adapter]:
            raise ValueError(
                f"{name} has the adapter {adapter!r} ({kind.__name__}, {variant}), and LoRA and DoRA on linears are"
                " merged here, without lora_bias: call merge_and_unload() and give that model (after"
                " megatron_fp8.nn.dequantize_weights(model, torch.float32), if its weights are frozen codes)."
            )


def adapter_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the active adapter alone, under the names of PEFT's adapter_model.safetensors.

    Raises ValueError: the model is not one of PEFT with one active adapter, or that is merged or disabled.
    """
    wrapped = hasattr(model, "peft_config") and hasattr(
        model, "get_base_model"
    )  # transformers' add_adapter: other names
    active = model.active_adapters if wrapped else None
    if not isinstance(active, (list, tuple)) or len(active) != 1:
        raise ValueError(
            f"format='lora' of {type(model).__name__} with active adapters {active!r}: a model of get_peft_model with one"
            " active adapter is needed (set_adapter)."
        )
    for layer in model.modules():
        if (
            active[0] in getattr(layer, "merged_adapters", ())
            or getattr(layer, "disable_adapters", None) is True
        ):
            raise ValueError(
                f"format='lora': the adapter {active[0]!r} is merged or disabled: an engine would add it to a weight that"
                " has it, or that training does not change: call unmerge_adapter() or enable_adapter_layers()."
            )
    from peft import get_peft_model_state_dict

    state: Mapping[str, torch.Tensor] = get_peft_model_state_dict(
        model, adapter_name=active[0], save_embedding_layers=False
    )
    return ((name, whole_tensor(tensor)) for name, tensor in state.items())
