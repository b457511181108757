"""`megatron-fp8 train` after its preparations: signals while it trains, and after it."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_fp8.commands import train
from megatron_fp8.train.stop import StopRequest, TrainingFailed


@pytest.fixture(autouse=True)
def alone():
    """This process as the only rank, with its own handlers again at the end."""
    from megatron_fp8.train.launch.parallel import leave

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    leave()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


class Training:
    """Stands for a Trainer of rank 0: sends itself a signal in its third iteration, and ends after it if it was heard."""

    def __init__(self, number: int | None, run_dir: str) -> None:
        self.number, self.finished = number, 0
        self.stepper = SimpleNamespace(stop=StopRequest({}))
        section = SimpleNamespace(folder=None, saves=True)
        length, model = SimpleNamespace(train_iters=9), SimpleNamespace(fp8_backend="auto")
        self.run = SimpleNamespace(
            train=length, model=model, checkpoint=section, run_dir=run_dir, data=SimpleNamespace(paths=[])
        )
        self.monitor = SimpleNamespace(skipped=0, taken=0, spike="")
        self.display: Any = SimpleNamespace(close=lambda: None)
        self.telemetry: Any = SimpleNamespace(close_files=list)
        self.writer: Any = SimpleNamespace(close=list)
        self.reports: Any = lambda: None

    def train(self) -> dict[str, float]:
        for iteration in range(1, 10):
            if iteration == 3 and self.number is not None:
                os.kill(os.getpid(), self.number)
            if iteration == 3 or self.number is None:
                self.reports()
            self.stepper.stop.agree(self.stepper.stop.votes())
            if self.stepper.stop.reason is not None:
                break
        return {"iteration": iteration}


@pytest.fixture
def run_dir(tmp_path):
    for name in ("config.yaml", "report.json"):
        (tmp_path / name).touch()
    return str(tmp_path)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_stops_the_training(run_dir, capfd, name):
    assert train._train(Training(signal.Signals[name], run_dir)) == 0
    assert capfd.readouterr().out.startswith(f"stopped by {name} after 3 of 9 iterations, saved")


def test_a_ctrl_c_after_the_last_line_promises_no_save(run_dir, capfd):
    assert train._train(Training(None, run_dir)) == 0
    os.kill(os.getpid(), signal.SIGINT)
    said = capfd.readouterr()
    assert said.out.startswith("done: 9 iterations") and said.err == ""


@pytest.mark.parametrize("number", [None, signal.SIGINT])
def test_a_training_whose_reader_has_left_saves_and_says_so_elsewhere(run_dir, monkeypatch, capfd, number):
    """`| head`; and `| tee train.log`, which one Ctrl-C ends before the run has finished its iteration."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread:
        monkeypatch.setattr("sys.stdout", unread)
        training = Training(number, run_dir)
        training.reports = lambda: print("loss 4.2", flush=True)
        with pytest.raises(TrainingFailed) as failed:
            train._train(training)
        print("more", flush=True)  # Python's own flush at the end of the process, too
    reason, after = ("SIGINT", 3) if number else ("the loss of its output's reader", 1)
    assert str(failed.value).startswith(
        f"whoever read its output has left: stopped by {reason} after {after} of 9 iterations, saved"
    )
