"""Replay of a run at a checkpoint: its model and its next batches.

Weights are the checkpoint's float32 masters, rounded to the model's dtype. That also holds for a run with FP8 weights,
whose codes are made from the same values. The parallel layout is the run's, or one set by options. A single process is
one rank. Nothing is written to the run's folder.

A checkpoint fits any parallel layout, but a scale computed from a shard's own values does not: with ``tensorwise`` a
weight split in two has two scales. Delayed scales come from the checkpoint and are shared by all ranks, and blocks do
not cross shards, so those recipes give the same result in every layout. Rejected: refuse every other layout; a
diagnosis on one process is right for those recipes, and needs no second rank. A verdict begins with a note if the loss
is not what the run recorded.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..files.checkpoint import (
    complete_checkpoints,
    find_checkpoint,
    iteration_of,
    read_manifest,
)
from ..files.manifest import Manifest
from ..fp8_utils import quantizes
from ..mcore.checkpoint.loader import load_moments, load_weights
from ..mcore.sites import check_plan
from ..plan.site_plan import SitePlan
from ..recipe import recipe_name
from ..train.config.model_section import padded_vocab_size, transformer_config
from ..train.config.run_config import RunConfig
from ..train.data import datasets
from ..train.health.skipped_samples import ranges_of
from ..train.launch import parallel
from ..train.launch.config_consistency import agree_on_inputs
from ..train.model import build_chunks
from ..train.resume import checkpoint_compat
from ..train.resume.restore import ONE_STAGE, join, read_run
from ..train.run_record import RunRecord, later_training_note, run_folder_of
from .checkpoint_runner import CheckpointRunner
from .diagnosis import Diagnosis

# Settings of a run's model section that concern training and do not change what a step computes.
_FOR_EXPERIMENTS: dict[str, Any] = {
    "virtual_pipeline_model_parallel_size": None,
    "fp8_param": False,
    "fp4_param": False,
    "fp8_high_precision_warmup": 0.0,
    "fp8_high_precision_healing": 0.0,
    "fp8_high_precision_healing_parts": None,
    "fp8_guard": False,
}
_ONE_RANK: dict[str, Any] = {"tensor_model_parallel_size": 1, **ONE_STAGE}
_OF_SHARDS = ("tensorwise", "rowwise", "nvfp4", "custom")
_CUTS = {
    "tensor": "tensor_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
}
_SAME_NUMBERS = (
    *_CUTS.values(),
    "pipeline_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "moe_grouped_gemm",
    "fp8_backend",
    "fp8_quantizer_factory",
)
"""Options of the model that do not change a run's numbers, except for scales of shards."""
_NEAR = 0.02
"""Relative difference below which losses count as equal."""


def other_shards(
    saved: Mapping[str, Any], model: Any, plans: Iterable[SitePlan], command: str | None = "diagnose"
) -> str | None:
    """A line for the user if this launch has different scales than the run had, else None.

    Args:
        saved: the manifest's layout; empty: unknown.
        model: the model section, in this launch's layout.
        plans: plans of all sites.
        command: which can run in the run's layout; None: there is none.
    """
    sizes = [
        f"{kind} {getattr(model, name)} and not {saved[kind]}"
        for kind, name in _CUTS.items()
        if saved.get(kind) is not None and saved[kind] != getattr(model, name)
    ]
    names = {recipe_name(plan.recipe) for plan in plans if plan.recipe is not None}
    recipes = [name for name in _OF_SHARDS if name in names]
    if not sizes or not recipes:
        return None
    # Data-parallel ranks hold the same weights; they are needed only if they hold different experts.
    copies = saved.get("data", 1) if saved.get("expert", 1) > 1 else 1
    ranks = math.prod(saved.get(kind) or 1 for kind in ("tensor", "pipeline", "context")) * copies
    remedy = f"; megatron-fp8 launch --ranks {ranks} {command} has the run's" if command else ""
    return (
        f"not the run's layout (parallel sizes: {', '.join(sizes)}): {' and '.join(recipes)} scales belong to other"
        f" shards{remedy}"
    )


@dataclass
class Replay:
    """A run at a checkpoint.

    Attributes:
        runner: its model and batches.
        run, folder, iteration: its config, the checkpoint's folder, and the checkpoint's iteration.
        first: iteration of the first batch.
        lines: notes for the user.
        recorded: the loss that the run recorded for the first batch, None if unknown or if this replay deliberately
            computes something else.
    """

    runner: CheckpointRunner
    run: RunConfig
    folder: Path
    iteration: int
    first: int
    lines: list[str]
    recorded: float | None = None

    def good_loss(self) -> float | None:
        """The run's lowest mean loss over ten iterations, up to the checkpoint; None if there are fewer."""
        lines = RunRecord(run_folder_of(self.folder)).metrics()
        losses = [line.content["lm_loss"] for line in lines if line.iteration() <= self.iteration]
        losses = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        return min((sum(losses[i : i + 10]) / 10 for i in range(len(losses) - 9)), default=None)

    def with_recorded_loss(self, diagnosis: Diagnosis) -> Diagnosis:
        """The diagnosis; its verdict begins with a note if the run recorded another loss for the first batch."""
        if diagnosis.attribution is None or self.recorded is None:
            return diagnosis
        loss = diagnosis.attribution.planned.losses[0]
        # Sums have another order, and dropout is drawn again.
        if abs(loss - self.recorded) <= max(3 * statistics.stdev(diagnosis.losses), _NEAR * self.recorded):
            return diagnosis
        note = (
            f"This is not what the run computed: as planned the loss of iteration {self.first} is {loss:.4g}, and the run"
            f" recorded {self.recorded:.4g}. The rest holds for this checkpoint in this layout: check that both are the"
            " run's."
        )
        return replace(diagnosis, verdict=f"{note} {diagnosis.verdict}", clean=False)


def replay(
    checkpoint: str,
    launch: Any,
    options: list[str],
    *,
    config: str | None = None,
    recipe: str | None = None,
    fp8: str | None = None,
    iteration: int | None = None,
    batches: int = 4,
) -> Replay:
    """Build and load the model of a run. Collective over the launch's ranks, whose start-up checks it runs.

    Args:
        checkpoint: a checkpoint's folder, a folder of checkpoints, or a run's folder.
        options, config, recipe, fp8: as in restore.restore.
        iteration: iteration of the first batch, with the newest checkpoint before it; None: the latest checkpoint and
            its next batch.
        batches: number of batches, each of one iteration.

    Raises ValueError on every rank if there is no checkpoint, if it is damaged or of another model, or if an option is
    wrong.
    """
    folder, manifest = _checkpoint(Path(checkpoint), iteration)
    saved, beyond = checkpoint_compat.run_of_manifest(manifest), later_training_note(Path(checkpoint), folder)
    if beyond and (now := RunRecord(run_folder_of(folder)).config()).get("model"):
        saved = now  # the run's settings: the checkpoint may be an import, which no recipe trained
        beyond.append(f"settings are those of {run_folder_of(folder) / 'config.yaml'}, which trained on")
    run, tokenizer, lines = read_run(folder, manifest, saved, options, config=config, recipe=recipe, fp8=fp8)
    _apply_settings(run, launch.world_size)
    if not quantizes(run.model):
        raise ValueError(
            f"{str(folder)!r} is of a run in BF16, which has nothing in FP8 to diagnose: give --recipe NAME to see what a"
            " recipe would cost it"
        )
    vocab_size = padded_vocab_size(run.model, tokenizer.vocab_size)
    settings = transformer_config(run.model)
    parallel.check_layout(run.model, run.train, launch.world_size, launch.variables)
    datasets.check_tokenizer(run.data, tokenizer, run.model.vocab_size or run.model.padded_vocab_size or 0)
    join(folder, manifest, run, tokenizer, launch)
    prefixes = datasets.find_data(run.data, tokenizer, run.train)
    agree_on_inputs("data", launch, prefixes)
    datasets.check_data(prefixes, vocab_size)
    data = datasets.build_datasets(prefixes, run.data, run.train, tokenizer, vocab_size)
    _check_batches(batches, data[0], run)
    chunks = build_chunks(settings, run, vocab_size)
    lines += beyond
    if bad := load_weights(folder, chunks[0]):
        lines.append(f"{bad} holds NaN or Inf")
    check_plan(chunks)
    first = manifest.iteration + 1 if iteration is None else iteration
    skipped_samples = (first - manifest.iteration - 1) * run.train.global_batch_size
    if skipped_samples:
        lines.append(
            f"the weights are those after iteration {manifest.iteration}, the batch is that of {first}"
        )
    runner = _runner(run, chunks, data[0], folder, manifest, skipped_samples, batches)
    if line := other_shards(manifest.facts.get("layout") or {}, run.model, runner.plans.values()):
        lines.append(line)
    unchanged = not skipped_samples and config is None and recipe is None and fp8 is None
    recorded = (
        recorded_loss(run_folder_of(folder), first, saved.get("model", {}), options) if unchanged else None
    )
    return Replay(runner, run, folder, manifest.iteration, first, lines, recorded)


def _checkpoint(path: Path, iteration: int | None) -> tuple[Path, Manifest]:
    """The checkpoint to replay from. Raises ValueError where there is none, or where none says what data were read."""
    folder = find_checkpoint(path) if iteration is None else newest_checkpoint_before(path, iteration)
    manifest = read_manifest(folder)
    if "consumed_samples" not in manifest.state:
        raise ValueError(
            f"the checkpoint {str(folder)!r} does not say what data its run has read: it was saved from Python, or"
            " imported; diagnose a model from Python with megatron_fp8.diagnose(model, loss_of, batches)"
        )
    return folder, manifest


def _runner(
    run: RunConfig,
    chunks: list[Any],
    data: Any,
    folder: Path,
    manifest: Manifest,
    skipped_samples: int,
    batches: int,
) -> CheckpointRunner:
    """The runner of batches from ``skipped_samples`` after the checkpoint's, with its loss scale and Adam moments."""
    scaler = manifest.state.get("loss_scaler") or {}
    return CheckpointRunner(
        run,
        chunks,
        data,
        manifest.state["consumed_samples"] + skipped_samples,
        batches,
        loss_scale=float(scaler.get("scale", 1.0)) if run.model.fp16 else 1.0,
        moments={
            id(parameter): {**moments, "step": manifest.state["optimizer_step"]}
            for parameter, moments in load_moments(folder, chunks)
        },
        left_out=ranges_of(manifest.state.get("left_out", [])),
    )


def newest_checkpoint_before(path: Path, iteration: int) -> Path:
    """The newest checkpoint before an iteration, in a run or a folder of checkpoints. Raises ValueError."""
    if iteration < 1:
        raise ValueError(f"--iteration {iteration} must be at least 1")
    last = find_checkpoint(path)
    done = _last_iteration(last)
    if iteration > done + 1:
        raise ValueError(
            f"--iteration {iteration}: the run's last iteration is {done}; give one up to {done + 1}, whose batch is the"
            " next one"
        )
    earlier = [folder for folder in complete_checkpoints(last.parent) if iteration_of(folder) < iteration]
    if not earlier:
        have = ", ".join(folder.name for folder in complete_checkpoints(last.parent))
        raise ValueError(
            f"--iteration {iteration}: no checkpoint in {str(last.parent)!r} is from before it, there are {have}; train"
            " with --checkpoint.save_interval and --checkpoint.keep_last=0 to keep more"
        )
    return earlier[-1]


def _last_iteration(checkpoint: Path) -> int:
    """A run's last iteration, from its records; without records, its planned last iteration."""
    done = [line.iteration() for line in RunRecord(run_folder_of(checkpoint)).metrics()]
    manifest = read_manifest(checkpoint)
    if done:
        return max(*done, manifest.iteration)
    return max(manifest.iteration, int(manifest.facts.get("run", {}).get("train", {}).get("train_iters", 0)))


def _check_batches(batches: int, data: Any, run: RunConfig) -> None:
    """Raise ValueError if batches would repeat samples: copies would distort the spread."""
    have = len(data) // run.train.global_batch_size
    if batches > have:
        raise ValueError(
            f"--batches {batches}: the run's training data has {len(data)} samples, which are {have} batches of"
            f" {run.train.global_batch_size}; give {have} at most"
        )


def _apply_settings(run: RunConfig, world_size: int) -> None:
    """Change a run's settings for experiments: no overlap, whole gradients on every data-parallel rank."""
    values = {**_FOR_EXPERIMENTS, **(_ONE_RANK if world_size == 1 else {})}
    for name, value in values.items():
        setattr(run.model, name, value)
    run.optimizer.use_distributed_optimizer = False
    run.optimizer.overlap_grad_reduce = run.optimizer.overlap_param_gather = False
    run.optimizer.reuse_grad_buf_for_mxfp8_param_ag = None


def recorded_loss(
    run_folder: Path, iteration: int, saved_model: Mapping[str, Any], options: Iterable[str]
) -> float | None:
    """The loss that the run recorded for an iteration, if a replay with these options should reproduce it; else None.

    Args:
        saved_model: the model section of the run.

    With warm-up or healing the run may have computed it in high precision, which a replay does not.
    """
    option_names = (option.partition("=")[0].removeprefix("--model.") for option in options)
    if any(name not in _SAME_NUMBERS and not name.startswith("--checkpoint.") for name in option_names):
        return None
    if not (saved_model.get("fp8") or saved_model.get("fp4")) or any(
        saved_model.get(f"fp8_high_precision_{phase}") for phase in ("warmup", "healing")
    ):
        return None
    for line in RunRecord(run_folder).metrics():
        loss = line.content["lm_loss"]
        if line.iteration() == iteration and loss is not None:
            return float(loss) if math.isfinite(loss) else None
    return None
