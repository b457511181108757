"""A checkpoint's model and its next batches, for experiments.

Weights are the checkpoint's float32 masters, rounded to the model's dtype. That also holds for a run with FP8 weights,
whose codes are made from the same values. The parallel layout is the run's, or one set by options. A single process is
one rank, and ``Replay.shards`` describes how that changes scales. Nothing is written to the run's folder.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from ..files.atomic_io import in_words, read_ordinary
from ..files.checkpoint import (
    complete_checkpoints,
    find_checkpoint,
    iteration_of,
    read_manifest,
    without_checksum,
)
from ..files.manifest import LARGEST
from ..files.strict_json import load_json
from ..linear.gemm_site import GemmSite
from ..mcore.checkpoint.moment_loader import load_moments
from ..mcore.checkpoint.training import load_weights
from ..mcore.names import named_parameters
from ..mcore.patches.megatron_fixes import settle_biases
from ..mcore.runtime import runtime_of
from ..mcore.sites import check_plan, fp8_linears, state_of, unwrap
from ..plan.overrides import check_overrides_match
from ..plan.site_plan import SitePlan
from ..state.collectives import device_of, own_device, union
from ..telemetry.model_runner import Pass, Table, adam_update, not_finite
from .config.model_section import padded_vocab_size, transformer_config
from .config.run_config import RunConfig
from .data import datasets
from .data.tokenizers import load_tokenizer, tokenizer_file
from .health.skipped_samples import Range, ranges_of
from .launch import parallel
from .launch.config_consistency import agree_on_inputs, run_facts
from .model import build_chunks
from .replay_check import OtherShards, other_shards, recorded_loss
from .resume import checkpoint_compat
from .resume.checkpoints import check_together
from .resume.restore import choose_recipe, keep_layers, refuse_its_code, run_of
from .run_record import RunRecord, run_folder_of, trained_beyond
from .step import forward_step

# Settings of a run's model section that concern training and do not change what a step computes.
_FOR_EXPERIMENTS: dict[str, Any] = {
    "virtual_pipeline_model_parallel_size": None,
    "fp8_param": False,
    "fp8_high_precision_warmup": 0.0,
    "fp8_high_precision_healing": 0.0,
    "fp8_guard": False,
}
_ONE_RANK: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
}


@dataclass
class Replay:
    """A run at a checkpoint.

    ``first``: iteration of the first batch; ``lines``: for the user; ``shards``: how scales of shards differ from the
    run's; ``recorded``: the loss that the run recorded for the first batch, None if unknown or if this replay
    deliberately computes something else.
    """

    subject: CheckpointRunner
    run: RunConfig
    folder: Path
    iteration: int
    first: int
    lines: list[str]
    shards: OtherShards | None = None
    recorded: float | None = None


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
        its
            next batch.
        batches: number of batches, each of one iteration.

    Raises ValueError on every rank if there is no checkpoint, if it is damaged or of another model, or if an option is
    wrong.
    """
    folder = find_checkpoint(Path(checkpoint)) if iteration is None else before(Path(checkpoint), iteration)
    manifest = read_manifest(folder)
    if "consumed_samples" not in manifest.state:
        raise ValueError(
            f"the checkpoint {str(folder)!r} does not say what data its run has read: it was saved from Python, or"
            " imported; diagnose a model from Python with megatron_fp8.diagnose(model, loss_of, batches)"
        )
    saved, beyond = checkpoint_compat.run_of_manifest(manifest), trained_beyond(Path(checkpoint), folder)
    if beyond and (now := RunRecord(run_folder_of(folder)).config()).get("model"):
        saved = now  # the run's settings: the checkpoint may be an import, which no recipe trained
        beyond.append(f"settings are those of {run_folder_of(folder) / 'config.yaml'}, which trained on")
    run = run_of(folder, saved, config, options)
    tokenizer = load_tokenizer(tokenizer_file(run.data.tokenizer, folder))
    accepted = checkpoint_compat.check(run, folder, manifest, tokenizer)
    keep_layers(run, manifest)
    _apply_settings(run, launch.world_size)
    choose_recipe(run.model, recipe, fp8)
    if not run.model.fp8:
        raise ValueError(
            f"{str(folder)!r} is of a run in BF16, which has nothing in FP8 to diagnose: give --recipe NAME to see what a"
            " recipe would cost it"
        )
    if config is None:
        refuse_its_code(folder, saved["model"], run.model)
    if folder_sites := _sites_of_report(run_folder_of(folder)):
        check_overrides_match(run.model.fp8_overrides, folder_sites)  # before a large model is built
    vocab_size = padded_vocab_size(run.model, tokenizer.vocab_size)
    settings = transformer_config(run.model)
    parallel.check_layout(run.model, run.train, launch.world_size, launch.variables)
    datasets.check_tokenizer(run.data, tokenizer, run.model.vocab_size or run.model.padded_vocab_size or 0)
    launch.barrier.agree("settings", run_facts(run, tokenizer, launch.world_size))
    agree_on_inputs("checkpoint", launch, [], (folder, manifest))
    parallel.join(launch, run.model, run.train)
    check_together(folder, manifest)
    prefixes = datasets.find_data(run.data, tokenizer, run.train)
    agree_on_inputs("data", launch, prefixes)
    datasets.check_data(prefixes, run.data, vocab_size)
    data = datasets.build_datasets(prefixes, run.data, run.train, tokenizer)
    _check_batches(batches, data[0], run)
    chunks = build_chunks(settings, run, vocab_size)
    lines = [*without_checksum(manifest), *beyond]
    if bad := load_weights(folder, chunks[0]):
        lines.append(f"{bad} holds NaN or Inf")
    check_plan(chunks)
    if accepted:
        lines.append(f"accepted, it computes something else: {', '.join(map(str, accepted))}")
    first = manifest.iteration + 1 if iteration is None else iteration
    skipped_samples = (first - manifest.iteration - 1) * run.train.global_batch_size
    if skipped_samples:
        lines.append(
            f"the weights are those after iteration {manifest.iteration}, the batch is that of {first}"
        )
    scaler = manifest.state.get("loss_scaler") or {}
    subject = CheckpointRunner(
        run,
        chunks,
        data[0],
        manifest.state["consumed_samples"] + skipped_samples,
        batches,
        loss_scale=float(scaler.get("scale", 1.0)) if run.model.fp16 else 1.0,
        moments={
            id(parameter): {**moments, "step": manifest.state["optimizer_step"]}
            for parameter, moments in load_moments(folder, chunks)
        },
        left_out=ranges_of(manifest.state.get("left_out", [])),
    )
    shards = other_shards(manifest.facts.get("layout") or {}, run.model, subject.plans.values(), options)
    if shards is not None:
        lines.append(shards.line())
    unchanged = not skipped_samples and config is None and recipe is None and fp8 is None
    recorded = (
        recorded_loss(run_folder_of(folder), first, saved.get("model", {}), options) if unchanged else None
    )
    return Replay(subject, run, folder, manifest.iteration, first, lines, shards, recorded)


def before(path: Path, iteration: int) -> Path:
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


def _sites_of_report(folder: Path) -> list[str]:
    """The GEMM sites in a run's report.json; [] if there is no file, or, with a warning, if it is damaged."""
    path = folder / "report.json"
    try:
        report = load_json(read_ordinary(path, LARGEST))
        return [site["name"] for site in report["sites"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        warnings.warn(
            f"{str(path)!r} does not say which sites the run has ({in_words(error)}): fp8_overrides are compared with"
            " the model's own once it is built.",
            stacklevel=2,
        )
        return []


def _apply_settings(run: RunConfig, world_size: int) -> None:
    """Change a run's settings for experiments: no overlap, whole gradients on every data-parallel rank."""
    values = {**_FOR_EXPERIMENTS, **(_ONE_RANK if world_size == 1 else {})}
    for name, value in values.items():
        setattr(run.model, name, value)
    run.optimizer.use_distributed_optimizer = False
    run.optimizer.overlap_grad_reduce = run.optimizer.overlap_param_gather = False
    run.optimizer.reuse_grad_buf_for_mxfp8_param_ag = None


class CheckpointRunner:
    """A run's model and its next batches, on all ranks of its layout (the interface is in telemetry/model_runner.py).

    Args:
        chunks: this rank's model chunks, in DistributedDataParallel.
        dataset: training data set.
        samples: number of samples read before the first batch.
        batches: number of batches, each as large as an iteration's.
        loss_scale: for float16.
        moments: id of a parameter -> its Adam state, as ``adam_update`` reads it; empty: updates are unknown.

    Raises ValueError if layers have their own GEMMs, or if no rank has FP8 layers.
    """

    def __init__(
        self,
        run: RunConfig,
        chunks: list[Any],
        dataset: Any,
        samples: int,
        batches: int,
        *,
        loss_scale: float,
        moments: Mapping[int, Mapping[str, Any]] | None = None,
        left_out: Sequence[Range] = (),
    ):
        self._loss_scale, self._moments, self._left_out = loss_scale, moments or {}, left_out
        self.run_config, self._chunks, self._dataset, self._samples = run, chunks, dataset, samples
        self.batches = batches
        for chunk in chunks:
            chunk.train()
        self._config = unwrap(chunks[0]).config
        self._config.finalize_model_grads_func = finalize_model_grads
        if loss_scale != 1.0:
            self._config.grad_scale_func = lambda loss: loss * loss_scale
        self._schedule = get_forward_backward_func()
        self._microbatches = run.train.global_batch_size // (
            run.train.micro_batch_size * parallel_state.get_data_parallel_world_size()
        )
        self.sites = _sites(chunks)
        self.plans: dict[str, SitePlan] = {}
        self.plans |= union({name: site.plan for name, site in self.sites.items()})
        if not self.plans:
            raise ValueError("no layer of this run has a GEMM in FP8: there is nothing to diagnose")
        self._names = {n: p for chunk in chunks for n, p in named_parameters(unwrap(chunk))}

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Context in which passes change no amax history and end no iteration."""
        with ExitStack() as stack:
            stack.enter_context(state_of(self._config).unrecorded())
            yield

    def run(self, batch: int) -> Pass:
        """Forward and backward of one iteration's batch. Collective."""
        first = self._samples + batch * self.run_config.train.global_batch_size
        parallel.seed_streams(zlib.crc32(f"{self.run_config.train.seed} {first}".encode()))
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        counts = state_of(self._config).counts
        before = counts.fp8_gemms
        several = len(self._chunks) > 1
        train = self.run_config.train
        iterators = [datasets.batches(self._dataset, train, first, self._left_out) for _ in self._chunks]
        losses = self._schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if several else iterators[0],
            model=self._chunks if several else self._chunks[0],
            num_microbatches=self._microbatches,
            seq_length=self.run_config.train.seq_length,
            micro_batch_size=self.run_config.train.micro_batch_size,
            forward_only=False,
        )
        settle_biases(
            runtime_of(self._config), skipped=True
        )  # no step follows: experts' biases do not change
        sums = torch.tensor([0.0, 0.0, counts.fp8_gemms - before], dtype=torch.float64, device=own_device())
        for loss in losses:
            sums[:2] += loss.double()
        dist.all_reduce(sums)
        total, tokens, gemms = sums.tolist()
        buffers: Any = {name: p for name, p in self._names.items() if p.requires_grad}
        gradients = {name: parameter.main_grad.clone() for name, parameter in buffers.items()}
        return Pass(total / tokens, gradients, int(gemms))

    def merge(self, table: Table) -> Table:
        """Sum a table over the ranks that hold different elements; replicas count once. Collective."""
        own_rows = {name: row for name, row in table.items() if _counts_here(self._names[name])}
        widths = union({name: len(row) for name, row in own_rows.items()})
        zeros = {name: (0.0,) * width for name, width in widths.items()}
        flat = [value for name in zeros for value in own_rows.get(name, zeros[name])]
        sums = torch.tensor(flat, dtype=torch.float64, device=device_of(None))
        dist.all_reduce(sums)
        flat_sums = iter(sums.tolist())
        return {name: tuple(next(flat_sums) for _ in range(width)) for name, width in widths.items()}

    def not_finite(self) -> Table:
        """As Subject.not_finite. Collective."""
        return self.merge(not_finite(self._names))

    def update_of(self, name: str, gradient: torch.Tensor, norm: float) -> torch.Tensor | None:
        """Adam's update from the checkpoint's moments; gradients are scaled and clipped as in training."""
        moments = self._moments.get(id(self._names[name]))
        if moments is None:
            return None
        optimizer, factor = self.run_config.optimizer, 1 / self._loss_scale
        if optimizer.clip_grad:
            factor *= min(1.0, optimizer.clip_grad / (norm * factor + 1e-6))
        group = {"betas": (optimizer.adam_beta1, optimizer.adam_beta2), "eps": optimizer.adam_eps}
        return adam_update(gradient * factor, moments, group)


def _sites(chunks: list[Any]) -> dict[str, GemmSite]:
    sites = {}
    for linear in fp8_linears(chunks):
        site = linear.fp8_site
        if not isinstance(site, GemmSite):
            raise ValueError(
                f"{site.plan.name} is a layer of Transformer Engine, which has its own GEMMs: diagnose with"
                " --model.fp8_backend=emulated (or native)"
            )
        if site.is_fp8:
            sites[site.plan.name] = site
    return sites


def _counts_here(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank's elements count: they are not a replica of another rank's."""
    shared = getattr(parameter, "shared", False) and not parallel_state.is_pipeline_first_stage()
    split = getattr(parameter, "tensor_model_parallel", False)
    if not getattr(parameter, "allreduce", True):  # an expert's
        return parallel_state.get_expert_data_parallel_rank() == 0
    if shared or parallel_state.get_data_parallel_rank(with_context_parallel=True):
        return False
    return split or parallel_state.get_tensor_model_parallel_rank() == 0
