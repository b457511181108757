"""Megatron's names for FP4: recipes from a config, contexts, tensors."""

from __future__ import annotations

import inspect

import pytest
import torch
from megatron.core import fp4_utils as megatron_fp4

from megatron_fp8 import fp4_utils, mcore, quantize
from megatron_fp8.fp8_utils import get_fp8_align_size, get_fp8_recipe
from megatron_fp8.plan.autocast_state import LayerBeingBuilt, layer_being_built
from megatron_fp8.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.support.megatron_settings import make

FP4 = {"fp4": "e2m1"}


@pytest.mark.parametrize("name", fp4_utils.__all__)
def test_names_and_signatures_are_megatrons(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)) for module in (fp4_utils, megatron_fp4))
    assert list(ours.parameters) == list(theirs.parameters)
    assert [p.default for p in ours.parameters.values()] == [p.default for p in theirs.parameters.values()]


def factory(role: str) -> NVFP4BlockScaling | MXFP8BlockScaling:
    return MXFP8BlockScaling() if role == "grad_output" else NVFP4BlockScaling()


def test_recipe_and_options() -> None:
    assert fp4_utils.get_fp4_recipe(make(**FP4)) == NVFP4BlockScaling()
    for option in ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"):
        config = make(**FP4, **{f"fp4_{option}": True})
        assert fp4_utils.get_fp4_recipe(config) == NVFP4BlockScaling(**{option: True})
        mixed = make(fp8="hybrid", fp8_overrides={"*": "nvfp4"}, **{f"fp4_{option}": True})
        assert get_fp8_recipe(mixed, "nvfp4") == NVFP4BlockScaling(**{option: True})
    custom = make(**FP4, fp4_recipe="custom", fp4_quantizer_factory=f"{__name__}.factory")
    assert fp4_utils.get_fp4_recipe(custom) == CustomRecipe(factory)


def test_fp8_recipes_of_an_fp4_model_have_their_own_formats() -> None:
    """E4M3, but for the two whose default is hybrid; the config's options are theirs too."""
    config = make(**FP4, fp8_amax_epsilon=0.5, fp8_overrides={"*:dgrad": "tensorwise"})
    assert get_fp8_recipe(config, "mxfp8") == MXFP8BlockScaling()
    assert get_fp8_recipe(config, "tensorwise") == Float8CurrentScaling(amax_epsilon=0.5)
    delayed = get_fp8_recipe(config, "delayed")
    assert isinstance(delayed, DelayedScaling) and delayed.amax_history_len == 1


def test_context_knows_layers() -> None:
    """Megatron enters it around each layer of an FP4 model, as fp8_utils' around those of an FP8 one."""
    config = make(**FP4, first_last_layers_bf16=True)
    with fp4_utils.get_fp4_context(config, 0, is_init=True):
        first = layer_being_built()
    with fp4_utils.get_fp4_context(config, 1, is_init=True):
        second = layer_being_built()
    assert first == LayerBeingBuilt(0, "first_last_layers_bf16: the first 1 and last 1 layers stay in BF16")
    assert second == LayerBeingBuilt(1, None)


def test_tensors() -> None:
    x = torch.randn(32, 48, dtype=torch.bfloat16)
    fp4, fp8 = quantize(x, NVFP4BlockScaling(), "input"), quantize(x, MXFP8BlockScaling(), "input")
    assert [fp4_utils.is_nvfp4tensor(t) for t in (fp4, fp8, x)] == [True, False, False]
    assert torch.equal(fp4_utils.dequantize_fp4_tensor(fp4), fp4.dequantize())


def test_align_size() -> None:
    """16 bytes of codes: 32 values."""
    sizes = {fp4_utils.get_fp4_align_size(name) for name in ("nvfp4", "custom")} | {
        get_fp8_align_size("nvfp4")
    }
    assert sizes == {32}


def test_install_replaces_megatrons() -> None:
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.moe import moe_utils

    originals = {name: getattr(megatron_fp4, name) for name in fp4_utils.__all__}
    was_installed = mcore.is_installed()
    mcore.install()
    try:
        assert megatron_fp4.get_fp4_recipe(make(**FP4)) == NVFP4BlockScaling()
        assert moe_utils.get_fp4_align_size is fp4_utils.get_fp4_align_size
        assert transformer_block.get_fp4_context is megatron_fp4.get_fp4_context
        with transformer_block.get_fp4_context(make(**FP4), 2, is_init=True):
            assert layer_being_built() == LayerBeingBuilt(2, None)
        assert megatron_fp4.is_nvfp4tensor(quantize(torch.ones(16, 16), NVFP4BlockScaling(), "input"))
    finally:
        if not was_installed:
            mcore.uninstall()
            assert {name: getattr(megatron_fp4, name) for name in fp4_utils.__all__} == originals
