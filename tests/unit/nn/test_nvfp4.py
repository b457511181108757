"""NVFP4 in converted models: training, mixes with other recipes, compiled code, inference."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.nn import (
    Fp8Config,
    convert_to_fp8,
    fp8_autocast,
    fp8_matmul,
    fp8_state_dict,
    fp8_step,
    load_fp8_state_dict,
)
from megatron_fp8.numerics import nvfp4
from megatron_fp8.recipe import CustomRecipe, NVFP4BlockScaling

NEAREST = NVFP4BlockScaling(disable_stochastic_rounding=True)


def model(config: Fp8Config | None = None, recipe: Any = "nvfp4") -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(70, 128), nn.GELU(), nn.Linear(128, 40))
    return convert_to_fp8(layers, None if config else recipe, config=config, skip=[])


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(50, 70, generator=generator), torch.randn(50, 40, generator=generator)


def losses(layers: Any, steps: int = 20) -> list[float]:
    x, y = data()
    optimizer = torch.optim.AdamW(layers.parameters(), 1e-2)
    found = []
    for _ in range(steps):
        loss = (layers(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        if hasattr(layers, "fp8_report"):
            fp8_step(layers)
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_it_learns():
    plain = losses(nn.Sequential(*[copy.deepcopy(m) for m in _plain()]))
    found = losses(model())
    assert found[-1] < 0.2 * found[0] and abs(found[0] - plain[0]) < 0.01 * plain[0]
    assert losses(model()) == found  # stochastic rounding is reproducible


def _plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 128), nn.GELU(), nn.Linear(128, 40))


def test_gradients_are_products_of_decoded_operands():
    """The transform cancels where both operands have it, and is left out where one has not."""
    for overrides in (
        {},
        {"*:input": "mxfp8"},
        {"*:wgrad": "mxfp8"},
        {"*:grad_output": "bf16"},
        {"*:input": "bf16"},
    ):
        config = Fp8Config(recipe=NEAREST, overrides=overrides)
        layer = convert_to_fp8(nn.Sequential(nn.Linear(70, 40, bias=False)), config=config, skip=[])
        x, dy = data()
        layer(x).backward(dy)
        exact = dy.double().t() @ x.double()
        error = (layer[0].weight.grad - exact).norm() / exact.norm()
        assert error < 0.19, (overrides, error)  # two operands in four bits: 0.095 each


@pytest.mark.parametrize("site", ["nvfp4", "no transform"])
def test_compiled_is_eager(site):
    recipe = (
        NEAREST if site == "nvfp4" else NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
    )
    x, dy = data()
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = convert_to_fp8(nn.Sequential(nn.Linear(70, 40)), recipe, skip=[])
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.backward(dy)
        found.append([y, leaf.grad, layer[0].weight.grad, layer[0].bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_half_a_byte_of_the_input_is_saved():
    sizes = []

    def pack(saved: torch.Tensor) -> torch.Tensor:
        sizes.append((tuple(saved.shape), saved.dtype))
        return saved

    layer, (x, _) = model(), data()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = layer[0](x)
    assert ((70, 32), torch.float4_e2m1fn_x2) in sizes  # 64 = 50 tokens in whole blocks, two a byte
    assert ((70, 4), torch.float8_e4m3fn) in sizes and all(shape != (50, 70) for shape, _ in sizes)
    y.backward(torch.randn_like(y))


def test_inference_has_the_training_forwards_bits_in_half_a_byte():
    layers, (x, _) = model(), data()
    losses(layers, 2)
    wanted = layers.eval()(x)
    prepared = prepare_for_inference(layers)
    assert torch.equal(prepared(x), wanted) and torch.equal(copy.deepcopy(prepared)(x), wanted)
    weight = prepared[0].weight
    assert weight.shape == (128, 70)
    assert [t.nbytes for t in weight.stored_tensors()] == [128 * 80 // 2, 128 * 80 // 256]
    assert prepared.state_dict()["0.weight"].shape == (128, 70)
    again = model()
    again.load_state_dict(prepared.state_dict())
    # Decoded values in 16x16 blocks are cast to themselves where the block's largest is 6 times its scale.
    assert (again(x) - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize("recipe", ["nvfp4", "tensorwise"])
def test_an_iteration_that_is_begun_again_draws_the_same_bits(recipe):
    """After a reload of its own start: a site that counted its backwards on had others."""
    layers, (x, y) = model(recipe=recipe), data()

    def gradients() -> list[torch.Tensor]:
        layers.zero_grad()
        with fp8_autocast(recipe=NVFP4BlockScaling()) if recipe != "nvfp4" else nullcontext():
            (layers(x) - y).square().mean().backward()
        return [p.grad.clone() for p in layers.parameters()]

    gradients()
    fp8_step(layers)
    saved = fp8_state_dict(layers)
    expected, second_microbatch = gradients(), gradients()
    assert not all(map(torch.equal, expected, second_microbatch))
    load_fp8_state_dict(layers, saved)  # an iteration that did not end
    assert all(map(torch.equal, expected, gradients()))
    fp8_step(layers)
    load_fp8_state_dict(layers, saved)
    assert all(map(torch.equal, expected, gradients()))


def test_the_report_names_the_recipe_of_each_gemm_where_they_differ():
    overrides = {"*:dgrad": "mxfp8", "*:wgrad": "bf16", "2": "bf16"}
    rows = model(Fp8Config(recipe="nvfp4", overrides=overrides)).fp8_report.rows
    assert [row.runs for row in rows] == ["fprop nvfp4, dgrad mxfp8, wgrad float32, emulated", "float32"]
    (row, _) = model(Fp8Config(recipe="nvfp4", overrides={"0:input": "mxfp8"})).fp8_report.rows
    assert row.runs == "fprop mxfp8 and nvfp4, dgrad nvfp4, wgrad mxfp8 and nvfp4, emulated"


def test_a_linear_without_a_weight_stays_as_it_is():
    """compressed-tensors leaves nn.Linear with codes alone."""
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    del layers[1]._parameters["weight"]
    reasons = {row.name: row.reason for row in convert_to_fp8(layers, "nvfp4").fp8_report.rows}
    assert reasons["1"].startswith("has no weight: another library has quantized it")


def test_a_format_for_an_operand_that_has_its_own():
    with pytest.raises(ValueError, match="'e4m3' is a format, and NVFP4 has its own: name a recipe"):
        model(Fp8Config(recipe="nvfp4", overrides={"*:input": "e4m3"}))


def test_a_factory_can_take_its_rules():
    recipe = CustomRecipe(lambda role: NVFP4BlockScaling() if role != "grad_output" else None)
    assert losses(model(recipe=recipe), 5)[-1] < 1.0


def test_matmul():
    a, b = (torch.randn(shape, requires_grad=True) for shape in ((30, 50), (50, 20)))
    y = fp8_matmul(a, b, NEAREST)
    y.backward(torch.ones_like(y))
    assert (y - a @ b).norm() < 0.17 * (a @ b).norm()
    assert (b.grad - a.sum(0)[:, None]).norm() < 0.2 * b.grad.norm()


def test_nan_makes_the_step_unhealthy():
    layers, (x, y) = model(), data()
    x[3, 5] = float("nan")
    (layers(x) - y).square().mean().backward()
    assert fp8_step(layers).nonfinite > 0
    assert nvfp4.BLOCK == 16
