"""A healing phase of some GEMMs in a converted model: the steps of a model whose overrides say the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from megatron_fp8.nn import Fp8Config, convert_to_fp8, fp8_state_dict, load_fp8_state_dict
from megatron_fp8.nn.trainer import Fp8Trainer
from megatron_fp8.recipe import DelayedScaling

LENGTH, BORDER = 4, 2
DELAYED = DelayedScaling(amax_history_len=2, amax_compute_algo="max")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 32))


def batch(iteration: int) -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(iteration))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def recomputed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = checkpoint(model, x, use_reentrant=False)
    return y.square().mean()


def trainer_of(model: nn.Module, compute_loss: Any = loss_of, **options: Any) -> Fp8Trainer:
    return Fp8Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), compute_loss, **options)


def steps_of_both(
    recipe: Any, parts: list[str], ours: nn.Module, run: nn.Module, compute_loss: Any = loss_of
) -> tuple[list[Any], list[Any]]:
    """The steps after the border, as (loss, weights), of ``ours`` and of a model with overrides."""
    phases: Any = {"healing": 1 - BORDER / LENGTH, "healing_parts": parts, "length": LENGTH}
    trainer = trainer_of(run, compute_loss, **phases)
    for iteration in range(BORDER):
        trainer.train_step(batch(iteration))
    config = Fp8Config(recipe=recipe, overrides=dict.fromkeys(parts, "bf16"))
    plain = convert_to_fp8(mlp(), config=config)
    plain.load_state_dict(ours.state_dict())
    saved = fp8_state_dict(ours)
    load_fp8_state_dict(plain, {key: saved[key] for key in fp8_state_dict(plain)})
    other = trainer_of(plain, compute_loss)
    found: tuple[list[Any], list[Any]] = ([], [])
    for iteration in range(BORDER, LENGTH):
        for mine, one, model in zip(found, (trainer, other), (ours, plain), strict=True):
            loss = one.train_step(batch(iteration)).loss
            mine.append([loss, *(p.detach().clone() for p in model.parameters())])
    return found


def assert_same(found: tuple[list[Any], list[Any]]) -> None:
    for mine, theirs in zip(*found, strict=True):
        assert mine[0] == theirs[0]
        assert all(torch.equal(a, b) for a, b in zip(mine[1:], theirs[1:], strict=True))


@pytest.mark.parametrize("compute_loss", [loss_of, recomputed], ids=["plain", "recomputed"])
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", DELAYED], ids=["nvfp4", "mxfp8", "delayed"])
def test_steps_are_those_of_overrides(recipe: Any, compute_loss: Any) -> None:
    model = convert_to_fp8(mlp(), recipe)
    assert_same(steps_of_both(recipe, ["*:fprop", "4:dgrad"], model, model, compute_loss))


def test_steps_of_compiled_code() -> None:
    """One graph more at the border."""
    counter = CompileCounterWithBackend("aot_eager")
    model = convert_to_fp8(mlp(), "nvfp4")
    compiled: Any = torch.compile(model, fullgraph=True, backend=counter)
    found = steps_of_both("nvfp4", ["*:fprop"], model, compiled)
    assert_same(found)
    assert counter.frame_count == 2


def test_named_linears_alone_have_the_bits_of_plain_ones() -> None:
    model = convert_to_fp8(mlp(), "nvfp4")
    assert_same(steps_of_both("nvfp4", ["2"], model, model))


def test_histories_go_on() -> None:
    """Also of an operand that no GEMM casts any more, in training mode and with gradients in evaluation mode."""
    for training in (True, False):
        model = convert_to_fp8(mlp(), DELAYED)
        trainer = trainer_of(
            model, healing=0.5, healing_parts=["2:fprop", "2:wgrad", "4:dgrad", "4:wgrad"], length=LENGTH
        )
        for iteration in range(BORDER):
            trainer.train_step(batch(iteration))
        sites = {name: model.get_submodule(name).fp8_site for name in ("2", "4")}
        model.train(training)
        before = {name: site.state.counts.casts for name, site in sites.items()}
        assert set(before.values()) == {0}
        loss_of(model, 100 * batch(BORDER)).backward()
        assert not sites["2"].active_site.casts["input"].quantizers
        assert not sites["4"].active_site.casts["grad_output"].quantizers
        slots = {
            f"{name}.{role}": quantizer.slot
            for name, site in sites.items()
            for role, quantizer in site.quantizers.items()
            if quantizer is not None
        }
        assert len(slots) == 6
        amaxes = {name: slot.arena.rows[0, slot.index].item() for name, slot in slots.items()}
        assert all(amax > 0 for amax in amaxes.values()), amaxes
        assert amaxes["2.weight"] == model.get_submodule("2").weight.abs().max().item()


def test_what_is_refused() -> None:
    model = convert_to_fp8(mlp(), "nvfp4")
    for parts, words in {
        ("*:fprob",): "'fprob' is no part of a linear",
        ("*:weight",): "weight is an operand: name one of the GEMMs",
        ("7",): "matches no GEMM site",
        (): "must be a list of globs",
    }.items():
        with pytest.raises(ValueError, match="healing_parts") as error:
            trainer_of(model, healing=0.5, healing_parts=parts, length=LENGTH)
        assert words in str(error.value)
    with pytest.raises(ValueError, match=r"healing=0\.0 leaves out"):
        trainer_of(model, healing_parts=["*:fprop"])
