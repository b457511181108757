"""The last line that a training prints."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any


def summary_line(trainer: Any, summary: dict[str, float], seconds: float) -> str:
    """For a run that is done or was stopped: its work in ``seconds``, its result and its folders."""
    run = trainer.run
    done, total = int(summary["iteration"]), run.train.train_iters
    if done < total:
        saved = ", saved" if run.checkpoint.saves else ""
        parts = [f"stopped by {trainer.stepper.stop.reason} after {done} of {total} iterations{saved}"]
    elif trainer.finished >= total:
        parts = [f"done: all {total} iterations were done before"]
    else:
        parts = [f"done: {total} iterations in {seconds:.0f} s"]
    live = trainer.liveness
    if "last_loss" in summary:
        parts.append(f"loss {summary['first_loss']:.4f} -> {summary['last_loss']:.4f}")
    elif live.skipped + live.taken:
        parts.append("no finite loss")
    if "validation_loss" in summary:
        parts.append(f"validation loss {summary['validation_loss']:.4f}")
    if live.skipped + live.taken:
        parts.append(f"skipped {live.skipped} of {live.skipped + live.taken} steps")
    if live.spike:
        parts.append(live.spike)
    model = f"; the model is {trainer.started}" if trainer.finished >= total else ""
    did = ", ".join(parts)
    if not run.checkpoint.saves and done > trainer.finished:
        return (
            f"{did}; the trained weights are gone, as checkpoint.save_interval=never asks: {run.run_dir} has the records"
            f" alone; next: megatron-fp8 report {shlex.quote(run.run_dir)}"
        )
    elsewhere = f", its checkpoints in {run.checkpoint.folder}" if run.checkpoint.folder else ""
    saved_in = trainer.started if model else run.checkpoint.folder or run.run_dir
    more = f'next: megatron-fp8 generate {shlex.quote(str(saved_in))} --prompt "Once upon a time"'
    if done < total:
        more = "--resume=auto goes on from there"
    return f"{did}{model}; everything is in {run.run_dir}{elsewhere}; {more}"


def nothing_left(run: Any, start: Path) -> str:
    """For a run whose starting checkpoint ``start`` (another run's) already has all iterations."""
    return (
        f"done: all {run.train.train_iters} iterations were done before; the model is {start}, which is not"
        f" this run's own. Nothing was trained, and nothing in {run.run_dir} was moved: to train on, give a larger"
        " train.train_iters"
    )
