"""Saves a run's checkpoints, chooses the one to start from, and resumes."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...files.atomic_io import as_value_error
from ...files.checkpoint import (
    LATEST,
    Manifest,
    check_files,
    check_listed,
    complete_checkpoints,
    expert_override_notes,
    find_checkpoint,
    iteration_of,
    latest_checkpoint,
    missing_checksum_note,
    not_finite_checkpoints,
    read_manifest,
)
from ...files.run_lock import job_name
from ...files.terminal import warn_user
from ...mcore import checkpoint
from ...mcore.checkpoint.saver import SaveError, Saver
from ..config.run_config import RunConfig
from ..health import skipped_samples
from ..launch.parallel import on_every_rank, on_first_rank, seed_streams
from ..report import versions
from . import checkpoint_compat, parent_checkpoint
from .run_folder import RunFolders, checkpoint_folder, own_name, same_place

_ATTEMPTS = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"


@dataclass
class Start:
    """Where training starts: finished iterations, skipped iterations, consumed samples, and lines to print.

    ``accepted``: changes that `--checkpoint.accept` allowed, now and in earlier runs; later manifests store them too.
    ``left_out``: records of excluded samples (skipped_samples.py); ``monitor_state``: the result of LossMonitor.memory();
    ``before``: number of earlier iterations whose records belong to another run.
    """

    iteration: int = 0
    samples: int = 0
    skipped: int = 0
    folder: Path | None = None
    accepted: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    monitor_state: dict[str, float] = field(default_factory=dict)
    before: int = 0


def checkpoint_before(run: RunConfig, iteration: int, started: Path | None) -> Path | None:
    """This run's newest checkpoint of at most `iteration`, else ``started`` if it still exists, else None."""
    own = [path for path in complete_checkpoints(checkpoint_folder(run)) if iteration_of(path) <= iteration]
    if own:
        return own[-1]
    return started if started is not None and started.is_dir() else None


def choose(run: RunConfig, tokenizer: Any) -> tuple[Path, Manifest] | None:
    """The checkpoint that `--resume` selects, with all files verified; None to start from the beginning. Collective.

    Raises ValueError on every rank if the path has no checkpoint, if it is damaged, or if this run would compute
    something else with its weights.
    """

    def find() -> tuple[Path, Manifest] | None:
        if run.resume == "auto":
            folder = checkpoint_folder(run)
            checkpoint_path = latest_checkpoint(folder) or parent_checkpoint.find(folder)
            _say_what_is_passed_over(folder, checkpoint_path)
        elif (checkpoint_path := _saved_by_this_job(run)) is None and run.resume != "never":
            with as_value_error(f"--resume={run.resume}", errors=ValueError):
                checkpoint_path = find_checkpoint(Path(run.resume))
            checkpoint_path = _start_of_this_job(run, checkpoint_path)
        if checkpoint_path is None:
            return None
        manifest = read_manifest(checkpoint_path)
        _check_state(checkpoint_path, manifest)
        checkpoint_compat.check(run, checkpoint_path, manifest, tokenizer, ", or --resume=never")
        return checkpoint_path, manifest

    chosen = on_first_rank(find)
    if chosen is not None:
        check_together(*chosen)
    return chosen


def check_together(folder: Path, manifest: Manifest) -> None:
    """Raise ValueError on every rank if a checkpoint has changed since it was written. Collective.

    Ranks share the files: if rank 0 alone read terabytes, the others would wait longer than a collective may take.
    """
    on_every_rank(
        lambda: check_files(folder, manifest, share(manifest, dist.get_rank(), dist.get_world_size()))
    )
    on_first_rank(lambda: check_listed(folder, manifest))


def share(manifest: Manifest, rank: int, ranks: int) -> list[str]:
    """The files that `rank` reads; files are dealt out by size, the largest first."""
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name]["bytes"], name))
    return by_size[rank::ranks]


def _restarted_job() -> str:
    """Name of the job whose later attempt this is; '' in a first attempt or outside a job."""
    again = any(os.environ.get(name, "0") != "0" for name in _ATTEMPTS)
    return job_name(os.environ) if again else ""


def _saved_by_this_job(run: RunConfig) -> Path | None:
    """This run's latest checkpoint if an earlier attempt of this job saved it, else None.

    The command of a later attempt still names the first attempt's start.
    """
    if not (job := _restarted_job()):
        return None
    latest = latest_checkpoint(checkpoint_folder(run))
    return latest if latest is not None and read_manifest(latest).facts.get("job") == job else None


def _start_of_this_job(run: RunConfig, named: Path) -> Path:
    """The start of this attempt, if the job has saved no checkpoint yet.

    It is the start of the job's first attempt, if that still exists and lies in --resume=PATH (which may select a newer
    one by now); else ``named``, the checkpoint that --resume selects.
    """
    if not (job := _restarted_job()):
        return named
    folder = checkpoint_folder(run)
    try:
        started = parent_checkpoint.read(folder)
        if started is None or started.job != job or not _is_in(started.checkpoint, run.resume):
            return named
        base = parent_checkpoint.find(folder)
    except ValueError as error:
        warn_user(f"this attempt goes on from {named}, the earlier ones may not have: {error}")
        return named
    if base is None or same_place(base, named):
        return named
    warn_user(
        f"--resume={run.resume} now selects {named}. Training goes on from {base}, where this job began before: a new"
        " job would start from the former."
    )
    return base


def _is_in(checkpoint: Path, resume: str) -> bool:
    return Path(os.path.realpath(checkpoint)).is_relative_to(os.path.realpath(resume))


def _check_state(folder: Path, manifest: Manifest) -> None:
    """Raise ValueError if a manifest's numbers are missing or inconsistent, so that training cannot continue."""
    state, done = manifest.state, manifest.iteration
    needed = ("optimizer_step", "fp8_iteration", "scheduler_steps", "consumed_samples")
    problem = ""
    if missing := [name for name in needed if name not in state]:
        problem = f"its manifest has no {missing[0]}, as one that was saved from Python and not by a run"
    # The scheduler is one step ahead of the optimizer. A skipped step advances neither.
    elif not 1 <= state["scheduler_steps"] <= done + 1:
        problem = f"its manifest has scheduler_steps {state['scheduler_steps']} after iteration {done}"
    elif not state["optimizer_step"] <= done:
        problem = f"its manifest has optimizer_step {state['optimizer_step']} after iteration {done}"
    elif done and not state["consumed_samples"]:
        problem = f"its manifest has consumed_samples 0 after iteration {done}"
    if problem:
        raise ValueError(
            f"the checkpoint {str(folder)!r} cannot be trained on from: {problem}. Give another one with --resume=PATH."
        )


def _say_what_is_passed_over(folder: Path, start: Path | None) -> None:
    """Warn of newer checkpoints than the chosen one: not finite ones, and those that `latest` does not name."""
    for path in complete_checkpoints(folder)[-1:]:
        if start and iteration_of(path) > iteration_of(start):
            warn_user(
                f"{str(folder / LATEST)!r} names {start.name}, and {path.name} is newer. Training goes on from the first,"
                " and moves the other out of the way: where it did not go back on purpose, --resume of that one goes on"
                " from there."
            )
    for path in not_finite_checkpoints(folder)[-1:]:
        good = iteration_of(start) if start and start.parent == folder else -1
        if int(path.name.rpartition("_")[2]) > good:
            warn_user(
                f"{str(path)!r} holds NaN or Inf and is passed over: training goes on from {start or 'the beginning'}."
            )


def resume(
    run: RunConfig,
    chosen: tuple[Path, Manifest] | None,
    tokenizer: Any,
    chunks: list[Any],
    optimizer: Any,
    scheduler: Any,
    data: list[str],
) -> Start:
    """Load the chosen checkpoint into model, optimizer, schedule and random streams. Collective.

    Args:
        data: digests of the run's data sets (facts.data_fact).
    """
    if chosen is None:
        return Start()
    folder, manifest = chosen
    accepted = checkpoint_compat.check(run, folder, manifest, tokenizer)
    resumed = checkpoint.load(folder, manifest, chunks, optimizer)
    state = manifest.state
    scheduler.num_steps = 0
    # Learning rates come from this run's config; only the position in the schedule comes from the checkpoint.
    scheduler.step(state["scheduler_steps"])
    lines = [f"resume      {folder}: iteration {manifest.iteration} is done"]
    before = 0
    if own_name(folder, checkpoint_folder(run)) is not None:
        before = on_first_rank(lambda: parent_checkpoint.iterations_before(checkpoint_folder(run)))
    elif run.resume == "auto":
        lines.append(
            _note(f"no checkpoint of this run is there, and its {parent_checkpoint.FILE} names that one")
        )
    if run.resume != "auto" and not _is_in(folder, run.resume):
        lines.append(_note(f"this job has saved it, and began at --resume={run.resume}"))
    lines += map(_note, missing_checksum_note(manifest))
    lines += map(_note, expert_override_notes(manifest, run.model.fp8_overrides))
    if accepted:
        lines.append(
            _note(f"accepted, it computes something else from here on: {', '.join(map(str, accepted))}")
        )
    lines += map(_note, resumed.notes)
    has_trained = manifest.iteration > 0  # an imported model has no sample order and no streams
    if has_trained and resumed.new_streams:
        seed_streams(zlib.crc32(f"{run.train.seed} {manifest.iteration}".encode()))
        lines.append(_note(f"{resumed.new_streams}: random streams (dropout) restart"))
    if has_trained:
        changed = checkpoint_compat.may_change(run, manifest, data)
        lines += [_note(f"not as it was: {', '.join(map(str, changed))}")] if changed else []
        lines += map(_note, _data_notes(changed))
    # The scheduler is one step ahead of the optimizer.
    skipped = manifest.iteration - (state["scheduler_steps"] - 1)
    now = [{"iteration": manifest.iteration, **vars(change)} for change in accepted]
    omitted = on_first_rank(lambda: skipped_samples.merge_records(folder.parent, state.get("left_out", [])))
    if omitted:
        lines.append(_note(f"left out, as before: samples {_ranges(omitted)}"))
    return Start(
        manifest.iteration,
        state["consumed_samples"],
        skipped,
        folder,
        [*manifest.facts.get("accepted", []), *now],
        lines,
        omitted,
        state.get("liveness", {}),
        before,
    )


def _ranges(records: list[dict[str, Any]]) -> str:
    return ", ".join(f"{first} to {last - 1}" for first, last in skipped_samples.ranges_of(records))


def _note(text: str) -> str:
    return f"            {text}"


def _data_notes(changed: list[checkpoint_compat.Change]) -> list[str]:
    """Changes that affect the order of samples."""
    order = {f"train.{name}" for name in ("train_iters", "global_batch_size", "seq_length", "seed")}
    order |= {"data.paths", "data.column", "data.loss", "data.split", checkpoint_compat.DATA_CONTENT}
    names = [change.name for change in changed if change.name in order]
    return (
        [f"the order of samples may differ from the first run's: changed {', '.join(names)}"] if names else []
    )


def estimated_bytes(parameters: int, dtype: torch.dtype) -> int:
    """Approximate size of a checkpoint in bytes: weights in their dtype, masters and two moments in float32."""
    return parameters * (dtype.itemsize + 3 * torch.float32.itemsize)


class Checkpoints:
    """Saves a run's checkpoints. Made, and called, on every rank.

    Args:
        folders: the run's locked folders.
        facts: manifest entries beside config, layout and versions.
    """

    def __init__(
        self,
        run: RunConfig,
        folders: RunFolders,
        chunks: list[Any],
        optimizer: Any,
        scheduler: Any,
        facts: dict[str, Any],
    ) -> None:
        self.run, self.chunks, self.optimizer, self.scheduler = run, chunks, optimizer, scheduler
        self.facts = facts
        section = run.checkpoint
        self._saver = Saver(
            folders.checkpoints,
            keep_last=section.keep_last,
            asynchronous=section.async_save,
            still_ours=folders.still_ours,
            timeout=timedelta(minutes=run.train.distributed_timeout_minutes),
        )
        self._saved: int | None = None

    def due(self, iteration: int, stopped: bool = False) -> bool:
        """Whether a checkpoint is due after this iteration; ``stopped``: it is the run's last."""
        interval = self.run.checkpoint.save_interval
        if interval == "never":
            return False
        return (
            stopped or iteration == self.run.train.train_iters or bool(interval and iteration % interval == 0)
        )

    @property
    def seconds(self) -> float:
        """Duration of the latest complete save in seconds; 0 before the first."""
        return self._saver.seconds

    def wait(self) -> None:
        """Wait for a running save. Raises SaveError if it failed."""
        self._saver.finish()

    def went_back(self) -> None:
        """After a rollback: later checkpoints are new, even if their iteration was saved before."""
        self._saved = None

    def save(self, iteration: int, samples: int, more: dict[str, Any] | None = None) -> None:
        """Save the state after `iteration` with `samples` consumed, unless it is saved already. Collective.

        ``more``: further numbers for the manifest's state.

        Raises SaveError on every rank; earlier checkpoints stay.
        """
        if iteration == self._saved:
            return
        state = {
            **checkpoint.numbers(self.chunks, self.optimizer),
            "scheduler_steps": self.scheduler.num_steps,
            "consumed_samples": samples,
            **(more or {}),
        }
        facts = {**checkpoint.layout_facts(self.chunks), "versions": versions(), "run": self.run.to_dict()}
        facts |= self.facts
        self._saver.save(
            checkpoint.sharded_state(self.chunks, self.optimizer), Manifest(iteration, state, facts)
        )
        self._saved = iteration

    def close(self) -> None:
        """Wait for a running save. Raises SaveError if it failed, or if the last checkpoint has NaN or Inf."""
        self._saver.close()
        if self._saver.not_finite:
            saved = complete_checkpoints(self._saver.folder)
            back = (
                f"go back to {saved[-1]} with a lower optimizer.lr"
                if saved
                else "start again with a lower optimizer.lr"
            )
            raise SaveError(f"training ended with NaN or Inf in {self._saver.not_finite}: {back}.")
