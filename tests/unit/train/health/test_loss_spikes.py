"""What losses and skipped steps say of a training."""

from types import SimpleNamespace

import pytest

from megatron_fp8.train import loop
from megatron_fp8.train.health.loss_spikes import LossMonitor
from megatron_fp8.train.resume.checkpoints import Start
from megatron_fp8.train.stop import TrainingFailed


def said(losses, live=None):
    live = live or LossMonitor(10)
    lines = [
        live.step(i, loss, skipped=False, scale_can_fall=False) for i, loss in enumerate(losses, start=1)
    ]
    return [i for i, line in enumerate(lines, start=1) if line], live


def test_a_loss_that_rises_far_above_its_running_mean_is_said_once():
    assert said([6.2, 152.0])[0] == [2]
    at, live = said([6.2, 6.0, 5.8, 9.0, 152.0, 160.0, 150.0])
    assert at == [5]
    assert "iteration 5 had loss 152.0000, far above the running mean 6.4" in live.spike


@pytest.mark.parametrize(
    "losses",
    [
        [11.0 - 0.2 * i for i in range(50)],
        [0.5, 0.3, 0.9, 0.2, 1.0, 0.4, 1.1, 0.3, 1.3, 0.2, 1.2],  # small batches of fine-tuning
        [2.0] * 20 + [3.5] + [2.0] * 5,
        [0.0, 0.0, 0.0],
    ],
)
def test_losses_as_they_are_say_nothing(losses):
    assert said(losses)[0] == []


def test_skips_in_a_row_end_the_training_and_one_step_in_between_does_not():
    live = LossMonitor(3)
    for iteration, skipped in enumerate([1, 1, 0, 1, 1, 1], start=1):
        assert not live.too_many_skipped
        live.step(iteration, None, skipped=bool(skipped), scale_can_fall=False)
    assert live.too_many_skipped and (live.skipped_row, live.taken, live.skipped) == (3, 1, 5)


def test_skips_do_not_count_while_a_loss_scale_can_fall():
    live = LossMonitor(2)
    for _ in range(30):
        live.step(1, None, skipped=True, scale_can_fall=True)
    assert not live.too_many_skipped and live.skipped == 30
    live.max_skipped_steps = 0
    live.step(1, None, skipped=True, scale_can_fall=False)
    assert not live.too_many_skipped, "0: no limit"
    live.max_skipped_steps = 2
    live.step(1, None, skipped=True, scale_can_fall=False)
    assert live.too_many_skipped


@pytest.mark.parametrize(
    ("taken", "row", "words"),
    [(0, 1, "no step could be taken"), (1, 3, "of 4 steps the last 3 were skipped")],
)
def test_a_run_that_ends_in_skipped_steps_has_failed(monkeypatch, taken, row, words):
    """Also where max_skipped_steps is larger than what was left to train, or 0."""
    run = SimpleNamespace(
        model=SimpleNamespace(fp16=True),
        optimizer=SimpleNamespace(loss_scale=1e30),
        train=SimpleNamespace(max_skipped_steps=0, global_batch_size=1, seq_length=1),
    )
    stepper = SimpleNamespace(
        run=run, chunks=[], check=None, state_is_damaged=lambda: False, describe_differences=str
    )
    trainer = loop.Trainer(stepper, Start(), 1.0)
    for skipped in [False] * taken + [True] * row:
        trainer.monitor.step(1, None, skipped=skipped, scale_can_fall=False)
    monkeypatch.setattr(loop, "first_not_finite", lambda *_: None)
    monkeypatch.setattr(loop, "checkpoint_before", lambda *_: None)
    with pytest.raises(TrainingFailed, match=f"{words}.* a lower optimizer.loss_scale than 1e\\+30"):
        trainer._check_end({"iteration": 4})
    trainer.monitor.step(1, 1.0, skipped=False, scale_can_fall=False)
    trainer._check_end({"iteration": 4})
