"""Processes: how the ranks meet, and how the model's parallel groups are laid over them."""

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
from ...state.ranks import first_to_say
from ..config.ranks import dense_ranks, expert_ranks, expert_tensor_ranks, least_ranks
from ..config.sections import TrainSection
from ..exit_codes import EXIT_BAD_INPUT, EXIT_FAILED
from .deterministic import be_deterministic
from .environment import Launch
from .meeting import Meeting
from .open_files import check_limit, raise_limit
from .rendezvous import check_restarts

Result = TypeVar("Result")

PASSING: tuple[type[BaseException], ...] = (
    dist.DistError,
    getattr(torch, "AcceleratorError", dist.DistError),
    *(ConnectionError, TimeoutError),
)
"""What a network, a GPU or another rank's end raises: the input is not at fault, and another attempt may work."""


_THREADS = 60
"""Of gloo's groups, three each: one process makes 19 of them."""


def exit_code(error: BaseException) -> int:
    """The exit code after `error` before the first step: 1 if the same input may work in another attempt, else 2."""
    return EXIT_FAILED if isinstance(error, PASSING) else EXIT_BAD_INPUT


def meet(launch: Launch, environ: Mapping[str, str] = os.environ) -> Launch:
    """`launch` with a meeting, to which this rank is on its way. Raises ValueError if torchrun's restarts cannot work."""
    check_restarts(environ)
    raise_limit()  # whoever keeps the store has connections from all
    return replace(launch, meeting=Meeting(launch, environ))


# -------------------------------------------------------------------------------------------- joining


def check_layout(model: Any, train: TrainSection, world_size: int, told: Sequence[str] = ()) -> int:
    """The data-parallel size of `world_size` ranks. Raises ValueError if the layout does not fit them. ``told``: as
    Launch's."""
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
    """ValueError where interleaved stages cannot share an iteration's micro-batches; Megatron-Core asks at the first."""
    stages = model.pipeline_model_parallel_size
    if (model.virtual_pipeline_model_parallel_size or 1) == 1 or stages == 1:
        return
    together = model.microbatch_group_size_per_vp_stage or stages
    if not stages <= together <= microbatches or 0 < microbatches % together < stages:
        raise ValueError(
            f"train.global_batch_size gives {microbatches} micro-batches a data-parallel rank, and interleaved stages"
            f" take them {together} at a time (model.microbatch_group_size_per_vp_stage, by default the"
            f" {stages} pipeline stages, and no fewer): give a multiple of {together} micro-batches, by a larger"
            " train.global_batch_size or a smaller train.micro_batch_size."
        )


def _check_experts(model: Any) -> None:
    """ValueError where experts' tokens would be gathered in parts of different sizes, which gloo cannot."""
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
    """The number of this process's GPU among those that it sees; a launcher may show each process its own alone.

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
    """Raise ValueError if a rank that came earlier has the current GPU, which NCCL would call a duplicate.

    Not where NCCL was told to put several ranks on a GPU.
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
    """Threads, products of BF16 on a CPU, device, process group (gloo without CUDA, nccl with), Megatron's groups and
    random streams.

    Raises ValueError if the layout does not fit the world size, train.deterministic the environment, the processes the
    GPUs, or the ranks the number of open files.
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
        say_unused_gpu()
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
        create_gloo_process_groups=False,  # for ways to save and load that this package does not take
    )
    seed_streams(train.seed)


def _threads(launch: Launch, environ: Mapping[str, str] = os.environ) -> int:
    """What OMP_NUM_THREADS says, or this rank's share of the cores; launchers of several ranks set 1 by themselves."""
    asked = environ.get("OMP_NUM_THREADS")
    if asked and (asked != "1" or launch.local_world_size == 1):
        return torch.get_num_threads()  # torch has read it
    return max(1, usable_cores() // launch.local_world_size)


def say_unused_gpu() -> None:
    """Warn where training runs on the CPU of a machine that has a GPU."""
    if unused := unused_gpu():
        warnings.warn(f"this machine has a GPU that is not used: {unused}", stacklevel=2)


def look_at_gpu_machine(processes: int) -> None:
    """Warn of what makes a GPU machine slow: kernels that cannot be compiled, fewer cores than this node's processes."""
    reason = kernels.refusal(torch.device("cuda", torch.cuda.current_device()))
    if reason is not None:
        torch.compiler.set_stance("force_eager")  # Megatron-Core's fused functions are compiled by Triton too
        warnings.warn(f"{reason}. Without kernels training is slow, in FP8 most of all", stacklevel=2)
    if (cores := usable_cores()) < processes:
        warnings.warn(
            f"{processes} processes of this node may use {cores} CPU core{'s' * (cores > 1)}, and each needs its own"
            " to keep its GPU busy: under SLURM ask for whole nodes (--exclusive) or for --cpus-per-task",
            stacklevel=2,
        )


def seed_streams(seed: int) -> None:
    """Random streams (torch's, Megatron-Core's, NumPy's, Python's) from the run's seed: other ones on each stage."""
    from megatron.core import parallel_state, tensor_parallel

    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Without a GPU torch.manual_seed keeps a call for each kind of device that may yet come, with a trace of the stack.
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


_held = ExitStack()


def until_leave(release: Callable[[], None]) -> None:
    """Have `release` called when this process leaves: it gives back what the run holds."""
    _held.callback(release)


def leave() -> None:
    """Give back what `until_leave` was told of, and the groups. Nothing happens when there is nothing."""
    _held.close()
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def on_first_rank(work: Callable[[], Result], *, beat_s: float | None = None) -> Result:
    """Run `work` on rank 0 while the others wait; every rank gets its result, or its ValueError.

    beat_s: for work that may take longer than a collective may: seconds after which rank 0 says again that it is at work.
    """
    outcome: list[Any] = [None, None, True]
    if dist.get_rank() == 0:
        with _beating(beat_s):
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
def _beating(seconds: float | None) -> Iterator[None]:
    """Meanwhile a thread tells the other ranks, every so many seconds, that nothing is done yet."""
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
    """Run `work` on every rank; each gets its own result. If some raise a ValueError, all raise that of the lowest."""
    result, problem = None, None
    try:
        result = work()
    except ValueError as error:
        problem = str(error)
    if (found := first_to_say(problem)) is not None:
        raise ValueError(found[1])
    return cast(Result, result)


def wait_for_all() -> None:
    """Return when every rank has called this."""
    # NCCL's barrier takes a GPU's number; without one torch warns that it takes the current one.
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
