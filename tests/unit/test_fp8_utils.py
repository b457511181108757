"""Megatron's names: recipes from a config, contexts, first and last layers."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8 import Format, quantize
from megatron_fp8.fp8_utils import (
    dequantize_fp8_tensor,
    get_fp8_align_size,
    get_fp8_context,
    get_fp8_recipe,
    is_first_last_bf16_layer,
    is_float8tensor,
)
from megatron_fp8.nn import Fp8Linear, convert_to_fp8, fp8_step
from megatron_fp8.plan.autocast_state import (
    AutocastState,
    LayerBeingBuilt,
    current_autocast_state,
    layer_being_built,
)
from megatron_fp8.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
)


def config(**fields: Any) -> SimpleNamespace:
    """Megatron-Core's fields with its defaults, and nothing of this package's own."""
    defaults = {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_margin": 0,
        "fp8_interval": 1,
        "fp8_amax_history_len": 1,
        "fp8_amax_compute_algo": "most_recent",
        "fp8_quantizer_factory": None,
        "num_layers": 6,
        "first_last_layers_bf16": False,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
    }
    return SimpleNamespace(**{**defaults, **fields})


H, E = Format.HYBRID, Format.E4M3
STOCHASTIC = {"fp8_stochastic_rounding": True}
RECIPES = [
    ({}, DelayedScaling(0, H, 1, "most_recent", 1)),
    ({"fp8_margin": 2, "fp8_interval": 3, "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"},
     DelayedScaling(2, H, 16, "max", 3)),
    ({"fp8": "e4m3", "fp8_amax_epsilon": 0.25, **STOCHASTIC},
     DelayedScaling(0, E, 1, "most_recent", 1, 0.25, stochastic_rounding=True)),
    ({"fp8_recipe": "tensorwise"}, Float8CurrentScaling(fp8_format=H)),
    ({"fp8_recipe": "tensorwise", "fp8_pow2_scales": True, "fp8_margin": 1}, Float8CurrentScaling(True, H, 1)),
    ({"fp8_recipe": "tensorwise", "fp8_pow2_scales": False, "fp8_amax_epsilon": 1e-4, **STOCHASTIC},
     Float8CurrentScaling(False, H, amax_epsilon=1e-4, stochastic_rounding=True)),
    ({"fp8_recipe": "rowwise"}, Float8RowwiseScaling(H)),
    ({"fp8_recipe": "rowwise", "fp8": "e4m3", "fp8_amax_epsilon": 1e-4, **STOCHASTIC},
     Float8RowwiseScaling(E, 1e-4, stochastic_rounding=True)),
    ({"fp8_recipe": "blockwise", "fp8_pow2_scales": True}, Float8BlockScaling(H)),
    ({"fp8_recipe": "blockwise", "fp8_pow2_scales": False, "fp8": "e4m3"}, Float8BlockScaling(E, True)),
    ({"fp8_recipe": "blockwise", "fp8_amax_epsilon": 1e-4, **STOCHASTIC},
     Float8BlockScaling(H, amax_epsilon=1e-4, stochastic_rounding=True)),
    ({"fp8_recipe": "mxfp8"}, MXFP8BlockScaling(H)),
    ({"fp8_recipe": "mxfp8", "fp8": "e4m3", **STOCHASTIC}, MXFP8BlockScaling(E, True)),
    ({"fp8_recipe": SimpleNamespace(value="mxfp8"), "fp8": SimpleNamespace(value="e4m3")}, MXFP8BlockScaling(E)),
]  # fmt: skip


@pytest.mark.parametrize(
    "fields, expected", RECIPES, ids=lambda v: type(v).__name__ if not isinstance(v, dict) else ""
)
def test_recipe_of_a_config(fields, expected):
    recipe = get_fp8_recipe(config(**fields))
    assert recipe == expected and type(recipe) is type(expected)


def test_another_recipe_with_the_configs_options():
    assert get_fp8_recipe(config(fp8="e4m3"), "mxfp8") == MXFP8BlockScaling(E)
    assert get_fp8_recipe(config(fp8_recipe="mxfp8", fp8_margin=1), "tensorwise") == Float8CurrentScaling(
        margin=1
    )


def test_custom_recipe_is_imported(monkeypatch):
    module = ModuleType("somebodys_quantizers")
    module.factory = lambda role: MXFP8BlockScaling() if role != "weight" else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebodys_quantizers", module)
    fields = {"fp8_recipe": "custom", "fp8_quantizer_factory": "somebodys_quantizers.factory"}
    recipe = get_fp8_recipe(config(**fields))
    assert recipe == CustomRecipe(module.factory)
    assert recipe.rule("weight") is None and recipe.rule("input") == MXFP8BlockScaling().rule("input")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"fp8": None}, "set fp8='hybrid' or fp8='e4m3'"),
        ({"fp8_recipe": "nvfp5"}, r"'nvfp5' is unknown: use one of delayed, tensorwise, rowwise"),
        ({"fp8_recipe": "nvfp4"}, "set fp4='e2m1' and fp8=None"),
        ({"fp8": "e5m2"}, "e5m2"),
        ({"fp8_recipe": "mxfp8", "fp8_margin": 1}, r"fp8_margin=1 does not exist for fp8_recipe='mxfp8'"),
        ({"fp8_margin": -1}, "margin -1"),
        ({"fp8_amax_compute_algo": "mean"}, "'mean'"),
        ({"fp8_amax_epsilon": -1.0}, "amax_epsilon -1.0"),
        ({"fp8_recipe": "custom"}, "give fp8_quantizer_factory as 'package.module.function'"),
        ({"fp8_recipe": "custom", "fp8_quantizer_factory": "factory"}, "'factory' is not an import path"),
        ({"fp8_recipe": "custom", "fp8_quantizer_factory": "no.such"}, "'no.such' cannot be imported"),
        ({"fp8_recipe": "custom", "fp8_quantizer_factory": "math.pi"}, "not callable"),
    ],
)
def test_what_a_config_cannot_ask_for(fields, message):
    with pytest.raises(ValueError, match=message):
        get_fp8_recipe(config(**fields))


def test_first_and_last_layers_against_counting():
    for layers in (1, 2, 5):
        for start in range(layers + 2):
            for end in range(layers + 2):
                for on in (True, False):
                    asked = config(
                        num_layers=layers,
                        first_last_layers_bf16=on,
                        num_layers_at_start_in_bf16=start,
                        num_layers_at_end_in_bf16=end,
                    )
                    last = range(layers)[layers - end if end < layers else 0 :]
                    kept = {*range(layers)[:start], *last} if on else set()
                    found = {n for n in range(-2, layers) if is_first_last_bf16_layer(asked, n)}
                    assert found == kept, (layers, start, end, on)


BF16_LAYERS = {
    "first_last_layers_bf16": True,
    "num_layers_at_start_in_bf16": 2,
    "num_layers_at_end_in_bf16": 1,
}


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_context_while_building(recipe):
    asked = config(fp8_recipe=recipe, **BF16_LAYERS)
    for layer in range(6):
        with get_fp8_context(asked, layer, is_init=True):
            built = layer_being_built()
            assert built is not None and built.number == layer
            assert (built.bf16_reason is not None) == (layer in (0, 1, 5))
        assert layer_being_built() is None and current_autocast_state() == AutocastState()
    with get_fp8_context(asked, 5, is_init=True):
        assert layer_being_built() == LayerBeingBuilt(
            5, "first_last_layers_bf16: the first 2 and last 1 layers stay in BF16"
        )
    with get_fp8_context(asked, is_init=True):
        assert layer_being_built() == LayerBeingBuilt(-1, None)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_context_while_running(recipe):
    """Megatron asks for a context for every layer of every forward, delayed scaling once around all of them."""
    asked = config(fp8_recipe=recipe, **BF16_LAYERS)
    for _ in range(2):
        with get_fp8_context(asked):
            assert current_autocast_state() == AutocastState()
            for layer in range(6):
                with get_fp8_context(asked, layer):
                    assert (current_autocast_state().off == "unplanned") == (layer in (0, 1, 5))
                    assert layer_being_built() is None
            assert current_autocast_state() == AutocastState()


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_of_ones_own_stay_in_bf16_where_the_context_says_so(recompute):
    """Fp8Linear knows no layer number: in a first or last layer's context it is the plain linear, to the bit."""
    asked = config(fp8_recipe="delayed", **BF16_LAYERS)
    layers = convert_to_fp8(
        torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6))), "delayed", skip=[]
    )
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    total = torch.zeros(())
    for number, layer in enumerate(layers):
        with get_fp8_context(asked), get_fp8_context(asked, number):
            y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
        assert torch.equal(y, plain) == (number in (0, 1, 5)), number
        total = total + y.sum()
    total.backward()
    assert fp8_step(layers).fp8_gemms == 3 * (4 if recompute else 3)
    warm = [layer.fp8_site.quantizers["input"].slot.warm for layer in layers]
    assert warm == [False, False, True, True, True, False], "scales come from what ran in FP8"


def test_compiled_code_enters_contexts_of_layers():
    asked = config(fp8_recipe="rowwise", **BF16_LAYERS)
    layer, x = Fp8Linear(32, 32, recipe="rowwise"), torch.ones(8, 32)

    def block(x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for number in (0, 3):
            with get_fp8_context(asked, number):
                found.append(layer(x))
        return found

    torch._dynamo.reset()
    first, middle = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(first, torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert torch.equal(middle, layer(x)) and not torch.equal(middle, first)


def test_context_without_fp8_does_nothing():
    for is_init in (True, False):
        context = get_fp8_context(config(fp8=None, **BF16_LAYERS), 0, is_init)
        for _ in range(2):
            with context:
                assert layer_being_built() is None and current_autocast_state() == AutocastState()


def test_align_size():
    assert get_fp8_align_size("mxfp8") == get_fp8_align_size(SimpleNamespace(value="mxfp8")) == 32
    assert {
        get_fp8_align_size(name) for name in ("delayed", "tensorwise", "rowwise", "blockwise", "custom")
    } == {16}


def test_tensors():
    x = torch.tensor([[1.0, -3.0]], dtype=torch.bfloat16)
    quantized = quantize(x, MXFP8BlockScaling(), "input")
    assert is_float8tensor(quantized) and not is_float8tensor(x) and not is_float8tensor(None)
    assert_same_bytes(dequantize_fp8_tensor(quantized), x)
