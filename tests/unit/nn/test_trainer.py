"""Fp8Trainer: the step's arithmetic against a loop written out, skipped steps, phases, saved and resumed training."""

from __future__ import annotations

import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_fp8.nn import Fp8Linear, convert_to_fp8, fp8_state_dict, fp8_step
from megatron_fp8.nn.trainer import Fp8Trainer
from megatron_fp8.params.fp8_parameter import fp8_parameter
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.loss_scaler import LossScaler


def network(recipe: Any = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    return model if recipe is None else convert_to_fp8(model, recipe)


def compute_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.flip(1)).square().mean()


def float16_loss(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return compute_loss(model, batch)


def batch(number: int) -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(number))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trainer_of(recipe: Any = None, seed: int = 0, loss: Any = compute_loss, **options: Any) -> Fp8Trainer:
    model = network(recipe, seed)
    return Fp8Trainer(model, adam(model), loss, **options)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def moments_of(trainer: Fp8Trainer) -> list[Tensor]:
    """Adam's moments and steps."""
    states = trainer.optimizer.state.values()
    return [value.clone() for state in states for value in state.values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("recipe", [None, "delayed", "mxfp8"])
def test_a_step_is_the_loop_written_out(recipe: str | None) -> None:
    trainer = trainer_of(recipe, clip_grad=0.5)
    model = network(recipe)
    optimizer = adam(model)
    for number in range(4):
        step = trainer.train_step(batch(2 * number), batch(2 * number + 1))
        optimizer.zero_grad()
        losses = [compute_loss(model, batch(2 * number + i)) / 2 for i in range(2)]
        for loss in losses:
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if recipe is not None:
            fp8_step(model)
        optimizer.step()
        assert not step.skipped and step.loss == sum(map(float, losses)) and step.grad_norm == float(norm)
        assert same(weights(trainer.model), weights(model)), f"step {number}"
    assert (trainer.iteration, trainer.skipped) == (4, 0)


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_a_loss_scale_changes_no_bit(recipe: str | None) -> None:
    """Scales are powers of two, and a recipe that scales each tensor follows them."""
    plain, scaled = trainer_of(recipe, clip_grad=1.0), trainer_of(recipe, clip_grad=1.0, scaler=LossScaler())
    for number in range(3):
        one, other = plain.train_step(batch(number)), scaled.train_step(batch(number))
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
        assert (one.loss_scale, other.loss_scale) == (1.0, 2.0**16)
    assert same(weights(plain.model), weights(scaled.model))


def test_small_gradients_survive_in_float16_only_with_a_scale() -> None:
    def tiny(model: nn.Module, batch: Tensor) -> Tensor:
        return float16_loss(model, batch) * 1e-6

    def grads(scaler: LossScaler | None) -> Tensor:
        trainer = trainer_of("tensorwise", loss=tiny, scaler=scaler)
        assert not trainer.train_step(batch(0)).skipped
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])

    unscaled, scaled = grads(None), grads(LossScaler(initial_scale=2.0**24))
    assert (unscaled == 0).float().mean() > 0.9 and (scaled == 0).float().mean() < 0.1


@pytest.mark.parametrize(("recipe", "sick"), [(None, math.inf), ("delayed", math.nan), ("mxfp8", math.inf)])
def test_a_sick_batch_skips_one_step_and_nothing_else(recipe: str | None, sick: float) -> None:
    trainer = trainer_of(recipe, scaler=LossScaler(hysteresis=1), clip_grad=1.0)
    trainer.train_step(batch(0))
    before, moments = weights(trainer.model), moments_of(trainer)
    ill = batch(1)
    ill[3, 5] = sick
    step = trainer.train_step(ill)
    assert step.skipped and step.grad_norm is None and not math.isfinite(step.loss)
    assert (step.nonfinite > 0) == (recipe is not None)
    assert same(weights(trainer.model), before)
    assert same(moments_of(trainer), moments)
    assert trainer.scaler is not None and trainer.scaler.scale == 2.0**15
    step = trainer.train_step(batch(2))
    assert not step.skipped and math.isfinite(step.loss) and step.loss_scale == 2.0**15
    assert (trainer.iteration, trainer.skipped, trainer.scaler.skipped) == (3, 1, 1)
    if recipe == "delayed":
        assert all(bool(value.isfinite().all()) for value in fp8_state_dict(trainer.model).values())


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_what_only_a_cast_saw_skips_the_step(recipe: str) -> None:
    """An Inf that is saturated: loss and gradients are finite, and only the counts know."""

    def finite_loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    trainer = trainer_of(recipe, loss=finite_loss, scaler=LossScaler(hysteresis=1))
    trainer.train_step(batch(0))
    before = weights(trainer.model)
    ill = batch(1)
    ill[3, 5] = math.inf
    step = trainer.train_step(ill)
    assert math.isfinite(step.loss) and step.nonfinite > 0
    assert all(bool(p.grad.isfinite().all()) for p in trainer.model.parameters() if p.grad is not None)
    assert step.skipped and same(weights(trainer.model), before)
    assert trainer.scaler is not None and trainer.scaler.scale == 2.0**15


def test_a_scale_that_is_too_large_comes_down_and_training_goes_on() -> None:
    trainer = trainer_of(
        "tensorwise", loss=float16_loss, scaler=LossScaler(2.0**32, hysteresis=1, growth_interval=8)
    )
    steps = [trainer.train_step(batch(0)) for _ in range(60)]
    assert steps[0].skipped and 3 < trainer.skipped < 30
    assert not all(step.skipped for step in steps[-4:]) and steps[-1].loss < steps[0].loss / 2
    assert len({step.loss_scale for step in steps if not step.skipped}) > 1, "it grows again"


DELAYED = DelayedScaling(amax_history_len=3, amax_compute_algo="max")


@pytest.mark.parametrize("recipe", [None, DELAYED, "blockwise"], ids=["none", "delayed", "blockwise"])
def test_a_saved_training_goes_on_bit_for_bit(recipe: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"clip_grad": 1.0, "loss": float16_loss}
    knobs: dict[str, Any] = {"initial_scale": 2.0**24, "hysteresis": 1, "growth_interval": 4}
    whole = trainer_of(recipe, scaler=LossScaler(**knobs), **options)
    for number in range(10):
        whole.train_step(batch(number))
    whole.save(tmp_path / "state.pt")
    again = trainer_of(recipe, seed=1, scaler=LossScaler(**knobs), **options)
    again.load(tmp_path / "state.pt")
    assert (again.iteration, again.skipped, again.scaler) == (whole.iteration, whole.skipped, whole.scaler)
    assert 0 < whole.skipped < 9
    for number in range(10, 17):
        assert whole.train_step(batch(number)) == again.train_step(batch(number)), f"step {number}"
    assert same(weights(whole.model), weights(again.model))
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


def test_a_bf16_training_goes_on_in_fp8(tmp_path: Path) -> None:
    plain = trainer_of()
    plain.train_step(batch(0))
    plain.save(tmp_path / "state.pt")
    trainer = trainer_of("delayed", seed=1, scaler=LossScaler())
    trainer.load(tmp_path / "state.pt")
    assert trainer.scaler == LossScaler() and trainer.iteration == 1
    assert same(weights(trainer.model), weights(plain.model)) and not trainer.train_step(batch(1)).skipped


class Bad:
    """Something that would run when it is unpickled."""

    def __reduce__(self) -> Any:
        return (print, ("unpickled",))


def test_a_file_runs_no_code_and_a_wrong_one_is_said_to_be(tmp_path: Path, capsys: Any) -> None:
    trainer = trainer_of("delayed")
    before = weights(trainer.model)
    capsys.readouterr()
    path = tmp_path / "state.pt"
    torch.save({"model": Bad()}, path)
    for content, said in (
        (None, "is not a file of Fp8Trainer.save"),
        (b"", "is not"),
        (pickle.dumps(1), "is not"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=said):
            trainer.load(path)
    torch.save({"model": {}}, path)
    with pytest.raises(ValueError, match="it has no optimizer, scaler, fp8, counters"):
        trainer.load(path)
    torch.save(3, path)
    with pytest.raises(ValueError, match="it has no model, optimizer"):
        trainer.load(path)
    with pytest.raises(ValueError, match=r"missing\.pt"):
        trainer.load(tmp_path / "missing.pt")
    other = trainer_of("tensorwise")
    other.train_step(batch(0))
    with pytest.raises(ValueError, match="of another model or recipe"):
        trainer.load_state_dict(other.state_dict())
    assert "unpickled" not in capsys.readouterr().out and same(weights(trainer.model), before)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_phases_are_high_precision_to_the_bit_and_survive_a_resume(recipe: str, tmp_path: Path) -> None:
    plain, trainer = trainer_of(), trainer_of(recipe, warmup=0.3, healing=0.2, length=10)
    for number in range(3):
        plain.train_step(batch(number))
        trainer.train_step(batch(number))
    assert same(weights(plain.model), weights(trainer.model))
    if recipe == "delayed":
        state = fp8_state_dict(trainer.model)
        assert all(bool(value) for name, value in state.items() if name.endswith(".warm"))
    trainer.save(tmp_path / "state.pt")
    trainer = trainer_of(recipe, seed=1, warmup=0.3, healing=0.2, length=10)
    trainer.load(tmp_path / "state.pt")
    linears = [module for module in trainer.model.modules() if isinstance(module, Fp8Linear)]
    ran = []
    for number in range(3, 10):
        trainer.train_step(batch(number))
        ran.append(linears[0].fp8_site.state.last.fp8_gemms > 0)
    assert ran == [True] * 5 + [False] * 2


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        ("mxfp8", {"warmup": 0.1}, "length=None"),
        ("mxfp8", {"warmup": 1.5, "length": 10}, "warmup=1.5"),
        ("mxfp8", {"warmup": -0.5, "length": 10}, "warmup=-0.5"),
        ("mxfp8", {"warmup": 0.5, "healing": 0.5, "length": 10}, "leave none of 10 iterations to FP8"),
        (None, {"warmup": 0.5, "length": 10}, "no FP8 linear"),
        (None, {"clip_grad": 0.0}, "clip_grad=0.0"),
    ],
)
def test_what_cannot_be_is_refused(recipe: str | None, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        trainer_of(recipe, **options)


def test_a_step_needs_a_microbatch() -> None:
    with pytest.raises(ValueError, match="no microbatch"):
        trainer_of().train_step()


def test_weights_that_live_as_fp8_refuse_a_warm_up() -> None:
    model = network("delayed")
    linear = model[0]
    assert isinstance(linear, Fp8Linear)
    quantizer = linear.fp8_site.quantizers["weight"]
    assert quantizer is not None
    linear.weight = fp8_parameter(linear.weight.detach().bfloat16(), quantizer)
    with pytest.raises(ValueError, match="are stored as FP8"):
        Fp8Trainer(model, torch.optim.SGD([linear.bias], lr=0.1), compute_loss, warmup=0.1, length=10)


def test_float16_parameters_are_refused_before_they_change() -> None:
    model = network().half()
    trainer = Fp8Trainer(model, torch.optim.SGD(model.parameters()), compute_loss)
    before = weights(model)
    with pytest.raises(ValueError, match="keep the parameters in float32"):
        trainer.train_step(batch(0).half())
    assert same(weights(model), before)
