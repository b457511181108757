"""When a run saves, from which checkpoint it starts, and what it takes over."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fp8.checkpoint_files import (
    Manifest,
    check_files,
    complete_checkpoints,
    find_checkpoint,
    latest_checkpoint,
    read_manifest,
)
from megatron_fp8.mcore import checkpoint
from megatron_fp8.mcore.checkpoint_saver import Saver
from megatron_fp8.train.config import RunConfig
from megatron_fp8.train.parallel import on_first_rank, seed_streams
from megatron_fp8.train.report import versions


@dataclass
class Start:
    """Where training starts: iterations finished, of them skipped, and samples consumed; lines for people."""

    iteration: int = 0
    samples: int = 0
    skipped: int = 0
    folder: Path | None = None
    lines: list[str] = field(default_factory=list)


def checkpoint_folder(run: RunConfig) -> Path:
    """Where this run's checkpoints are."""
    return Path(run.checkpoint.folder) if run.checkpoint.folder else Path(run.run_dir) / "checkpoints"


def checkpoint_before(run: RunConfig, iteration: int) -> Path | None:
    """This run's newest checkpoint of at most `iteration`; else the one that it started from, by path; else None."""
    own = [path for path in complete_checkpoints(checkpoint_folder(run)) if int(path.name[5:]) <= iteration]
    if own:
        return own[-1]
    return None if run.resume in ("auto", "never") else Path(run.resume)


def choose(run: RunConfig) -> tuple[Path, Manifest] | None:
    """The checkpoint that `--resume` means, every file of it checked; None to start from the beginning. Collective.

    Raises ValueError, on every rank: there is none at the path, or it is damaged.
    """

    def find() -> tuple[Path, Manifest] | None:
        if run.resume == "never":
            return None
        found = (
            latest_checkpoint(checkpoint_folder(run))
            if run.resume == "auto"
            else find_checkpoint(Path(run.resume))
        )
        return None if found is None else (found, read_manifest(found))

    chosen = on_first_rank(find)
    if chosen is None:
        return None
    problem, problems = "", [""] * dist.get_world_size()
    try:
        check_files(*chosen, sorted(chosen[1].files)[dist.get_rank() :: dist.get_world_size()])
    except ValueError as error:
        problem = str(error)
    dist.all_gather_object(problems, problem)
    if any(problems):
        raise ValueError(next(filter(None, problems)))
    return chosen


def resume(
    run: RunConfig, chosen: tuple[Path, Manifest] | None, chunks: list[Any], optimizer: Any, scheduler: Any
) -> Start:
    """Put the chosen checkpoint into model, optimizer, schedule and random streams. Collective."""
    if chosen is None:
        return Start()
    folder, manifest = chosen
    resumed = checkpoint.load(folder, manifest, chunks, optimizer)
    state = manifest.state
    scheduler.num_steps = 0
    scheduler.step(
        state["scheduler_steps"]
    )  # rates are this run's own; only the place on the curve is taken over
    lines = [f"resume      {folder}: iteration {manifest.iteration} is done", *map(_note, resumed.notes)]
    begun = manifest.iteration > 0  # an imported model has no order of samples, and no streams, to go on with
    if begun and not resumed.same_layout:
        seed_streams(zlib.crc32(f"{run.train.seed} {manifest.iteration}".encode()))
        lines.append(_note("another parallel layout: random streams (dropout) start anew"))
    lines += map(_note, _data_notes(run, manifest) if begun else ())
    taken = state["scheduler_steps"] - 1  # the scheduler is one step ahead of the optimizer
    skipped = manifest.iteration - taken
    return Start(manifest.iteration, state["consumed_samples"], skipped, folder, lines)


def _note(text: str) -> str:
    return f"            {text}"


def _data_notes(run: RunConfig, manifest: Manifest) -> list[str]:
    """What decides the order of samples and is not as it was."""
    before, now = manifest.facts.get("run", {}), run.to_dict()
    keys = [
        ("train", "train_iters"),
        ("train", "global_batch_size"),
        ("train", "seq_length"),
        ("train", "seed"),
    ]
    keys += [("data", "paths"), ("data", "split"), ("data", "tokenizer")]
    changed = [
        f"{section}.{name}"
        for section, name in keys
        if section in before and before[section].get(name) != now[section][name]
    ]
    return (
        [f"the order of samples may differ from the first run's: changed {', '.join(changed)}"]
        if changed
        else []
    )


class Checkpoints:
    """Saves a run's checkpoints. Made, and called, on every rank."""

    def __init__(self, run: RunConfig, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
        self.run, self.chunks, self.optimizer, self.scheduler = run, chunks, optimizer, scheduler
        wanted = run.checkpoint
        self._saver = Saver(
            checkpoint_folder(run), keep_last=wanted.keep_last, asynchronous=wanted.async_save
        )
        self._saved: int | None = None

    def due(self, iteration: int) -> bool:
        """Whether the config asks for a checkpoint after this iteration."""
        interval = self.run.checkpoint.save_interval
        return bool(interval) and (iteration % interval == 0 or iteration == self.run.train.train_iters)

    def save(self, iteration: int, samples: int) -> None:
        """Save the state after `iteration` with `samples` consumed, unless that is done. Collective.

        Raises SaveError on every rank; earlier checkpoints stay.
        """
        if iteration == self._saved:
            return
        state = {
            **checkpoint.numbers(self.chunks, self.optimizer),
            "scheduler_steps": self.scheduler.num_steps,
            "consumed_samples": samples,
        }
        facts = {**checkpoint.layout_facts(self.chunks), "versions": versions(), "run": self.run.to_dict()}
        self._saver.save(
            checkpoint.sharded_state(self.chunks, self.optimizer), Manifest(iteration, state, facts)
        )
        self._saved = iteration

    def close(self) -> None:
        """Wait for a save that is under way. Raises SaveError if it failed."""
        self._saver.close()
