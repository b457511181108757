"""The FP8 column- and row-parallel linears on their own, and how a model's linears become sites."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from benchmarks.support.fp8_gpt import fp8_config
from benchmarks.support.gpt import gpt_config
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.fp8_utils import get_fp8_context
from megatron_fp8.linear.amax_recorder import count_linear
from megatron_fp8.mcore.config.transformer_config import IterationEnd
from megatron_fp8.mcore.patches.fp8_hooks import fp8_checkpoint
from megatron_fp8.mcore.runtime import state_of
from megatron_fp8.mcore.sites import resolve
from megatron_fp8.plan.autocast_state import LayerBeingBuilt, current_autocast_state, fp8_disabled
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.mcore_linears import make_linear, random_input

ONE = Layout()


def outcome(linear: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x.grad = None
    y, _ = linear(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in linear.parameters())]


def as_megatrons() -> list[bool]:
    equal = []
    with model_parallel():
        for kind in ("column", "row"):
            x = random_input(8, 2, 64)
            theirs = outcome(make_linear(fp8_config(ONE, None), kind, plain=True), x)
            ours = outcome(make_linear(fp8_config(ONE, None), kind), x)
            fp8 = outcome(make_linear(fp8_config(ONE, "mxfp8"), kind), x)
            equal += [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]
            assert not any(torch.equal(a, b) for a, b in zip(fp8[:3], theirs[:3], strict=True))
            assert all(
                torch.allclose(a, b, rtol=0.1, atol=0.1 * float(b.abs().max()))
                for a, b in zip(fp8, theirs, strict=True)
            )
    return equal


def test_planned_in_bf16_is_megatrons_to_the_bit(ranks: RankPool) -> None:
    """Output, input gradient, weight and bias gradient."""
    assert ranks(1).run(as_megatrons)[0] == [True] * 8


def elsewhere(recipe: str) -> list[str]:
    """What is said of an input, then of a weight on meta, by both linears in training and in evaluation."""
    said = []
    with model_parallel():
        for kind in ("column", "row"):
            for training in (True, False):
                for place in ("input", "weight"):
                    linear = make_linear(fp8_config(ONE, recipe), kind).train(training)
                    x = random_input(8, 2, 64).detach()
                    x = x.to("meta") if place == "input" else x
                    if place == "weight":
                        linear.to("meta")
                    with pytest.raises(ValueError) as error:
                        linear(x)
                    said.append(str(error.value))
    return said


def test_an_input_on_another_device_is_refused(ranks: RankPool) -> None:
    said = ranks(1).run(elsewhere, "delayed")[0]
    for of_input, of_weight in zip(said[::2], said[1::2], strict=True):
        assert "the input is on meta, the weight on cpu" in of_input
        assert "the input is on cpu, the weight on meta" in of_weight


def odd_calls() -> None:
    with model_parallel():
        config = fp8_config(ONE, "mxfp8")
        linear = make_linear(config, skip_bias_add=True)
        y, bias = linear(random_input(3, 1, 64))
        assert bias is linear.bias and y.is_contiguous() and y.shape == (3, 1, 96)
        y, _ = linear(torch.zeros(0, 64, dtype=torch.bfloat16, requires_grad=True))
        y.sum().backward()
        assert y.shape == (0, 96) and not linear.weight.grad.any()
        linear.weight.requires_grad_(False)
        x = random_input(5, 64)
        linear(x)[0].sum().backward()
        assert x.grad is not None
        for value in (1.0, 0.5, 0.0):  # a loop of one's own sees every write
            linear.weight.data.fill_(value)
            linear.bias.data.zero_()
            assert float(linear(torch.ones(2, 64, dtype=torch.bfloat16))[0].max()) == 64.0 * value
        with pytest.raises(ValueError, match="last dimension must be 64"):
            linear(random_input(3, 32))


def test_empty_input_frozen_weight_separate_bias(ranks: RankPool) -> None:
    ranks(1).run(odd_calls)


# ------------------------------------------------------------------------------------------------------------------ sites


def naming() -> None:
    at = LayerBeingBuilt(7, None)
    with model_parallel():
        cpu, ends = torch.device("cpu"), LayerBeingBuilt(0, "first of all")
        config = fp8_config(ONE, "mxfp8", fp8_overrides={"*.proj": "bf16", "*.layers.0.back": "blockwise"})
        assert resolve(config, "decoder.layers.0.qkv", ends, cpu).reason == "first of all"
        assert resolve(config, "decoder.layers.0.back", ends, cpu).as_dict()["recipe"] == "blockwise"
        assert resolve(config, "decoder.layers.1.proj", at, cpu).reason == "fp8_overrides '*.proj'"
        plan = resolve(config, "decoder.layers.1.qkv", at, cpu)
        assert plan.layer == 7 and plan.reason.startswith("fp8 recipe of the config; backend ")
        assert resolve(fp8_config(ONE, None), "any", at, cpu).reason == "fp8 is off"
        no_wgrad = resolve(fp8_config(ONE, "mxfp8", fp8_wgrad=False), "any", at, cpu)
        assert no_wgrad.gemms == {"fprop": "fp8", "dgrad": "fp8", "wgrad": "bf16"}
        assert state_of(config) is state_of(copy.deepcopy(config)) and state_of(config) is not state_of(
            fp8_config(ONE, None)
        )


def test_names_and_plans(ranks: RankPool) -> None:
    ranks(1).run(naming)


def test_high_precision_gemms_are_counted_as_they_run() -> None:
    for (x_grad, w_grad), count in {
        (True, True): 3,
        (False, True): 2,
        (True, False): 2,
        (False, False): 1,
    }.items():
        state = Fp8State()
        x, w = torch.randn(4, 8, requires_grad=x_grad), torch.randn(3, 8, requires_grad=w_grad)
        y = x @ w.t()
        count_linear(state, x, w, y, training=True)
        assert state.counts.hp_gemms == 1
        if y.requires_grad:
            y.sum().backward()
        assert state.counts.hp_gemms == count


# ------------------------------------------------------------------------------------------------------------------ hooks


def plain_configs() -> None:
    from megatron.core.pipeline_parallel import schedules

    with model_parallel():
        for fp8 in ({"fp8": "hybrid", "fp8_recipe": "delayed"}, {}):
            config = gpt_config(ONE, **fp8)
            config.finalize_model_grads_func = print
            model = torch.nn.Module()
            model.config = config
            for _ in range(2):
                assert schedules.get_model_config(model) is config
            function = config.finalize_model_grads_func
            assert function == (IterationEnd(print) if fp8 else print), (
                "wrapped once, and only where FP8 is on"
            )


def test_a_plain_config_ends_its_iterations(ranks: RankPool) -> None:
    ranks(1).run(plain_configs)


def checkpointed() -> None:
    reasons, scales = [], []

    def region(x: torch.Tensor, scale: float = 1.0, other: torch.Tensor | None = None) -> torch.Tensor:
        reasons.append(current_autocast_state().reason)
        scales.append(scale)
        return (x * scale).sin() if other is None else x.sin() * other

    with model_parallel():
        x = torch.randn(4, requires_grad=True)
        with fp8_disabled("here"):
            y = fp8_checkpoint(region, False, None, None, x, scale=2.0)
        y.sum().backward()
        assert reasons == ["here", "here"] and scales == [2.0, 2.0]
        assert torch.allclose(x.grad, 2 * (2 * x.detach()).cos())
        # Tensors by keyword alone, as multi-token prediction gives them, get gradients too.
        x, other = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
        fp8_checkpoint(region, False, None, None, x=x, scale=1.0, other=other).sum().backward()
    assert torch.allclose(x.grad, x.detach().cos() * other.detach())
    assert torch.allclose(other.grad, x.detach().sin())


def test_checkpoint_takes_its_surroundings_along(ranks: RankPool) -> None:
    ranks(1).run(checkpointed)


def layers_in_contexts() -> dict[str, list[bool]]:
    """A rank case: whether linears run in FP8 outside of, and inside, the context of a first layer that stays in BF16."""
    ends = {"num_layers": 4, "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0}
    found = {}
    with model_parallel():
        for name, built_as, overrides in (
            ("own", None, {}),
            ("first", 0, {}),
            ("put back", 0, {"Fp8ColumnParallelLinear": "mxfp8"}),
            ("another", 2, {}),
        ):
            config = fp8_config(ONE, "mxfp8", fp8_overrides=overrides, **ends)
            building = nullcontext() if built_as is None else get_fp8_context(config, built_as, is_init=True)
            with building:
                linear = make_linear(config)
            found[name] = []
            for context in (nullcontext(), get_fp8_context(config, 0), fp8_disabled("a test says so")):
                before = linear.fp8_site.state.counts.fp8_gemms
                with context:
                    linear(random_input(8, 2, 64))
                found[name].append(linear.fp8_site.state.counts.fp8_gemms > before)
    return found


def test_what_the_plan_has_settled_no_context_settles_again(ranks: RankPool) -> None:
    """Only a linear that was built outside Megatron's contexts asks the one that it runs in."""
    assert ranks(1).run(layers_in_contexts)[0] == {
        "own": [True, False, False],
        "first": [False, False, False],
        "put back": [True, True, False],
        "another": [True, True, False],
    }
