"""Names in the whole model, whichever layers and experts a rank has."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from megatron_fp8.mcore import names


class Layer(nn.Module):
    """A layer, called by Megatron-Core's numbers from 1, of two experts that follow ``experts_before`` others."""

    def __init__(self, number: int, experts_before: int = 0):
        super().__init__()
        self.layer_number = number
        self.linear_proj = nn.Linear(1, 1, bias=False)
        self.experts = nn.Module()
        self.experts.local_experts = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        self.experts.ep_group = SimpleNamespace(rank=lambda: experts_before // 2)


def stage() -> nn.Module:
    """The second stage of a pipeline and the third of the expert parallel ranks: layers 6 and 7, experts 4 and 5."""
    model = nn.Module()
    model.layers = nn.ModuleList([Layer(7, 4), Layer(8, 4)])
    model.layers[1].layers = nn.ModuleList([nn.Linear(1, 1, bias=False)])
    model.output_layer = nn.Linear(1, 1, bias=False)
    return model


def test_layers_and_experts_have_the_whole_models_numbers() -> None:
    model = stage()
    model.extra = nn.Linear(1, 1, bias=False)
    found = [name for name, _ in names.named_parameters(model)]
    experts = [f"layers.{layer}.experts.local_experts.{e}.weight" for layer in (6, 7) for e in (4, 5)]
    assert {name for name in found if "experts" in name} == set(experts)
    assert "layers.6.linear_proj.weight" in found and "layers.7.layers.0.weight" in found
    assert {"output_layer.weight", "extra.weight"} <= set(found) and len(found) == len(set(found)) == 9


def test_a_name_leads_to_the_module_that_has_it_here() -> None:
    model = stage()
    modules = dict(names.named_modules(nn.ModuleDict({"decoder": model})))
    assert modules["decoder.layers.6.experts.local_experts.5"] is model.layers[0].experts.local_experts[1]
    assert modules["decoder.layers.7"] is model.layers[1] and "decoder.layers.0" not in modules


def test_a_lone_layer_of_experts_and_modules_without_numbers() -> None:
    experts = Layer(1, 6).experts
    assert [name for name, _ in names.named_parameters(experts)] == [
        f"local_experts.{e}.weight" for e in (6, 7)
    ]
    plain = nn.Sequential(nn.Linear(1, 1, bias=False))
    assert [name for name, _ in names.named_modules(plain)] == ["", "0"]
    assert [parameter.shape for _, parameter in names.named_parameters(plain)] == [torch.Size([1, 1])]


def test_the_parts_of_a_name() -> None:
    fc1 = "decoder.layers.3.mlp.experts.local_experts.12.linear_fc1"
    assert names.split_expert(fc1) == ("decoder.layers.3.mlp.experts.local_experts.", 12)
    assert names.split_expert("decoder.layers.3.mlp.linear_fc1") == ("decoder.layers.3.mlp.linear_fc1", 0)
    assert names.expert_name(fc1, 0) == "decoder.layers.3.mlp.experts.local_experts.0.linear_fc1"
    assert names.expert_name("decoder.layers.3.mlp.linear_fc1", 5) == "decoder.layers.3.mlp.linear_fc1"
    key = "decoder.layers.3.mlp.experts.experts.12.linear_fc1.fp8_state.weight.scale"
    assert names.name_of_key(key) == f"{fc1}.fp8_state.weight.scale"
    assert names.name_of_key("decoder.layers.3.mlp.router.weight") == "decoder.layers.3.mlp.router.weight"
