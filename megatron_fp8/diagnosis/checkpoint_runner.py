"""Runs a checkpoint's model by the training's own schedule, on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from ..fp8_utils import get_fp8_recipe
from ..linear.gemm_site import GemmSite
from ..mcore.names import named_parameters
from ..mcore.patches.megatron_fixes import settle_biases
from ..mcore.runtime import runtime_of
from ..mcore.sites import fp8_linears, site_with, state_of, unwrap
from ..plan.site_plan import SitePlan
from ..recipe import Recipe
from ..state.collectives import device_of, own_device, union
from ..train.config.run_config import RunConfig
from ..train.data import datasets
from ..train.health.skipped_samples import Range
from ..train.launch import parallel
from ..train.step import forward_step
from .model_runner import Pass, Table, adam_update, not_finite


class CheckpointRunner:
    """A run's model and its next batches, on all ranks of its layout (the interface is in model_runner.py).

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
        self._linears = _linears(chunks)
        self.sites: dict[str, GemmSite] = {name: linear.fp8_site for name, linear in self._linears.items()}
        self.plans: dict[str, SitePlan] = union({name: site.plan for name, site in self.sites.items()})
        if not self.plans:
            raise ValueError("no layer of this run has a GEMM in FP8: there is nothing to diagnose")
        self._names = {n: p for chunk in chunks for n, p in named_parameters(unwrap(chunk))}

    def site_with(self, name: str, overrides: Mapping[str, Any]) -> GemmSite:
        """This rank's site of that name, as the run would plan it with these overrides after its own."""
        own = getattr(self._config, "fp8_overrides", None) or {}
        return site_with(self._linears[name], {**own, **overrides})

    def recipe(self, name: str) -> Recipe:
        """The recipe of that name with the run's options."""
        return get_fp8_recipe(self._config, name)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Context in which passes change no amax history and end no iteration."""
        with state_of(self._config).unrecorded():
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
        """As ModelRunner.not_finite. Collective."""
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


def _linears(chunks: list[Any]) -> dict[str, Any]:
    """Site -> linear, of the linears with FP8 GEMMs."""
    found = {}
    for linear in fp8_linears(chunks):
        site = linear.fp8_site
        if not isinstance(site, GemmSite):
            raise ValueError(
                f"{site.plan.name} is a layer of Transformer Engine, which has its own GEMMs: diagnose with"
                " --model.fp8_backend=emulated (or native)"
            )
        if site.is_fp8:
            found[site.plan.name] = linear
    return found


def _counts_here(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank's elements count: they are not a replica of another rank's."""
    shared = getattr(parameter, "shared", False) and not parallel_state.is_pipeline_first_stage()
    split = getattr(parameter, "tensor_model_parallel", False)
    if not getattr(parameter, "allreduce", True):  # an expert's
        return parallel_state.get_expert_data_parallel_rank() == 0
    if shared or parallel_state.get_data_parallel_rank(with_context_parallel=True):
        return False
    return split or parallel_state.get_tensor_model_parallel_rank() == 0
