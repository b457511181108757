"""The sections of a run's config, except the model's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...files.terminal import warn_user
from ...telemetry.settings import Selection, TelemetrySettings, te_settings
from ...telemetry.stat_registry import DEFAULT, TENSORS
from ...telemetry.telemetry import require_wandb


@dataclass
class TrainSection:
    """Length, batch sizes, validation and monitoring of the training."""

    train_iters: int = 100
    """Iterations (optimizer steps) to run."""
    micro_batch_size: int = 4
    """Sequences per forward pass and data-parallel rank."""
    global_batch_size: int = 8
    """Sequences per optimizer step over all ranks; more than the micro-batches hold is accumulated."""
    seq_length: int = 256
    """Tokens per sequence."""
    seed: int = 1234
    """Seeds weights, data order and dropout. Same config and seed: same losses, to the bit."""
    eval_interval: int = 50
    """Iterations between validations; one more follows the last iteration. 0: only that one."""
    eval_iters: int = 8
    """Global batches per validation, always the same ones. 0: no validation."""
    log_interval: int = 10
    """Iterations between printed lines when the output is no terminal. metrics.jsonl has every iteration."""
    deterministic: bool | None = None
    """Same losses to the bit, at a cost on GPUs (docs/performance.md), where what cannot be so is an error. Without a
    value: on CPUs alone."""
    threads: int = 0
    """CPU threads per rank, at most 1024; 0: OMP_NUM_THREADS if above 1, else the machine's cores shared among its ranks.
    Launchers of several ranks set OMP_NUM_THREADS=1."""
    max_skipped_steps: int = 10
    """Skipped steps in a row that end the run as failed; 0: never. Those of a loss scale that can still fall do not
    count."""
    rewind_on_spike: int = 0
    """How often a run may go back to its last checkpoint after a loss spike and leave out the samples since; 0: never.
    A spike is reported in any case."""
    check_replicas_every: int = 0
    """Iterations between checks that replicated state is equal on all ranks (docs/reliability.md); 0: at saves and the
    end."""
    distributed_timeout_minutes: int = 30
    """A collective that waits longer than this ends the run."""
    watchdog: float = 15.0
    """Seconds of an iteration after which every rank writes where it is (docs/reliability.md); 0: never. At least 1, and
    three times as long as the iterations before, where that is more. With 0 a slow rank is not named."""
    count_saved: bool = False
    """Count in the first iteration the bytes that a micro-batch keeps for its backward (report.json: saved_bytes)."""
    cuda_graphs: bool = False
    """Replay the forward and backward passes as a CUDA graph (docs/performance.md). What a replay cannot follow is an
    error."""


@dataclass
class OptimizerSection:
    """Adam with decoupled weight decay, linear warm-up, then decay; Megatron-Core's."""

    lr: float = 1e-3
    """Largest learning rate, reached after the warm-up."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_warmup_iters: int = 0
    """Iterations over which the learning rate rises linearly from 0."""
    lr_decay_iters: int | None = None
    """Iteration at which min_lr is reached; None: the last one."""
    lr_decay_style: Literal["cosine", "linear", "constant", "inverse-square-root"] = "cosine"
    """Shape of the decay."""
    weight_decay: float = 0.1
    """Decoupled weight decay; biases and norms have none."""
    adam_beta1: float = 0.9
    """Decay of Adam's mean of gradients."""
    adam_beta2: float = 0.95
    """Decay of Adam's mean of squared gradients."""
    adam_eps: float = 1e-8
    """Added to the denominator of Adam's update."""
    clip_grad: float = 1.0
    """Largest norm of the whole gradient; 0: no clipping, no norm."""
    state_dtype: Literal["float32", "fp8"] = "float32"
    """Dtype of Adam's moments; fp8: the first in E4M3, the second in float16, 3.06 bytes a parameter instead of 8."""
    loss_scale: float | None = None
    """With model.fp16: a constant loss scale; None: a dynamic one (docs/unstable.md)."""
    initial_loss_scale: float = 2.0**32
    """The first loss scale. Too large costs a skipped step for each halving."""
    min_loss_scale: float = 1.0
    """The loss scale is never lower."""
    max_loss_scale: float = 2.0**32
    """The loss scale is never higher. The one name here that Megatron-Core does not have."""
    loss_scale_window: int = 1000
    """Consecutive steps without an overflow after which the loss scale doubles."""
    hysteresis: int = 2
    """Consecutive overflows after which the loss scale is halved; each one skips its step."""
    use_distributed_optimizer: bool = False
    """Shard the optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather parameters during the forward pass (needs use_distributed_optimizer and overlap_grad_reduce)."""
    reuse_grad_buf_for_mxfp8_param_ag: bool | None = None
    """With model.fp8_param: send weights that travel in BF16 (rowwise, mxfp8) through the gradient buffer; None: yes."""


@dataclass
class DataSection:
    """What to train on. Without paths: the Python standard library's own source files, as bytes."""

    paths: list[str] = field(default_factory=list)
    """Files of text, JSONL, CSV, Parquet, Arrow or JSON, folders of them, or prefixes of Megatron .bin/.idx pairs.
    Parquet, Arrow and JSON need the package datasets."""
    column: str | None = None
    """The column of records to learn: a text, or a chat's messages; None: messages, or else text."""
    loss: Literal["all", "assistant"] = "all"
    """Which tokens have a loss: all, or the assistant's of chats (messages)."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer.json; bytes or None: every byte is a token."""
    split: str = "96,4,0"
    """Weights of the training, validation and test documents."""
    cache_dir: str | None = None
    """Where prepared data is kept; None: ~/.cache/megatron_fp8/data."""


@dataclass
class CheckpointSection:
    """Saving, so that a run can be continued: `--resume=auto` (the default) takes up the latest checkpoint."""

    save_interval: int | Literal["never"] = 0
    """Iterations between checkpoints; one more follows the last iteration, or a stop. 0: that one alone; never: none."""
    keep_last: int = 2
    """Complete checkpoints to keep; older ones are removed after a save. 0 keeps all."""
    async_save: bool = False
    """Write while training goes on, from a copy in CPU memory."""
    folder: str | None = None
    """Where checkpoints are; None: the folder checkpoints in run_dir."""
    accept: list[str] = field(default_factory=list)
    """Settings that may differ from the checkpoint's, such as model.rotary_base for a longer context."""

    @property
    def saves(self) -> bool:
        """Whether the run leaves a checkpoint."""
        return self.save_interval != "never"


@dataclass
class TelemetrySection:
    """What is measured of tensors and codes while training (docs/telemetry.md): telemetry.jsonl and TensorBoard."""

    every: int = 0
    """Measure every N-th iteration; 0: none."""
    windows: list[list[int | None]] = field(default_factory=list)
    """Measure only between [first, last] iterations, both included; null: no end. Empty: in all."""
    sites: list[str] = field(default_factory=lambda: ["*"])
    """Globs over names of sites or their last parts, or 're:' and a regular expression."""
    tensors: list[str] = field(default_factory=lambda: list(TENSORS))
    """Which tensors of a site."""
    statistics: list[str] = field(default_factory=lambda: list(DEFAULT))
    """Statistics by name; each tensor gets those that it can have."""
    what_if: list[str] = field(default_factory=list)
    """Recipes whose codes are measured as well, such as mxfp8 while another one trains."""
    te_config: str | None = None
    """A YAML file of Transformer Engine's debug features: what it logs is measured too."""
    wandb: bool = False
    """Send them to Weights & Biases too (WANDB_MODE=offline: without a network)."""

    def settings(self) -> TelemetrySettings:
        """The settings of the whole section. Raises ValueError for a wrong value."""
        windows: Any = tuple(map(tuple, self.windows))
        own = Selection(
            every=self.every,
            windows=windows,
            sites=tuple(self.sites),
            tensors=tuple(self.tensors),
            statistics=tuple(self.statistics),
            what_if=tuple(self.what_if),
        )
        selections: tuple[Selection, ...] = (own,) if own.every else ()
        if self.te_config is not None:
            option = f"telemetry.te_config={self.te_config!r}"
            try:
                selections += te_settings(Path(self.te_config)).selections
            except OSError as error:
                raise ValueError(f"{option} cannot be read: {error.strerror}") from error
            except ValueError as error:
                raise ValueError(f"{option}: {' '.join(str(error).split())}") from error
        return TelemetrySettings(selections)


def check_telemetry(section: TelemetrySection) -> None:
    """Raise ValueError if a value is wrong or has no effect."""
    settings = section.settings()
    default = TelemetrySection(te_config=section.te_config, every=section.every)
    if not section.every:
        for name, value in vars(section).items():
            unused = value != getattr(default, name) and not (name == "wandb" and settings.on)
            if unused:
                raise ValueError(
                    f"telemetry.{name}={value!r} has no effect without telemetry.every: give telemetry.every=10, say,"
                    " or leave it out."
                )
    if section.wandb:
        require_wandb()


def shorten_warmup(train: TrainSection, optimizer: OptimizerSection) -> None:
    """Shorten a warm-up that is as long as the run (train_iters lowered) to a tenth of the run, with a warning.

    Does nothing if lr_decay_iters is set.
    """
    warmup, iterations = optimizer.lr_warmup_iters, train.train_iters
    if optimizer.lr_decay_iters is None and warmup >= iterations:
        optimizer.lr_warmup_iters = iterations // 10
        warn_user(
            f"optimizer.lr_warmup_iters={warmup} would be all of a run of {iterations} iterations: the learning"
            f" rate warms up for {optimizer.lr_warmup_iters or 'none'}."
        )


def check_decay(train: TrainSection, optimizer: OptimizerSection) -> None:
    """Raise ValueError if the warm-up is as long as the decay."""
    decay = train.train_iters if optimizer.lr_decay_iters is None else optimizer.lr_decay_iters
    if optimizer.lr_warmup_iters >= decay:
        raise ValueError(
            f"optimizer.lr_warmup_iters={optimizer.lr_warmup_iters} must be less than the {decay} iterations of the decay"
            " (optimizer.lr_decay_iters, by default train.train_iters): lower it, or raise optimizer.lr_decay_iters."
        )


def check_rewinds(
    train: TrainSection, checkpoint: CheckpointSection, telemetry: TelemetrySection, guard: Any
) -> None:
    """Raise ValueError if a rollback is configured and would be impossible or incomplete."""
    if not train.rewind_on_spike:
        return
    option = f"train.rewind_on_spike={train.rewind_on_spike}"
    if checkpoint.save_interval in (0, "never"):
        raise ValueError(f"{option} needs checkpoints to go back to: give checkpoint.save_interval.")
    if guard:
        raise ValueError(
            f"{option} and model.fp8_guard={guard!r}: a rewind cannot take back the guard's moves. Leave one of them out."
        )
    if telemetry.settings().on:
        raise ValueError(
            f"{option} and telemetry: what was measured between a checkpoint and a spike would be recorded twice. Leave"
            " one of them out."
        )
