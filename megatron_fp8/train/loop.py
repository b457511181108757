"""Training: the order of one step, the validation, and the iterations around them.

One step is: batches -> Megatron-Core's forward/backward schedule -> finalise gradients (inside the
schedule; the FP8
iteration ends there) -> agree on loss and health -> optimizer -> learning rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from ..mcore.iteration import iteration_counts
from ..mcore.optimizer.loss_scaler import scalers
from .checkpoints import Checkpoints, checkpoint_before
from .config.run_config import RunConfig
from .data.datasets import batches
from .failure import TrainingFailed, first_not_finite
from .liveness import Liveness
from .metrics import Display, IterationMetrics, MetricsWriter, bf16_peak, finite, peak_memory
from .mtp import take_mtp_loss
from .stop import StopRequest


class Trainer:
    """One rank's part of a training run.

    Args:
        chunks: model chunks in their DistributedDataParallel, one per virtual stage.
        datasets: training and validation data sets (the second may be None).
        writer, display: on rank 0; None elsewhere.
        after_first_step: called on every rank once sites have run.
        checkpoints: saves; None saves nothing.
        stop: when to save and return before all iterations are done.

    `finished` and `samples` are the iterations that were done before, and the samples that they consumed.
    """

    def __init__(
        self,
        run: RunConfig,
        chunks: list[Any],
        optimizer: Any,
        scheduler: Any,
        datasets: list[Any],
        flops_per_token: float,
        writer: MetricsWriter | None = None,
        display: Display | None = None,
        after_first_step: Callable[[], None] = lambda: None,
        checkpoints: Checkpoints | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        self.run, self.chunks, self.optimizer, self.scheduler = run, chunks, optimizer, scheduler
        self.datasets, self.writer, self.display = datasets, writer, display
        self.after_first_step = after_first_step
        self.checkpoints, self.stop = checkpoints, stop or StopRequest()
        self.finished = self.samples = 0
        self.liveness = Liveness(run.train.max_skipped_steps)
        self.tokens_per_step = run.train.global_batch_size * run.train.seq_length
        self._flops_per_step = self.tokens_per_step * flops_per_token
        self._schedule = get_forward_backward_func()
        data_ranks = parallel_state.get_data_parallel_world_size()
        self._microbatches = run.train.global_batch_size // (run.train.micro_batch_size * data_ranks)

    def train(self) -> dict[str, float]:
        """Iterations after `finished`, validations and checkpoints, until all are done or a stop is requested.

        Returns the first and last loss, the last validation's, and 'iteration': the last one done.
        """
        wanted = self.run.train
        training = self._iterators(self.datasets[0], self.samples)
        summary: dict[str, float] = {"iteration": self.finished}
        for iteration in range(self.finished + 1, wanted.train_iters + 1):
            metrics = self._timed_step(iteration, training)
            summary["iteration"] = iteration
            if iteration == self.finished + 1:
                self.after_first_step()
            if metrics.lm_loss is not None:
                summary.setdefault("first_loss", metrics.lm_loss)
                summary["last_loss"] = metrics.lm_loss
            if self.writer and self.display:
                self.writer.iteration(metrics)
                self.display.iteration(metrics)
            self._look(metrics)
            due = wanted.eval_interval and iteration % wanted.eval_interval == 0
            if wanted.eval_iters and (due or iteration == wanted.train_iters):
                loss = self.validate()
                summary["validation_loss"] = loss
                if self.writer and self.display:
                    self.writer.validation(iteration, loss)
                    self.display.say(
                        f"iteration {iteration:>5}/{wanted.train_iters}  validation loss {loss:.4f}"
                    )
            stop = self.stop.reason is not None
            if self.checkpoints and (stop or self.checkpoints.due(iteration)):
                self.checkpoints.save(iteration, self.samples)
            if stop:
                break
        if self.checkpoints:
            self.checkpoints.close()
        self._check_end(summary)
        return summary

    def _look(self, metrics: IterationMetrics) -> None:
        """Say what a step tells of the training. Raises TrainingFailed, on all ranks, when it stands still."""
        curable = any(scaler.rule.scale > scaler.rule.min_scale for scaler in scalers(self.optimizer))
        live = self.liveness
        said = live.step(metrics.iteration, metrics.lm_loss, skipped=bool(metrics.skipped), curable=curable)
        if said and self.display:
            self.display.say(said)
        if live.hopeless:
            self._fail(
                f"{live.row} steps in a row were skipped, because a loss, a gradient or an FP8 cast was not finite",
                metrics.iteration - live.row,
            )

    def _check_end(self, summary: dict[str, float]) -> None:
        """Raise TrainingFailed, on all ranks, if what was trained is worth nothing."""
        done, row, taken = int(summary["iteration"]), self.liveness.row, self.liveness.taken
        if row > taken:
            what = (
                f"of {row + taken} steps the last {row} were skipped" if taken else "no step could be taken"
            )
            self._fail(what, done - row)
        if not math.isfinite(summary.get("validation_loss", 0.0)):
            self._fail("the last validation's loss is not finite", done - 1)
        if row:
            found = first_not_finite(self.chunks)
            if found and found[0] == "weight":
                self._fail(f"the last {row} steps were skipped", done - row)

    def _fail(self, what: str, last_good: int) -> NoReturn:
        """Raise TrainingFailed: what happened, where, and the newest checkpoint of at most iteration `last_good`."""
        found = first_not_finite(self.chunks)
        where = f"; first, {found[1]}" if found else ""
        saved = checkpoint_before(self.run, last_good)
        back = (
            f"Go back to {saved} (--resume={saved})" if saved else "No checkpoint is from before: start again"
        )
        skipped, steps = self.liveness.skipped, self.liveness.skipped + self.liveness.taken
        cure = "a lower optimizer.lr, a longer optimizer.lr_warmup_iters or other data"
        if self.run.model.fp16 and self.run.optimizer.loss_scale:
            cure = (
                f"a lower optimizer.loss_scale than {self.run.optimizer.loss_scale:g} or without it, {cure}"
            )
        raise TrainingFailed(
            f"training failed: {what}{where}. {back}, with {cure}. {skipped} of {steps} steps were skipped."
        )

    def _timed_step(self, iteration: int, training: list[Iterator[Any]]) -> IterationMetrics:
        start = time.perf_counter()
        learning_rate = max(group["lr"] for group in self.optimizer.param_groups)
        loss_scale = float(self.optimizer.get_loss_scale()) if self.run.model.fp16 else None
        loss, updated, grad_norm = self.step(training)
        mtp = take_mtp_loss(self._microbatches, self._device) if self.run.model.mtp_num_layers else None
        self.samples += self.run.train.global_batch_size
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        counts, peak = iteration_counts(), bf16_peak()
        return IterationMetrics(
            iteration=iteration,
            lm_loss=finite(loss),
            grad_norm=finite(grad_norm),
            learning_rate=learning_rate,
            tokens=self.samples * self.run.train.seq_length,
            tokens_per_s=self.tokens_per_step / seconds,
            mfu=self._flops_per_step / seconds / (peak * dist.get_world_size()) if peak else None,
            skipped=int(not updated),
            loss_scale=loss_scale,
            nonfinite=counts["nonfinite"],
            fp8_gemms=counts["fp8_gemms"],
            hp_gemms=counts["hp_gemms"],
            amax_collectives=counts["amax_collectives"],
            peak_memory=peak_memory(),
            mtp_loss=finite(mtp),
        )

    def step(self, training: list[Iterator[Any]]) -> tuple[float, bool, float | None]:
        """One optimizer step: loss, whether the step was taken (on all ranks or on none), gradient norm.

        A NaN or an Inf in a gradient, or met by an FP8 cast (which saturates it), makes the optimizer skip.
        """
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._forward_backward(training, self._microbatches, forward_only=False)
        loss = self._mean(losses)
        updated, grad_norm, _ = self.optimizer.step()
        if updated:
            self.scheduler.step(1)
        return loss, updated, grad_norm if self.run.optimizer.clip_grad else None

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the first `eval_iters` global batches of the validation data, the same each time."""
        for chunk in self.chunks:
            chunk.eval()
        validation = self._iterators(self.datasets[1])
        total: list[Tensor] = []
        for _ in range(self.run.train.eval_iters):
            total += self._forward_backward(validation, self._microbatches, forward_only=True)
        return self._mean(total)

    @torch.no_grad()
    def first_loss(self) -> float:
        """Loss of the first training batch, without a step."""
        for chunk in self.chunks:
            chunk.eval()
        few = self._microbatches if len(self.chunks) > 1 else 1  # interleaved stages need as many as they are
        return self._mean(self._forward_backward(self._iterators(self.datasets[0]), few, forward_only=True))

    def _iterators(self, dataset: Any, samples: int = 0) -> list[Iterator[Any]]:
        """One iterator per model chunk: a pipeline's chunks read the same batches at different times."""
        return [batches(dataset, self.run.train, samples) for _ in self.chunks]

    def _forward_backward(
        self, iterators: list[Iterator[Any]], microbatches: int, *, forward_only: bool
    ) -> list[Tensor]:
        """Megatron-Core's schedule over `microbatches`: [loss sum, tokens] of each, on the last stage."""
        several = len(self.chunks) > 1
        return self._schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if several else iterators[0],
            model=self.chunks if several else self.chunks[0],
            num_microbatches=microbatches,
            seq_length=self.run.train.seq_length,
            micro_batch_size=self.run.train.micro_batch_size,
            forward_only=forward_only,
        )

    @property
    def _device(self) -> torch.device:
        """Where collectives are."""
        return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")

    def _mean(self, losses: list[Tensor]) -> float:
        """Mean loss per token over all ranks, which also agree on stopping here.

        Only the ranks of last stages have losses. Tensor-parallel ranks hold the same ones, which leaves the mean as
        it is.
        """
        sums = torch.tensor([0.0, 0.0, *self.stop.votes()], dtype=torch.float64, device=self._device)
        for loss in losses:
            sums[:2] += loss.double()
        dist.all_reduce(sums)
        total, tokens, *votes = sums.tolist()
        self.stop.agree(votes)
        return total / tokens


def forward_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Megatron-Core's forward step: the model's output for the next batch, and how its loss is computed."""
    batch = next(iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(mean_loss, batch["loss_mask"])


def mean_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of `losses` [batch, sequence] where `loss_mask` is 1, and [loss sum, tokens] for the record."""
    mask = loss_mask.reshape(-1).float()
    total = (losses.reshape(-1).float() * mask).sum()
    sums = torch.stack([total.detach(), mask.sum()])
    if parallel_state.get_context_parallel_world_size() > 1:  # the mean is over the whole sequence
        shared = sums.clone()
        dist.all_reduce(shared, group=parallel_state.get_context_parallel_group())
        return total / shared[1], sums
    return total / sums[1], sums
