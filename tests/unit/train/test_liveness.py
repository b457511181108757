"""What losses and skipped steps say of a training."""

import pytest

from megatron_fp8.train.liveness import Liveness


def said(losses, live=None):
    live = live or Liveness(10)
    lines = [live.step(i, loss, skipped=False, curable=False) for i, loss in enumerate(losses, start=1)]
    return [i for i, line in enumerate(lines, start=1) if line], live


def test_a_loss_that_rises_far_above_its_running_mean_is_said_once():
    at, live = said([6.2, 6.0, 5.8, 9.0, 152.0, 160.0, 150.0])
    assert at == [5]
    assert "iteration 5 had loss 152.0000, far above the running mean 6.4" in live.spike


def test_the_second_loss_may_be_the_one():
    assert said([6.2, 152.0])[0] == [2]


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
    live = Liveness(3)
    for iteration, skipped in enumerate([1, 1, 0, 1, 1, 1], start=1):
        assert not live.hopeless
        live.step(iteration, None, skipped=bool(skipped), curable=False)
    assert live.hopeless and (live.row, live.taken, live.skipped) == (3, 1, 5)


def test_skips_do_not_count_while_a_loss_scale_can_fall():
    live = Liveness(2)
    for _ in range(30):
        live.step(1, None, skipped=True, curable=True)
    assert not live.hopeless and live.skipped == 30
    for _ in range(2):
        live.step(1, None, skipped=True, curable=False)
    assert live.hopeless


def test_0_never_ends_it():
    live = Liveness(0)
    for _ in range(100):
        live.step(1, None, skipped=True, curable=False)
    assert not live.hopeless
