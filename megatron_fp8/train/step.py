"""One training step on one rank, in Megatron-Core's schedule.

A step is: batches -> Megatron-Core's forward/backward schedule -> finalise gradients (inside the schedule; there the
FP8 iteration ends, and loss and counts of NaN and Inf are reduced) -> optimizer -> learning rate.

The host waits for the GPU wherever it reads a number back. A step on one rank reads twice: loss, stop votes and counts
of NaN and Inf together; and in the optimizer the NaN check with the gradient norm (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_model_config
from torch import Tensor

from ..mcore.replica_check import describe_differences
from ..mcore.runtime import state_of, unwrap
from ..params.fp8_parameter import Fp8Parameter
from ..state.collectives import own_device
from .config.run_config import RunConfig
from .cuda_graph import IterationGraph
from .data.datasets import batches
from .health.finite_check import FiniteCheck
from .health.skipped_samples import Range
from .health.watchdog import Watchdog
from .launch.parallel import is_deterministic
from .stop import StopRequest


class Stepper:
    """Runs the steps, validations and first loss of one rank.

    Args:
        chunks: model chunks in their DistributedDataParallel, one per virtual stage.
        datasets: training and validation data sets (the second may be None).
        stop: gets all ranks' votes to stop with each reduction of the loss.
        watchdog: gets all ranks' working times with it.

    ``damaged``: whether the last step found NaN or Inf in some rank's optimizer or FP8 state.
    """

    def __init__(
        self,
        run: RunConfig,
        chunks: list[Any],
        optimizer: Any,
        scheduler: Any,
        datasets: list[Any],
        stop: StopRequest,
        watchdog: Watchdog,
    ) -> None:
        self.run, self.chunks, self.optimizer, self.scheduler = run, chunks, optimizer, scheduler
        self.datasets, self.stop, self.watchdog = datasets, stop, watchdog
        self._schedule = get_forward_backward_func()
        data_ranks = parallel_state.get_data_parallel_world_size()
        self._microbatches = run.train.global_batch_size // (run.train.micro_batch_size * data_ranks)
        self._losses: list[Tensor] = []  # [loss sum, tokens] of each micro-batch of this iteration
        self.check, self.damaged = FiniteCheck(chunks, optimizer), False
        self.saved: ActivationMemory | None = ActivationMemory(chunks) if run.train.count_saved else None
        self._graph: IterationGraph | None = None
        if run.train.cuda_graphs:
            self._graph = IterationGraph(chunks[0], self._training_passes, self._microbatches)

    def training_data(self, samples: int, left_out: Sequence[Range] = ()) -> list[Iterator[Any]]:
        """Iterators for ``step``, after `samples` samples, without those in `left_out`."""
        return [batches(self.datasets[0], self.run.train, samples, left_out) for _ in self.chunks]

    def mtp_loss(self) -> float | None:
        """The last step's mean loss of multi-token prediction; None without it. Collective."""
        if not self.run.model.mtp_num_layers:
            return None
        return take_mtp_loss(self._microbatches, own_device())

    def step(self, training: list[Iterator[Any]]) -> tuple[float, bool, float | None]:
        """Run one optimizer step. Return loss, whether the step was taken (on all ranks or on none), and gradient norm.

        NaN or Inf in a gradient, or found by an FP8 cast (which saturates it), makes the optimizer skip the step.
        """
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._losses.clear()
        state = state_of(unwrap(self.chunks[0]).config)
        if self._graph is not None and self._graph.ready():
            damage = self.check.turn()
            sums = self._reduced_sums(self._graph.run(training[0]), damage).tolist()
        else:
            with state.read_with_arenas(lambda: self._reduced_sums(self._losses, self.check.turn())) as sums:
                self._forward_backward(training, self._microbatches, forward_only=False)
        loss = self._agreed(sums)
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
        """The loss of the first training batch, without a step."""
        for chunk in self.chunks:
            chunk.eval()
        few = self._microbatches if len(self.chunks) > 1 else 1  # interleaved stages need a full set
        return self._mean(self._forward_backward(self._iterators(self.datasets[0]), few, forward_only=True))

    def state_is_damaged(self) -> bool:
        """Whether any rank's optimizer or FP8 state has NaN or Inf. Collective; one pass over all of it."""
        damaged = self.check.all()
        dist.all_reduce(damaged)
        return bool(damaged)

    def describe_differences(self) -> str:
        """Describe replicated state that differs between ranks; '' if none does. Collective; one pass over it."""
        return describe_differences(self.chunks, self.optimizer, redundant=is_deterministic(self.run.train))

    def _iterators(self, dataset: Any) -> list[Iterator[Any]]:
        """One iterator per model chunk: a pipeline's chunks read the same batches at different times."""
        return [batches(dataset, self.run.train) for _ in self.chunks]

    def _forward_backward(
        self, iterators: list[Iterator[Any]], microbatches: int, *, forward_only: bool
    ) -> list[Tensor]:
        """Megatron-Core's schedule over `microbatches`: returns [loss sum, tokens] of each, on the last stage."""
        several = len(self.chunks) > 1
        count = self.saved is not None and not forward_only and self.saved.bytes is None
        return self._schedule(
            forward_step_func=self._counted_forward_step if count else self._forward_step,
            data_iterator=iterators if several else iterators[0],
            model=self.chunks if several else self.chunks[0],
            num_microbatches=microbatches,
            seq_length=self.run.train.seq_length,
            micro_batch_size=self.run.train.micro_batch_size,
            forward_only=forward_only,
        )

    def _training_passes(self, batches: Iterator[Any]) -> list[Tensor]:
        return self._forward_backward([batches], self._microbatches, forward_only=False)

    def _counted_forward_step(self, iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
        """``forward_step`` in the first iteration; counts saved bytes of each chunk's first micro-batch."""
        assert self.saved is not None
        with self.saved.counting(model):
            return self._forward_step(iterator, model)

    def _forward_step(self, iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
        """``forward_step`` that also stores the sums for the reduction at the iteration's end."""
        output, loss_of = forward_step(iterator, model)

        def recorded_loss(losses: Tensor) -> tuple[Tensor, ...]:
            sums = loss_of(losses)
            self._losses.append(sums[-1])
            return sums

        return output, recorded_loss

    def _mean(self, losses: list[Tensor]) -> float:
        """Mean loss per token over all ranks; the ranks also agree on stopping here.

        Only the ranks of last stages have losses. Tensor-parallel ranks have equal losses, which does not change the
        mean.
        """
        return self._agreed(self._reduced_sums(losses).tolist())

    def _reduced_sums(self, losses: list[Tensor], damage: Tensor | None = None) -> Tensor:
        """float64 [4 + reasons to stop], summed over ranks: loss, tokens, damaged tensors, own seconds, votes.

        Collective; does not synchronise.
        """
        more = [self.watchdog.pace.share(), *self.stop.votes()]
        sums = torch.zeros(3 + len(more), dtype=torch.float64, device=own_device())
        for loss in losses:
            sums[:2] += loss.double()
        if damage is not None:
            sums[2] = damage
        for index, value in enumerate(more):
            if value:
                sums[3 + index] = value  # a fill: a copy from host memory would synchronise
        dist.all_reduce(sums)
        return sums

    def _agreed(self, sums: list[float]) -> float:
        """Return the mean loss; pass damage, working times and votes on."""
        total, tokens, damage, seconds, *votes = sums
        self.damaged = damage > 0
        self.watchdog.iterated(seconds)
        self.stop.agree(votes)
        return total / max(tokens, 1.0)  # samples without an assistant's answer have no tokens with a loss


def forward_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Megatron-Core's forward step: the model's output for the next batch, and its loss function."""
    batch = next(iterator)
    per_token = get_model_config(model).calculate_per_token_loss
    more = {"loss_mask": batch["loss_mask"]} if per_token else {}  # for layers of multi-token prediction
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **more)
    return output, partial(summed_loss if per_token else mean_loss, batch["loss_mask"])


def summed_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of `losses` [batch, sequence] where `loss_mask` is 1, number of those (int32), and [loss sum, tokens].

    Megatron-Core divides gradients by that number, summed over the global batch. The last is for the record.
    """
    mask = loss_mask.reshape(-1).float()
    total, tokens = (losses.reshape(-1).float() * mask).sum(), mask.sum()
    return total, tokens.int(), torch.stack([total.detach(), tokens])


def mean_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of `losses` [batch, sequence] where `loss_mask` is 1, and [loss sum, tokens] for the record."""
    mask = loss_mask.reshape(-1).float()
    total = (losses.reshape(-1).float() * mask).sum()
    sums = torch.stack([total.detach(), mask.sum()])
    if parallel_state.get_context_parallel_world_size() > 1:  # the mean over the whole sequence
        shared = sums.clone()
        dist.all_reduce(shared, group=parallel_state.get_context_parallel_group())
        return total / shared[1], sums
    return total / sums[1], sums


def take_mtp_loss(microbatches: int, device: torch.device) -> float:
    """Return the mean loss per token, in nats, over the iteration's micro-batches and the tokens ahead, and reset it.

    Collective over all ranks, after the iteration's forward passes; some pipeline stage must have the layers. NaN and
    Inf are passed through.

    Args:
        microbatches: number in one iteration on one rank.
        device: device for collectives.
    """
    layer_sums = MTPLossLoggingHelper.tracker.get("values")
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    if layer_sums is not None:  # float32 [mtp_num_layers], the sums over micro-batches
        sums[0], sums[1] = layer_sums.double().mean() / microbatches, 1.0
        MTPLossLoggingHelper.tracker.clear()
    dist.all_reduce(sums)
    total, ranks = sums.tolist()
    assert ranks, "mtp_num_layers without layers is refused before the first step"
    return total / ranks


class ActivationMemory:
    """Counts what one micro-batch of each model chunk saves: autograd's storages, once each, no parameters.

    Attributes:
        bytes: sum over the chunks counted so far; None before the first. Under pipeline parallelism a rank holds this
        much
            for each micro-batch in flight.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.bytes: int | None = None
        self._counted: list[Any] = []
        self._parameters = {
            tensor.untyped_storage().data_ptr()
            for chunk in chunks
            for parameter in chunk.parameters()
            for tensor in (parameter.stored_tensors() if isinstance(parameter, Fp8Parameter) else [parameter])
        }

    @contextmanager
    def counting(self, chunk: Any) -> Iterator[None]:
        """Context: count what is saved inside, unless this chunk was counted before. Changes no result."""
        if any(chunk is other for other in self._counted):
            yield
            return
        self._counted.append(chunk)
        # Referenced until the forward ends, so that no address is reused; a storage emptied meanwhile counts 0.
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._parameters:
                storages[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.bytes = (self.bytes or 0) + sum(storage.nbytes() for storage in storages.values())
