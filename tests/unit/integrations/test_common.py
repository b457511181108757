"""What all integrations share: unhealthy steps are skipped, with and without a scaler, and the state's file."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks.support.compare import assert_all_same_bytes
from megatron_fp8.integrations.common import Fp8Iterations
from megatron_fp8.nn import convert_to_fp8, fp8_state_dict
from tests.support.small_training import DELAYED, Tower, assert_same_state, batch


def backward(model: Tower, seed: int, *, ill: bool = False, scale: float = 1.0) -> None:
    """Inf reaches a cast, which saturates it: the gradients stay finite."""
    rows = batch(seed).detach()
    if ill:
        rows[0, 0] = float("inf")
    (model(rows).square().mean() * scale).backward()


def snapshot(model: Tower, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    moments = optimizer.state_dict()["state"]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return weights | {f"{i}.{name}": v.clone() for i, one in moments.items() for name, v in one.items()}


def test_an_unhealthy_step_leaves_weights_and_moments_alone():
    model = convert_to_fp8(Tower(), DELAYED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    iterations = Fp8Iterations()
    for step in range(3):
        before = snapshot(model, optimizer)
        backward(model, step, ill=step == 1)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        iterations.finish(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        after = snapshot(model, optimizer)
        changed = not before or any(
            not torch.equal(before.get(name, torch.zeros(())), after[name]) for name in after
        )
        assert changed == (step != 1)
    assert iterations.logs() == {"fp8_skipped_steps": 1, "fp8_nonfinite": iterations.nonfinite}
    assert iterations.nonfinite >= 1 and model.up.fp8_group.iteration == 3


@pytest.mark.parametrize("unscaled", [True, False], ids=["clipped", "unclipped"])
def test_a_scaler_is_told_of_an_overflow_that_gradients_do_not_show(unscaled):
    model = convert_to_fp8(Tower(), DELAYED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scaler.scale(torch.ones(()))
    iterations = Fp8Iterations()
    scales = []
    for step in range(4):
        before = snapshot(model, optimizer)
        backward(model, step, ill=step == 1, scale=scaler.get_scale())
        if unscaled:
            scaler.unscale_(optimizer)
        iterations.finish(model, optimizer, scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 1:
            after = snapshot(model, optimizer)
            assert before.keys() == after.keys() and all(
                torch.equal(before[name], after[name]) for name in after
            )
        scales.append(scaler.get_scale())
    assert scales == [64.0, 32.0, 32.0, 64.0] and iterations.skipped_steps == 1


def test_nothing_is_skipped_where_the_optimizer_has_stepped_already():
    model = convert_to_fp8(Tower(), DELAYED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iterations = Fp8Iterations()
    backward(model, 0, ill=True)
    optimizer.step()
    optimizer.zero_grad()
    iterations.finish(model, optimizer)
    assert iterations.nonfinite and not iterations.skipped_steps


def test_the_file_holds_state_and_counts(tmp_path):
    model = convert_to_fp8(Tower(), DELAYED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iterations = Fp8Iterations()
    for step in range(3):
        backward(model, step, ill=step == 0)
        iterations.finish(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    path = tmp_path / "fp8_state.safetensors"
    path.write_text("an older one")
    iterations.save(model, path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    other, again = convert_to_fp8(Tower(), DELAYED), Fp8Iterations()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    again.load(other, path)
    assert_same_state(other, model)
    assert again.logs() == iterations.logs() and again.skipped_steps == 1


def test_checkpoints_without_state_or_with_a_damaged_one(tmp_path):
    model = convert_to_fp8(Tower(), DELAYED)
    before = fp8_state_dict(model)
    path = tmp_path / "fp8_state.safetensors"
    with pytest.warns(UserWarning, match=r"has no FP8 state: delayed scaling starts anew"):
        Fp8Iterations().load(model, path)
    Fp8Iterations().save(model, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=r"fp8_state.safetensors' cannot be read .*: resume from another checkpoint"
    ):
        Fp8Iterations().load(model, path)
    assert_all_same_bytes(before, fp8_state_dict(model))
    Fp8Iterations().save(model, path)
    with pytest.raises(ValueError, match="the saved FP8 state is of another model or recipe"):
        Fp8Iterations().load(convert_to_fp8(Tower(), "tensorwise"), path)


def test_accelerates_optimizer_with_a_scaler():
    """accelerate makes a scaler on GPUs alone; the optimizer that holds it runs anywhere."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.optimizer import AcceleratedOptimizer

    from megatron_fp8.integrations.accelerate import register_fp8

    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(convert_to_fp8(Tower(), DELAYED))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    fp8 = register_fp8(accelerator, model, optimizer)
    skipped = []
    for step in range(4):
        # Step 2 overflows in the gradients too, which a scaler sees by itself: the next step is none of its business.
        backward(model, step, ill=step == 1, scale=float("inf") if step == 2 else scaler.get_scale())
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    assert skipped == [False, True, True, False] and scaler.get_scale() == 16.0
    assert fp8.skipped_steps == 2 and model.up.fp8_group.iteration == 4
