"""What a run records of each iteration: metrics.jsonl, TensorBoard, and the line people watch.

metrics.jsonl has one object per iteration:

    iteration         1 for the first
    lm_loss           mean loss of the iteration's tokens before the step, in nats; null if it is not finite
    grad_norm         norm of the whole gradient before clipping; null when the step was skipped or clipping is off
    learning_rate     of the step
    tokens            trained on so far, this iteration included
    tokens_per_s      this iteration's; on a GPU it ends with the gradient norm, and the update counts in the next
    mfu               of the BF16 peak of all GPUs together; null on CPU and on GPUs whose peak is not known
    skipped           1 if the optimizer step was skipped (something was not finite), else 0
    loss_scale        by which the loss was multiplied in this iteration; null unless the model is FP16
    nonfinite         NaN and Inf that FP8 casts met, over all ranks
    fp8_gemms         GEMMs that ran in FP8 on this rank, hp_gemms: linear-layer GEMMs that did not
    amax_collectives  collectives that reduced amax and health
    mtp_loss          mean loss of multi-token prediction, in nats, over the tokens ahead; null without mtp_num_layers
    peak_memory       bytes: allocated at most on this GPU, or this process's largest resident size on CPU
"""

from __future__ import annotations

import json
import math
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..files.lines import records_until
from ..files.records import Board, continued

# Dense BF16 peaks of the vendors' data sheets, in FLOP/s; the first name found in the device's name counts.
_BF16_PEAK = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H200 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("MI300X", 1307e12),
)


@dataclass
class IterationMetrics:
    """One line of metrics.jsonl; the fields are explained above."""

    iteration: int
    lm_loss: float | None
    grad_norm: float | None
    learning_rate: float
    tokens: int
    tokens_per_s: float
    mfu: float | None
    skipped: int
    loss_scale: float | None
    nonfinite: int
    fp8_gemms: int
    hp_gemms: int
    amax_collectives: int
    peak_memory: int
    mtp_loss: float | None = None


def finite(value: float | None) -> float | None:
    """`value`, or None (null in JSON, which knows no NaN) if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def peak_memory() -> int:
    """Bytes, as the field `peak_memory` says."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def bf16_peak() -> float | None:
    """FLOP/s of one of this machine's GPUs in BF16; None on CPU or if the GPU is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in _BF16_PEAK if part in name), None)


def model_flops_per_token(active: int, vocab_rows: int, hidden: int, layers: int, sequence: int) -> float:
    """Forward and backward FLOPs per token: 6 per weight that multiplies it, and causal attention's 6 L h s."""
    return 6.0 * (active + vocab_rows * hidden) + 6.0 * layers * hidden * sequence


def lacks_validation(folder: Path, iteration: int) -> bool:
    """Whether a run's validation.jsonl has no record, or an unfinished one, of this iteration. Raises OSError."""
    found, _ = records_until(folder / "validation.jsonl", iteration)
    return not (found and found[-1][1]["iteration"] == iteration)


class MetricsWriter:
    """Writes metrics.jsonl, validation.jsonl, events.jsonl and TensorBoard under a run's folder. Only rank 0 has one.

    Raises OSError when it is made, and not later: a disk that is full meanwhile is said once.

    Args:
        finished: iterations that the run had finished when it was resumed; what is recorded of later ones is dropped.
        before: those of them that another run has trained, where this one went on from its checkpoint.
    """

    def __init__(self, folder: Path, finished: int = 0, before: int = 0) -> None:
        self._folder = folder
        self._lost: list[str] = []
        self._open(finished, range(before + 1, finished + 1))

    def _open(self, finished: int, each: range = range(0)) -> None:
        self._metrics = continued(self._folder / "metrics.jsonl", finished, 1, each)
        self._validation = continued(self._folder / "validation.jsonl", finished)
        self._events = continued(self._folder / "events.jsonl", finished)
        self._board = Board(self._folder / "tensorboard", finished + 1 if finished else 0)

    def iteration(self, metrics: IterationMetrics) -> None:
        """Record one iteration."""
        values = asdict(metrics)
        self._metrics.write((json.dumps(values, allow_nan=False) + "\n").encode())
        shown = {f"train/{name}": value for name, value in values.items() if value is not None}
        del shown["train/iteration"]
        self._board.scalars(metrics.iteration, shown)

    def validation(self, iteration: int, loss: float) -> None:
        """Record a validation: {"iteration", "validation_loss"}."""
        record = {"iteration": iteration, "validation_loss": finite(loss)}
        self._validation.write((json.dumps(record, allow_nan=False) + "\n").encode())
        if math.isfinite(loss):
            self._board.scalars(iteration, {"validation/lm_loss": loss})

    def event(self, iteration: int, event: str, text: str) -> None:
        """Record what happened beside the steps, such as a save: {"iteration", "event": in a word, "text"}."""
        self._events.write(
            (json.dumps({"iteration": iteration, "event": event, "text": text}) + "\n").encode()
        )

    def go_back(self, finished: int) -> None:
        """Drop what is recorded of later iterations than `finished`. Raises OSError."""
        self._lost += self.close()
        self._open(finished)

    def close(self) -> list[str]:
        """Close every file; what they lack."""
        return [
            *self._lost,
            *self._events.close(),
            *self._metrics.close(),
            *self._validation.close(),
            *self._board.close(),
        ]


class Display:
    """Progress for people: a bar on a terminal, else a line every `log_interval` iterations.

    Args:
        finished, skipped: iterations that were done, and of them skipped, when the run was resumed.
    """

    def __init__(self, iterations: int, log_interval: int, finished: int = 0, skipped: int = 0) -> None:
        self._iterations, self._log_interval, self._finished = iterations, log_interval, finished
        self._skipped = skipped
        self._bar: Any = None
        if sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}", markup=False),
            )
            self._bar = Progress(*columns, TimeRemainingColumn())
            self._task = self._bar.add_task("", total=iterations, completed=finished)
            self._bar.start()

    def iteration(self, metrics: IterationMetrics) -> None:
        """Show one iteration."""
        self._skipped += metrics.skipped
        loss = "not finite" if metrics.lm_loss is None else f"{metrics.lm_loss:.4f}"
        norm = "" if metrics.grad_norm is None else f"  gradient norm {metrics.grad_norm:.4g}"
        text = f"loss {loss}{norm}  lr {metrics.learning_rate:.3g}  {metrics.tokens_per_s:,.0f} tokens/s"
        text += f"  {metrics.peak_memory / 2**20:,.0f} MiB"
        if metrics.mfu is not None:
            text += f"  MFU {metrics.mfu:.1%}"
        text += f"  skipped {self._skipped}"
        if metrics.loss_scale is not None:
            text += f"  loss scale {metrics.loss_scale:,.6g}"
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=text)
        elif metrics.iteration % self._log_interval == 0 or metrics.iteration in (
            self._finished + 1,
            self._iterations,
        ):
            print(f"iteration {metrics.iteration:>5}/{self._iterations}  {text}", flush=True)

    def say(self, text: str) -> None:
        """Print a line above the bar, as it is: names in it may hold what rich's print takes for markup."""
        if self._bar is not None:
            self._bar.console.out(text, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
