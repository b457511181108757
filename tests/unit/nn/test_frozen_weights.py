"""freeze_weights: codes alone, what they multiply in both directions, what they take, and back to high precision."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.backends import emulated
from megatron_fp8.inference import model_bytes
from megatron_fp8.nn import (
    Fp8Config,
    convert_to_fp8,
    dequantize_weights,
    enable_fp8_all_gather,
    fp8_autocast,
    fp8_step,
    freeze_weights,
)
from megatron_fp8.params.fp8_parameter import Fp8Parameter
from megatron_fp8.quantizer import quantize
from megatron_fp8.recipe import Float8CurrentScaling, NVFP4BlockScaling
from tests.support.experts import hidden, layer, routing

IN, WIDTH, OUT = 160, 256, 96
SCALES = {  # bytes of both weights' scales
    "delayed": 2 * 4,
    "tensorwise": 2 * 4,
    "rowwise": (WIDTH + OUT) * 4,
    "blockwise": (2 * 2 + 1 * 2) * 4,
    "mxfp8": WIDTH * 5 + OUT * 8,
    "nvfp4": WIDTH // 16 * 10 + OUT // 16 * 16,
    "nvfp4 1x16": WIDTH * 10 + OUT * 16,
}
VALUES = IN * WIDTH + WIDTH * OUT
RECIPES = tuple(SCALES)
DERIVED = {"rowwise": 0.04, "mxfp8": 0.04, "nvfp4 1x16": 0.15}
"""Largest error of dgrad by derived codes; without derivation the products' rounding alone is left."""


def recipe_of(name: str) -> Any:
    if not name.startswith("nvfp4"):
        return name
    return NVFP4BlockScaling(disable_stochastic_rounding=True, disable_2d_quantization=name != "nvfp4")


def made(name: str = "tensorwise", **fields: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, WIDTH), nn.GELU(), nn.Linear(WIDTH, OUT)).bfloat16()
    for linear in (model[0], model[2]):  # so that codes derived from rounded values differ
        linear.weight.data *= torch.randn(len(linear.weight), 1).exp()
    return convert_to_fp8(model, config=Fp8Config(recipe=recipe_of(name), **fields), skip=[])


def tokens(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, IN, generator=generator).bfloat16().requires_grad_()


@pytest.mark.parametrize("name", RECIPES)
def test_loaded_weights_keep_the_memory_that_a_graph_reads(name: str) -> None:
    models = [freeze_weights(made(name)) for _ in range(2)]
    frozen: Any = models[0][2].weight
    stored = frozen._stored
    read = [*stored.codes, *stored.scale_invs, stored.amax]  # NVFP4's amax is one of its scales
    models[1][2].weight.data.mul_(3.0)
    models[0].load_state_dict(models[1].state_dict())
    other = models[1][2].weight._stored
    assert_all_same_bytes(read, [*other.codes, *other.scale_invs, other.amax])


@pytest.mark.parametrize("name", RECIPES)
def test_a_value_takes_one_byte_or_half_of_one(name: str) -> None:
    model, plain = freeze_weights(made(name)), 2 * (WIDTH + OUT)
    codes = VALUES // 2 if name.startswith("nvfp4") else VALUES
    assert model_bytes(model) == codes + SCALES[name] + plain
    assert [p.requires_grad for p in model.parameters()] == [False, True, False, True]


@pytest.mark.parametrize("name", RECIPES)
def test_forward_and_dgrad_multiply_the_codes(name: str) -> None:
    """fprop has the bytes of the model before; dgrad those of these codes, or of codes derived in float32."""
    model, x = made(name), tokens()
    wanted = model(x).detach()
    freeze_weights(model)
    linear, dy = model[0], torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert_same_bytes(model(x), wanted)
    (dx,) = torch.autograd.grad(linear(x), x, dy)

    recipe = linear.fp8_config.resolved_recipe
    rowwise = linear.weight.quantized.rowwise
    if name in DERIVED:
        columnwise = quantize(rowwise.dequantize(torch.float32), recipe, "weight", "columnwise").columnwise
    else:
        columnwise = rowwise.transposed()
    of_dy = quantize(dy, recipe, "grad_output").rowwise
    assert_same_bytes(dx, emulated.gemm(of_dy, columnwise, out_dtype=torch.bfloat16))
    exact = of_dy.dequantize().double() @ rowwise.dequantize().double()
    assert (dx - exact).norm() < DERIVED.get(name, 0.003) * exact.norm()


@pytest.mark.parametrize("name", RECIPES)
def test_no_wgrad_and_no_cast_of_the_weights(name: str) -> None:
    model = freeze_weights(made(name))
    for seed in (1, 2):
        model(tokens(seed)).sum().backward()
        counts = fp8_step(model)
    derived = 2 if name in DERIVED else 0
    assert (counts.fp8_gemms, counts.hp_gemms, counts.casts) == (2 + 2, 0, 2 + 2 + derived)
    assert model[0].weight.grad is None and model[0].bias.grad is not None


@pytest.mark.parametrize("name", ["delayed", "mxfp8", "nvfp4 1x16"])
def test_recomputed_activations_and_copies_of_saved_ones_change_no_bit(name: str) -> None:
    model, found = freeze_weights(made(name)), []
    for way in ("plain", "recomputed", "copied"):
        x = tokens()
        copies = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor)
        with copies if way == "copied" else torch.enable_grad():
            y = checkpoint(model, x, use_reentrant=False) if way == "recomputed" else model(x)
        y.float().square().sum().backward()
        found.append([y.detach(), x.grad])
    assert_all_same_bytes(found[0], found[1])
    assert_all_same_bytes(found[0], found[2])


def test_high_precision_uses_what_the_codes_mean_and_another_recipe_is_refused() -> None:
    model, x = freeze_weights(made("rowwise"))[0], tokens()
    with fp8_autocast(enabled=False):
        assert_same_bytes(model(x), nn.functional.linear(x, model.weight.dequantize(), model.bias))
    with (
        fp8_autocast(recipe="mxfp8"),
        pytest.raises(RuntimeError, match="another one would have other codes"),
    ):
        model(x)


def test_a_dgrad_by_another_rule_reads_the_same_weight() -> None:
    """Codes of fprop's rule are decoded for a dgrad in high precision, and derived for one by another recipe."""
    dy = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    for override, recipe in (("bf16", None), ("tensorwise", Float8CurrentScaling())):
        model, x = freeze_weights(made("blockwise", overrides={"*:dgrad": override})), tokens()
        (dx,) = torch.autograd.grad(model[0](x), x, dy)
        if recipe is None:
            assert_same_bytes(dx, dy @ model[0].weight.dequantize())
            continue
        side = quantize(model[0].weight.dequantize(torch.float32), recipe, "weight", "columnwise").columnwise
        of_dy = quantize(dy, recipe, "grad_output").rowwise
        assert_same_bytes(dx, emulated.gemm(of_dy, side, out_dtype=torch.bfloat16))


def test_back_to_high_precision_and_a_copy_of_its_own() -> None:
    model = freeze_weights(made("rowwise"))
    values = [model[i].weight.dequantize(torch.float32) for i in (0, 2)]
    copied = copy.deepcopy(model)
    dequantize_weights(model, torch.float32)
    for i, value in zip((0, 2), values, strict=True):
        assert type(model[i].weight) is nn.Parameter and not model[i].weight.requires_grad
        assert_same_bytes(model[i].weight.detach(), value)
        assert_same_bytes(copied[i].weight.dequantize(torch.float32), value)
    with pytest.raises(ValueError, match="no weight that freeze_weights made codes"):
        dequantize_weights(model)


def test_training_mode_says_nothing_and_a_changed_weight_warns() -> None:
    model = freeze_weights(made())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train()
        model.load_state_dict(copy.deepcopy(model).state_dict())
        model[0].weight.data.copy_(torch.ones(WIDTH, IN))
    for change in (lambda w: w.data.add_(1), lambda w: setattr(w, "data", torch.ones(WIDTH, IN).bfloat16())):
        with pytest.warns(UserWarning, match="loses most of a small update"):
            change(model[0].weight)


def test_experts_are_frozen_one_by_one_and_stacked_again() -> None:
    model = convert_to_fp8(layer("gpt_oss"), "mxfp8", skip=["proj"])
    keys = {name: tensor.shape for name, tensor in model.state_dict().items()}
    x = hidden().requires_grad_()
    before = model(x, *routing()).detach()
    freeze_weights(model)
    y = model(x, *routing())
    assert_same_bytes(y, before)
    y.float().square().sum().backward()
    assert x.grad.isfinite().all() and x.grad.any() and model.proj.weight.grad is not None
    linears = model.experts.fp8_linears()
    values = sum(linear.weight.numel() for linear in linears)
    assert sum(codes.nbytes for linear in linears for codes in linear.weight.codes) == values
    dequantize_weights(model)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == keys
    assert not any(isinstance(p, Fp8Parameter) for p in model.parameters())
    assert (model(x, *routing()) - before).norm() < 0.02 * before.norm()


def test_one_weight_of_two_linears_has_one_set_of_codes() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).bfloat16()
    model[1].weight = model[0].weight
    freeze_weights(convert_to_fp8(model, "mxfp8"))
    assert model[0].weight is model[1].weight and model_bytes(model) == 64 * 64 + 64 * 2
    dequantize_weights(model)
    assert model[0].weight is model[1].weight


def test_gpt2s_conv1d_stays() -> None:
    conv = pytest.importorskip("transformers").pytorch_utils.Conv1D(64, 64)
    model = freeze_weights(convert_to_fp8(nn.Sequential(nn.Linear(64, 64), conv), "tensorwise", skip=[]))
    assert isinstance(model[0].weight, Fp8Parameter) and type(model[1].weight) is nn.Parameter


class WithDora(nn.Module):
    """A linear beside DoRA's magnitudes, under PEFT's name."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(64, 64)
        self.lora_magnitude_vector = nn.ModuleDict({"default": nn.Identity()})


def late() -> nn.Module:
    return convert_to_fp8(WithDora())


def gathered() -> nn.Module:
    model = made()
    enable_fp8_all_gather(model)
    return model


REFUSED = {
    "nothing converted": (lambda: nn.Linear(4, 4), "call convert_to_fp8"),
    "twice": (lambda: freeze_weights(made()), "frozen already"),
    "DoRA first": (late, "before get_peft_model"),
    "gathered as codes": (gathered, "needs the whole weight"),
    "meta": (lambda: made().to("meta"), "load the weights first"),
    "weights in BF16": (lambda: made(quantize_weights=False), "no FP8 weight to freeze"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_changes(case: str) -> None:
    build, message = REFUSED[case]
    model = build()
    weights = [id(p) for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        freeze_weights(model)
    assert [id(p) for p in model.parameters()] == weights
