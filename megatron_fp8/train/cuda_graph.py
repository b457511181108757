"""Replays an iteration's forward and backward passes as one CUDA graph (train.cuda_graphs).

The first iterations run eagerly, until every tensor has its scale. Then all passes of an iteration are captured once:
its micro-batches, the reduction of the gradients and the FP8 update. Each later iteration copies its micro-batches
into the captured ones and replays. Validation and the optimizer stay eager, so the loss, the checks of the run's
health and the rule that skips a step are an eager run's. ``check_options`` refuses everything that a replay would
leave out without an error, because it is Python.

Rejected: Megatron-Core's FullCudaGraphWrapper. It does not know the FP8 update's part on the host, and it captures
validation too. Rejected: the optimizer in the graph. Its learning rate and loss scale are numbers on the host, and it
would have to skip a step without the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_all_rng_states
from torch import Tensor

from ..files.terminal import print_rank_0
from ..linear.gemm_site import mark_zeros
from ..mcore.iteration import CapturedIteration
from ..mcore.runtime import state_of, unwrap
from ..mcore.sites import fp8_linears
from ..numerics import host_sync
from ..state.collectives import first_rank_with
from ..state.cuda_graph import capture_refusal
from .config.run_config import RunConfig
from .stop import TrainingFailed

EAGER_ITERATIONS = 3
"""Eager iterations before the capture: libraries allocate and choose kernels in them. As Megatron-Core's default."""

_NOT_WITH_GRAPHS: dict[str, tuple[Any, str]] = {
    "model.pipeline_model_parallel_size": (1, "a stage's order of passes and messages is not captured here"),
    "model.num_moe_experts": (None, "the host reads how many tokens each expert has"),
    "model.mtp_num_layers": (None, "the host collects the losses of multi-token prediction"),
    "model.recompute_granularity": (None, "a recomputation restores random states on the host"),
    "model.cpu_offloading": (False, "the host moves activations"),
    "model.fine_grained_activation_offloading": (False, "the host moves activations"),
    "model.fp8_stochastic_rounding": (False, "every replay would round with the same random bits"),
    "model.fp8_interval": (1, "the host decides in which iterations scales are updated"),
    "model.fp8_high_precision_warmup": (0.0, "the precision changes during the training"),
    "model.fp8_high_precision_healing": (0.0, "the precision changes during the training"),
    "model.fp8_guard": (False, "the guard changes the precision of layers on the host"),
    **dict.fromkeys(
        ("model.fp8_quantizer_factory", "model.fp4_quantizer_factory"),
        (None, "a replay does not call a quantizer of your own"),
    ),
    "optimizer.overlap_param_gather": (
        False,
        "the forward pass waits for what the optimizer's step has sent",
    ),
    "train.rewind_on_spike": (0, "the graph has no state to go back to"),
    "data.loss": ("all", "the host reads how many tokens have a loss"),
}
"""Option -> (the value that it must have, why a replay cannot follow another one)."""

_CACHED = 32
"""Entries of the cache that the layers' RotaryEmbedding.forward share: with more layers each call misses it."""


def check_options(run: RunConfig) -> None:
    """Raise ValueError if an option needs Python in an iteration's passes; a replay would silently leave that out."""
    if not run.train.cuda_graphs:
        return
    for option, (needed, why) in _NOT_WITH_GRAPHS.items():
        section, name = option.split(".")
        value = getattr(getattr(run, section), name)
        if value is not None and value != needed:
            _refuse(f"{option}={value!r}", why, f"leave out {option}")
    if run.model.fp16 and run.optimizer.loss_scale is None:
        _refuse(
            "model.fp16=True with a dynamic loss scale",
            "the host changes the scale, and a replay would use the captured one",
            "give a constant optimizer.loss_scale, or train in BF16",
        )
    if run.model.fp8_backend == "transformer_engine":
        _refuse(
            "model.fp8_backend='transformer_engine'",
            "its layers update their scales on the host",
            "leave out model.fp8_backend",
        )
    if run.model.fp4 or "nvfp4" in run.model.fp8_overrides.values():
        _refuse("NVFP4", "its emulation copies tables and names random bits on the host", "train in FP8")
    if (
        run.model.multi_latent_attention
        and run.model.context_parallel_size > 1
        and run.model.num_layers > _CACHED
    ):
        _refuse(
            f"model.num_layers={run.model.num_layers} with multi-latent attention and context parallelism",
            f"Megatron-Core caches {_CACHED} layers' position embeddings, and copies the others from memory of the host",
            f"use at most {_CACHED} layers",
        )
    if run.telemetry.settings().on:
        _refuse(
            "telemetry", "a replay calls no observer", "leave out telemetry.every and telemetry.te_config"
        )


def check_device(run: RunConfig) -> None:
    """Raise ValueError if the run is to use CUDA graphs and there is no CUDA device."""
    if run.train.cuda_graphs and not torch.cuda.is_available():
        raise ValueError(
            "train.cuda_graphs=True needs a CUDA device, and torch finds none here: leave it out, or train on a GPU."
        )


def check_backends(run: RunConfig, chunks: list[Any]) -> None:
    """Raise ValueError if a layer's GEMMs read scales back from a GPU, as emulated ones do."""
    if not run.train.cuda_graphs:
        return
    for site in (linear.fp8_site for linear in fp8_linears(chunks)):
        if getattr(site.backend, "reads_scales", False) and host_sync.read_waits(site.state.device):
            _refuse(
                f"the {site.plan.backend} backend, which runs {site.plan.name}",
                "the host reads scales to choose a product",
                "use a GPU of compute capability 8.9 or newer and a recipe that it multiplies",
            )


def _refuse(what: str, why: str, remedy: str) -> None:
    raise ValueError(
        f"train.cuda_graphs=True excludes {what}: {why}. Leave out train.cuda_graphs, or {remedy}."
    )


class IterationGraph:
    """The forward and backward passes of one rank's iterations.

    Args:
        chunk: the model in its DistributedDataParallel.
        run_passes: runs all passes over an iterator of micro-batches; returns each one's [loss sum, tokens].
        microbatches: of one iteration, on this rank.
    """

    def __init__(
        self,
        chunk: Any,
        run_passes: Callable[[Iterator[dict[str, Tensor]]], list[Tensor]],
        microbatches: int,
    ) -> None:
        self._chunk, self._run_passes, self._microbatches = chunk, run_passes, microbatches
        self._eager_done = 0
        self._graph: Any = None
        self._captured: CapturedIteration | None = None
        self._inputs: list[dict[str, Tensor]] = []
        self._losses: list[Tensor] = []

    def ready(self) -> bool:
        """Whether the next iteration is a replay on all ranks. False: the caller runs it eagerly. Collective."""
        if self._graph is not None:
            return True
        self._eager_done += 1
        if self._eager_done <= EAGER_ITERATIONS:
            return False
        refusal = first_rank_with(capture_refusal(state_of(unwrap(self._chunk).config)))
        if refusal is not None:
            print_rank_0(f"train.cuda_graphs: iterations run eagerly as long as {refusal[1]}", once=True)
        return refusal is None

    def run(self, batches: Iterator[dict[str, Tensor]]) -> list[Tensor]:
        """Replay the passes on the next micro-batches, and end the FP8 iteration. The first call captures them.

        Returns [loss sum, tokens] of each micro-batch, in memory that the next replay overwrites.
        """
        new = [next(batches) for _ in range(self._microbatches)]
        if self._graph is None:
            self._inputs = [{name: tensor.clone() for name, tensor in batch.items()} for batch in new]
            self._capture()
        else:
            for inputs, batch in zip(self._inputs, new, strict=True):
                for name, tensor in batch.items():
                    inputs[name].copy_(tensor)
        assert self._captured is not None
        self._graph.replay()
        self._captured.replayed()
        return self._losses

    def _capture(self) -> None:
        captured = CapturedIteration([self._chunk])
        try:
            with new_graph() as graph, captured:
                mark_zeros(self._chunk.parameters(), captured=True)  # each iteration starts with zeros
                self._losses = self._run_passes(iter(self._inputs))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise TrainingFailed(
                f"training failed: an iteration cannot be captured as a CUDA graph ({reason}). Leave out"
                " train.cuda_graphs."
            ) from error
        self._graph, self._captured = graph, captured
        line = "train.cuda_graphs: from here on iterations are replays of a CUDA graph"
        print_rank_0(line, once=True, to="stdout")


@contextmanager
def new_graph() -> Iterator[Any]:
    """Context: the GPU's work inside is captured, not run. Yields the graph."""
    graph = torch.cuda.CUDAGraph()
    for generator in get_all_rng_states().values():  # replays continue these streams, as eager code would
        graph.register_generator_state(generator)
    # NCCL's watchdog thread asks for events during the capture, which the default mode would forbid.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        yield graph


@contextmanager
def side_stream() -> Iterator[None]:
    """Context: a stream for DistributedDataParallel's construction.

    Autograd accumulates a gradient on the stream on which DistributedDataParallel first met the parameter, and the
    default stream cannot be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
