"""Fp8Config: what is said, what is refused, and what runs because of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from benchmarks.support.compare import assert_all_same_bytes
from megatron_fp8 import Format, quantize
from megatron_fp8.nn import DEFAULT_SKIP, Fp8Config, Fp8Linear, convert_to_fp8, fp8_step
from megatron_fp8.nn.module_lookup import groups_of
from megatron_fp8.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
)
from tests.support.size_table import make_table


@pytest.mark.parametrize(
    ("fields", "recipe"),
    [
        ({}, Float8CurrentScaling()),
        ({"recipe": "delayed", "margin": 2, "epsilon": 1e-6}, DelayedScaling(margin=2, amax_epsilon=1e-6)),
        ({"recipe": "rowwise", "backward_format": "e5m2"}, Float8RowwiseScaling(fp8_format=Format.HYBRID)),
        ({"recipe": "tensorwise", "backward_format": "e4m3"}, Float8CurrentScaling(fp8_format=Format.E4M3)),
        ({"granularity": "tensor"}, Float8CurrentScaling()),
        ({"granularity": "channel"}, Float8RowwiseScaling()),
        ({"granularity": "row"}, Float8RowwiseScaling()),
        ({"granularity": "block", "epsilon": 0.5}, Float8BlockScaling(amax_epsilon=0.5)),
        ({"granularity": "mx"}, MXFP8BlockScaling()),
        ({"recipe": DelayedScaling(amax_history_len=3)}, DelayedScaling(amax_history_len=3)),
    ],
)
def test_which_recipe_it_means(fields, recipe):
    assert Fp8Config(**fields).resolved_recipe == recipe


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recipe": "fp4"}, "'fp4' is unknown"),
        ({"recipe": "custom"}, "give megatron_fp8.recipe.CustomRecipe"),
        ({"recipe": 3}, "3 is not a recipe"),
        ({"granularity": "column"}, "granularity='column' is unknown: use one of 'tensor'"),
        ({"recipe": "mxfp8", "granularity": "mx"}, "say the same thing twice"),
        ({"forward_format": "e5m2"}, "no hardware multiplies E5M2"),
        ({"backward_format": "e3m4"}, "backward_format='e3m4': use 'e5m2'"),
        ({"recipe": "rowwise", "margin": 1}, "margin=1 does not exist for 'rowwise'"),
        ({"margin": -1}, "margin -1"),
        ({"recipe": "mxfp8", "epsilon": 1e-3}, "epsilon=0.001 does not exist for 'mxfp8'"),
        ({"epsilon": float("nan")}, "a float32 number >= 0"),
        ({"recipe": MXFP8BlockScaling(), "backward_format": "e5m2"}, "with its own"),
        (
            {"recipe": CustomRecipe(lambda role: None), "quantize_weights": False},
            "return None for weight there",
        ),
        ({"quantize_weights": False, "quantize_gradients": False}, "weight and grad_output not quantized"),
        ({"quantize_weights": 1}, "use True or False"),
        ({"fallback": "silent"}, "fallback='silent': use 'error' or 'warn'"),
        ({"min_features": 0}, "min_features=0"),
        ({"keep_columnwise": "no"}, "keep_columnwise='no'"),
        ({"fast_accumulation": "dgrad"}, "fast_accumulation='dgrad': use 'fprop', 'all' or 'none'"),
        ({"skip": [None]}, "skip: None is neither"),
        ({"skip": ""}, "skip: '' is neither"),
    ],
)
def test_what_it_refuses(fields, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Fp8Config(**fields)


def test_frozen_and_comparable():
    config = Fp8Config(skip="blocks.*")
    assert config.skip == ("blocks.*",) and Fp8Config().skip == DEFAULT_SKIP
    assert config == Fp8Config(skip=["blocks.*"]) != Fp8Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.margin = 1


@pytest.mark.parametrize(
    ("recipe", "flag", "role", "fp8"),
    [
        ("delayed", "quantize_weights", "weight", "wgrad"),
        ("mxfp8", "quantize_activations", "input", "dgrad"),
        ("rowwise", "quantize_gradients", "grad_output", "fprop"),
    ],
)
def test_a_role_that_is_not_quantized_leaves_one_gemm_in_fp8(recipe, flag, role, fp8):
    config = Fp8Config(recipe=recipe, **{flag: False})
    linear = Fp8Linear(64, 32, config=config)
    linear(torch.randn(48, 64, requires_grad=True)).square().mean().backward()
    plan = linear.fp8_site.plan
    assert plan.rules[role] is None
    assert [gemm for gemm, precision in plan.gemms.items() if precision == "fp8"] == [fp8]
    assert f"{role} not quantized as asked" in plan.reason
    counts = fp8_step(linear)
    assert (counts.fp8_gemms, counts.hp_gemms) == (1, 2)


def test_weights_only_in_high_precision_uses_the_dequantized_input():
    """fprop with an unquantized weight multiplies it by the input that came back from codes (numerics)."""
    torch.manual_seed(0)
    linear = Fp8Linear(64, 32, bias=False, config=Fp8Config(recipe="mxfp8", quantize_weights=False))
    x = torch.randn(16, 64)
    seen = quantize(x, MXFP8BlockScaling(), "input").dequantize().double()
    exact = seen @ linear.weight.double().t()
    torch.testing.assert_close(linear(x).double(), exact, rtol=1e-5, atol=1e-6)


def test_shapes_that_do_not_pay_by_a_measured_table(tmp_path):
    times = {(64, 128, 32): 0.7, (128, 64, 32): 1.3}
    table = make_table(tmp_path / "table.json", times, Float8CurrentScaling())
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    convert_to_fp8(model, config=Fp8Config(size_filter=table))
    assert model.fp8_report.converted == ["0"]
    assert "does not pay: K 128 x N 64 at 32 tokens takes 1.30 x BF16's time" in model.fp8_report.skipped["1"]
    with pytest.raises(ValueError, match="was measured with recipe 'tensorwise', and this is 'mxfp8'"):
        convert_to_fp8(nn.Linear(64, 128), config=Fp8Config(recipe="mxfp8", size_filter=table))


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_codes_for_dgrad_can_be_made_again(recipe):
    """The same bits; between forward and backward a byte a value less where they are others than the forward's."""

    def trained(keep: bool) -> tuple[int, list[torch.Tensor], str]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False))
        convert_to_fp8(model, config=Fp8Config(recipe, keep_columnwise=keep))
        weight = model[0].weight
        found = []
        for step in range(2):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
            saved: dict[int, int] = {}

            def note(kept: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
                storage = kept.untyped_storage()
                saved[storage.data_ptr()] = storage.nbytes()
                return kept

            with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
                y = model(x)
            y.square().sum().backward()
            saved.pop(weight.untyped_storage().data_ptr(), None)  # its own memory, which is there anyway
            found += [y.detach(), x.grad, weight.grad.clone()]
            fp8_step(model)
        return sum(size for size in saved.values() if size >= 32 * 64), found, str(model.fp8_report)

    both = (kept, bits, _), (again, bits_again, _) = trained(True), trained(False)
    assert_all_same_bytes(bits_again, bits)
    assert kept - again == (64 * 96 if recipe in ("rowwise", "mxfp8") else 0)
    assert ["keep_columnwise=False" in said for *_, said in both] == [False, True]


def test_fast_accumulation_reaches_the_gemms():
    model = convert_to_fp8(torch.nn.Linear(32, 32), config=Fp8Config(fast_accumulation="all"))
    model(torch.randn(32, 32))
    (group,) = groups_of(model)
    assert [state.fast_gemms for state in group.states.values()] == [("fprop", "dgrad", "wgrad")]
