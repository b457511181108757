"""Records of each iteration: metrics.jsonl, TensorBoard and the progress line.

metrics.jsonl has one object per iteration:

    iteration         1 for the first
    lm_loss           mean loss of the iteration's tokens before the step, in nats; null if it is not finite
    grad_norm         norm of the whole gradient before clipping; null when the step was skipped or clipping is off
    learning_rate     of the step
    tokens            trained on so far, this iteration included
    tokens_per_s      of this iteration; on a GPU its time ends at the gradient norm, the update counts in the next one
    mfu               share of the BF16 peak of all GPUs; null on CPU and on GPUs of unknown peak
    skipped           1 if the optimizer step was skipped (something was not finite), else 0
    loss_scale        factor of the loss in this iteration; null unless the model is FP16
    nonfinite         NaN and Inf that FP8 casts found, over all ranks
    fp8_gemms         GEMMs that ran in FP8 on this rank, hp_gemms: linear-layer GEMMs that did not
    amax_collectives  collectives that reduced amaxes and counts of NaN and Inf
    mtp_loss          mean loss of multi-token prediction, in nats, over the tokens ahead; null without mtp_num_layers
    peak_memory       bytes: peak allocation on this GPU, or this process's largest resident size on CPU
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

from ..files.records import EventFile, continue_file, records_until

# Dense BF16 peaks from the vendors' data sheets, in FLOP/s; the first name within the device's name counts.
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
    """`value`, or None if it is not finite: JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


def peak_memory() -> int:
    """Peak memory in bytes: the field `peak_memory`."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def bf16_peak() -> float | None:
    """Peak BF16 FLOP/s of this GPU; None on CPU or for an unknown GPU."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in _BF16_PEAK if part in name), None)


def model_flops_per_token(active: int, vocab_rows: int, hidden: int, layers: int, sequence: int) -> float:
    """Forward and backward FLOPs per token: 6 for each weight used, and 6 L h s for causal attention."""
    return 6.0 * (active + vocab_rows * hidden) + 6.0 * layers * hidden * sequence


def lacks_validation(folder: Path, iteration: int) -> bool:
    """Whether a run's validation.jsonl has no complete record of this iteration. Raises OSError."""
    records, _ = records_until(folder / "validation.jsonl", iteration)
    return not (records and records[-1][1]["iteration"] == iteration)


class MetricsWriter:
    """Writes metrics.jsonl, validation.jsonl, events.jsonl and TensorBoard files in a run's folder. Only on rank 0.

    Raises OSError when it is made; later write errors are reported once, by `close`.

    Args:
        finished: finished iterations when the run was resumed; records of later iterations are dropped.
        before: iterations among them that another run trained.
    """

    def __init__(self, folder: Path, finished: int = 0, before: int = 0) -> None:
        self._folder = folder
        self._lost: list[str] = []
        self._open(finished, range(before + 1, finished + 1))

    def _open(self, finished: int, each: range = range(0)) -> None:
        self._metrics = continue_file(self._folder / "metrics.jsonl", finished, 1, each)
        self._validation = continue_file(self._folder / "validation.jsonl", finished)
        self._events = continue_file(self._folder / "events.jsonl", finished)
        self._board = EventFile(self._folder / "tensorboard", finished + 1 if finished else 0)

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
        """Record an event such as a save: {"iteration", "event": one word, "text"}."""
        self._events.write(
            (json.dumps({"iteration": iteration, "event": event, "text": text}) + "\n").encode()
        )

    def go_back(self, finished: int) -> None:
        """Drop the records of iterations after `finished`. Raises OSError."""
        self._lost += self.close()
        self._open(finished)

    def close(self) -> list[str]:
        """Close every file; return lines about records that could not be written."""
        return [
            *self._lost,
            *self._events.close(),
            *self._metrics.close(),
            *self._validation.close(),
            *self._board.close(),
        ]


class Display:
    """Progress output: a bar on a terminal, else a line every `log_interval` iterations.

    Args:
        finished, skipped: finished iterations when the run was resumed, and how many of them were skipped.
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
        """Print a line above the bar, verbatim: rich's print would interpret brackets in names as markup."""
        if self._bar is not None:
            self._bar.console.out(text, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
