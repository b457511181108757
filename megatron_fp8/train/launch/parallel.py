"""Starts the process group and the model's parallel groups."""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from ... import kernels
from ...files.resource_limits import check_threads, usable_cores
from ...kernels.torch_products import replace_slow
from ...plan.timing import unused_gpu
from ...state.collectives import first_rank_with
from ..config.ranks import dense_ranks, expert_ranks, expert_tensor_ranks, least_ranks
from ..config.sections import TrainSection
from ..failure import EXIT_BAD_INPUT, EXIT_FAILED
from .deterministic import be_deterministic
from .environment import Launch
from .rendezvous import check_restarts
from .rlimit import check_limit, raise_limit
from .startup_barrier import StartupBarrier

Result = TypeVar("Result")

PASSING: tuple[type[BaseException], ...] = (
    dist.DistError,
    getattr(torch, "AcceleratorError", dist.DistError),
    *(ConnectionError, TimeoutError),
)
"""Errors of a network, a GPU or another rank: the input is fine, and another attempt may work."""


_THREADS = 60
"""Threads of gloo's groups: one process makes 19 groups, with three threads each."""


def exit_code(error: BaseException) -> int:
    """Exit code for an `error` before the first step: 1 if the same input may work in another attempt, else 2."""
    return EXIT_FAILED if isinstance(error, PASSING) else EXIT_BAD_INPUT


def meet(launch: Launch, environ: Mapping[str, str] = os.environ) -> Launch:
    """Return `launch` with a new Meeting. Raises ValueError if torchrun's restarts cannot work."""
    check_restarts(environ)
    raise_limit()  # the host of the store has connections from all ranks
    return replace(launch, meeting=StartupBarrier(launch, environ))


# -------------------------------------------------------------------------------------------- joining


def check_layout(model: Any, train: TrainSection, world_size: int, told: Sequence[str] = ()) -> int:
    """The data-parallel size of `world_size` ranks. Raises ValueError if the layout does not fit.

    ``told``: as Launch.told.
    """
    ranks = f"the world size {world_size}{''.join(f' ({variable})' for variable in told[1:])}"
    sizes = {
        "tensor": model.tensor_model_parallel_size,
        "pipeline": model.pipeline_model_parallel_size,
        "context": model.context_parallel_size,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"the {name} parallel size is {size}: it must be at least 1.")
    if world_size % (product := dense_ranks(model)):
        parts = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"{ranks} does not divide by {parts} = {product}: launch a multiple of "
            f"{product} processes, or change model.tensor_model_parallel_size, "
            "model.pipeline_model_parallel_size or model.context_parallel_size."
        )
    if world_size % (experts := expert_ranks(model)):
        raise ValueError(
            f"{ranks} does not divide by pipeline {sizes['pipeline']} x expert"
            f" {model.expert_model_parallel_size} x expert tensor"
            f" {expert_tensor_ranks(model)} = {experts}: launch a multiple of"
            f" {least_ranks(model)} processes, or change model.expert_model_parallel_size or"
            " model.expert_tensor_parallel_size."
        )
    data = world_size // product
    step = data * train.micro_batch_size
    if train.global_batch_size % step:
        raise ValueError(
            f"train.global_batch_size={train.global_batch_size} does not divide by train.micro_batch_size="
            f"{train.micro_batch_size} x {data} data-parallel ranks = {step}: give a multiple of {step}."
        )
    _check_interleaving(model, train.global_batch_size // step)
    _check_experts(model)
    tokens, cuts = train.seq_length, 2 * sizes["context"] if sizes["context"] > 1 else 1
    if tokens % cuts or (model.sequence_parallel and (tokens // sizes["context"]) % sizes["tensor"]):
        raise ValueError(
            f"train.seq_length={tokens} does not divide among the ranks (context parallel "
            f"{sizes['context']}, tensor parallel {sizes['tensor']} with "
            f"sequence_parallel={model.sequence_parallel}): give a multiple of {cuts * sizes['tensor']}."
        )
    return data


def _check_interleaving(model: Any, microbatches: int) -> None:
    """ValueError if interleaved stages cannot divide the micro-batches; Megatron-Core checks at the first iteration."""
    stages = model.pipeline_model_parallel_size
    if (model.virtual_pipeline_model_parallel_size or 1) == 1 or stages == 1:
        return
    group = model.microbatch_group_size_per_vp_stage or stages
    if not stages <= group <= microbatches or 0 < microbatches % group < stages:
        raise ValueError(
            f"train.global_batch_size gives {microbatches} micro-batches a data-parallel rank, and interleaved stages"
            f" take them {group} at a time (model.microbatch_group_size_per_vp_stage, by default the"
            f" {stages} pipeline stages, and no fewer): give a multiple of {group} micro-batches, by a larger"
            " train.global_batch_size or a smaller train.micro_batch_size."
        )


def _check_experts(model: Any) -> None:
    """ValueError if experts would gather tokens in parts of different sizes, which gloo does not support."""
    tensor = expert_tensor_ranks(model)
    both = model.num_moe_experts and tensor > 1 and model.expert_model_parallel_size > 1
    if both and model.moe_token_dispatcher_type != "allgather" and backend() == "gloo":
        raise ValueError(
            f"model.expert_model_parallel_size={model.expert_model_parallel_size} with expert tensor parallelism {tensor}"
            f" and model.moe_token_dispatcher_type={model.moe_token_dispatcher_type!r} gathers parts of different sizes,"
            " which gloo, the backend of CPUs, cannot: set model.expert_tensor_parallel_size=1, or"
            " model.moe_token_dispatcher_type=allgather."
        )


def gpu_of(launch: Launch, visible: int) -> int:
    """Index of this process's GPU among the visible ones; a launcher may show each process only its own.

    Raises ValueError if there are more processes than GPUs.
    """
    if visible > 1 and launch.local_rank >= visible:
        raise ValueError(
            f"local rank {launch.local_rank} has no GPU: this node has {launch.local_world_size} processes and shows"
            f" {visible} GPUs (LOCAL_RANK or SLURM_LOCALID says so). {_ONE_EACH}."
        )
    return launch.local_rank if visible > 1 else 0


_ONE_EACH = "Launch one process for each GPU (torchrun --nproc-per-node, srun --ntasks-per-node)"


def check_own_gpu(launch: Launch, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError if another rank has claimed the current GPU, which NCCL would report as a duplicate.

    Does nothing where NCCL is configured for several ranks on a GPU.
    """
    if environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0":
        return
    assert launch.meeting is not None
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    first, visible = launch.meeting.first_to_say(f"GPU {gpu}"), torch.cuda.device_count()
    if first != launch.rank:
        raise ValueError(
            f"ranks {first} and {launch.rank} have the same GPU, {gpu}: this node has {launch.local_world_size}"
            f" processes, and this one sees {visible} GPU{'s' * (visible > 1)}. {_ONE_EACH}, or have each shown its own"
            " (srun --gpus-per-task=1)."
        )


def backend() -> str:
    """The process group's backend: nccl with CUDA, gloo without."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def join(launch: Launch, model: Any, train: TrainSection) -> None:
    """Set up threads, CPU products of BF16, device, process group, Megatron's groups and seeds.

    The process group is nccl's with CUDA, else gloo's.

    Raises ValueError if the layout does not fit the world size, the environment does not allow train.deterministic, the
    processes do not fit the GPUs, or the limit of open files is too low for the ranks.
    """
    check_layout(model, train, launch.world_size, launch.told)
    keeps_store = launch.meeting is not None and launch.meeting.keeps_store
    check_limit(raise_limit(), launch.world_size, keeps_store=keeps_store, over_gloo=backend() == "gloo")
    if train.deterministic:
        be_deterministic()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(gpu_of(launch, torch.cuda.device_count()))
        look_at_gpu_machine(launch.local_world_size)
    else:
        warn_unused_gpu()
        torch.set_num_threads(train.threads or _threads(launch))
        replace_slow(torch.float16 if model.fp16 else torch.bfloat16)
    if not dist.is_initialized():
        if backend() == "gloo":
            check_threads(_THREADS)
        assert launch.meeting is not None
        launch.meeting.arrive("the process group")
        if cuda:
            check_own_gpu(launch)
        timeout = timedelta(minutes=train.distributed_timeout_minutes)
        dist.init_process_group(
            backend(),
            rank=launch.rank,
            world_size=launch.world_size,
            store=launch.meeting.group_store(timeout.total_seconds()),
            timeout=timeout,
        )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=model.tensor_model_parallel_size,
        pipeline_model_parallel_size=model.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=model.virtual_pipeline_model_parallel_size,
        context_parallel_size=model.context_parallel_size,
        expert_model_parallel_size=model.expert_model_parallel_size,
        expert_tensor_parallel_size=model.expert_tensor_parallel_size,
        distributed_timeout_minutes=train.distributed_timeout_minutes,
        create_gloo_process_groups=False,  # used by save and load formats that this package does not use
    )
    seed_streams(train.seed)


def _threads(launch: Launch, environ: Mapping[str, str] = os.environ) -> int:
    """OMP_NUM_THREADS, or this rank's share of the cores; launchers of several ranks set 1 themselves."""
    setting = environ.get("OMP_NUM_THREADS")
    if setting and (setting != "1" or launch.local_world_size == 1):
        return torch.get_num_threads()  # torch has read it
    return max(1, usable_cores() // launch.local_world_size)


def warn_unused_gpu() -> None:
    """Warn where training runs on the CPU of a machine that has a GPU."""
    if unused := unused_gpu():
        warnings.warn(f"this machine has a GPU that is not used: {unused}", stacklevel=2)


def look_at_gpu_machine(processes: int) -> None:
    """Warn if kernels cannot be compiled, or if there are fewer cores than processes on this node."""
    reason = kernels.refusal(torch.device("cuda", torch.cuda.current_device()))
    if reason is not None:
        torch.compiler.set_stance("force_eager")  # Triton also compiles Megatron-Core's fused functions
        warnings.warn(f"{reason}. Without kernels training is slow, in FP8 most of all", stacklevel=2)
    if (cores := usable_cores()) < processes:
        warnings.warn(
            f"{processes} processes of this node may use {cores} CPU core{'s' * (cores > 1)}, and each needs its own"
            " to keep its GPU busy: under SLURM ask for whole nodes (--exclusive) or for --cpus-per-task",
            stacklevel=2,
        )


def seed_streams(seed: int) -> None:
    """Seed torch, Megatron-Core, NumPy and Python from the run's seed, differently on each pipeline stage."""
    from megatron.core import parallel_state, tensor_parallel

    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Without a GPU torch.manual_seed stores a call with a stack trace for each device type that may be initialised
    # later.
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


_held = ExitStack()


def until_leave(release: Callable[[], None]) -> None:
    """Register `release` for `leave`: it releases resources of the run."""
    _held.callback(release)


def leave() -> None:
    """Release what `until_leave` registered, and the process groups. Does nothing if there are none."""
    _held.close()
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def on_first_rank(work: Callable[[], Result], *, beat_s: float | None = None) -> Result:
    """Run `work` on rank 0 while the others wait; every rank returns its result or raises its ValueError.

    beat_s: rank 0 signals progress at this interval in seconds, for work that may exceed the timeout of a collective.
    """
    outcome: list[Any] = [None, None, True]
    if dist.get_rank() == 0:
        with _heartbeat(beat_s):
            try:
                outcome[0] = work()
            except ValueError as error:
                outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0)
    while not outcome[2]:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise ValueError(outcome[1])
    return outcome[0]


@contextmanager
def _heartbeat(seconds: float | None) -> Iterator[None]:
    """Let a thread signal the other ranks every `seconds` seconds that rank 0 still works."""
    if seconds is None or dist.get_world_size() == 1:
        yield
        return
    over, gpu = threading.Event(), torch.cuda.current_device() if torch.cuda.is_available() else None

    def beat() -> None:
        if gpu is not None:
            torch.cuda.set_device(gpu)  # each thread has its own
        while not over.wait(seconds):
            dist.broadcast_object_list([None, None, False], src=0)

    thread = threading.Thread(target=beat, name="at work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def on_every_rank(work: Callable[[], Result]) -> Result:
    """Run `work` on every rank; return its own result. If any raises ValueError, all raise the lowest rank's."""
    result, problem = None, None
    try:
        result = work()
    except ValueError as error:
        problem = str(error)
    if (first_problem := first_rank_with(problem)) is not None:
        raise ValueError(first_problem[1])
    return cast(Result, result)


def wait_for_all() -> None:
    """Barrier: return when every rank has called this."""
    # NCCL's barrier takes a GPU's number; without one torch warns that it takes the current one.
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
