"""Starts the process group and the model's parallel groups."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from ... import kernels
from ...files.resource_limits import check_files, check_threads, raise_files, usable_cores
from ...files.terminal import print_rank_0, warn_user
from ...kernels.torch_products import replace_slow
from ...plan.timing import unused_gpu_reason
from ...state.collectives import first_rank_with
from ..config.ranks import check_layout
from ..config.sections import TrainSection
from ..stop import EXIT_BAD_INPUT, EXIT_FAILED
from .environment import Launch
from .startup_barrier import StartupBarrier, check_restarts

Result = TypeVar("Result")

RETRYABLE: tuple[type[BaseException], ...] = (
    dist.DistError,
    getattr(torch, "AcceleratorError", dist.DistError),
    *(ConnectionError, TimeoutError),
)
"""Errors of a network, a GPU or another rank: the input is fine, and another attempt may work."""


_COSTS = (
    "train.deterministic=True: the same losses to the bit, by a slower backward of attention without cuDNN, sorted"
    " scatters, and no reductions inside NVLink switches"
)
_NOT_PROMISED = (
    "another run of the same config may differ in the losses' last digits: on GPUs train.deterministic is off for speed"
    " (--train.deterministic=true costs a slower backward of attention without cuDNN, and more: docs/performance.md)"
)
_WORKSPACES = (":4096:8", ":16:8")
_NO_IMPLEMENTATION = "does not have a deterministic implementation"
_THREADS = 60
"""Threads of gloo's groups: one process makes 19 groups, with three threads each."""


def exit_code(error: BaseException) -> int:
    """Exit code for an `error` before the first step: 1 if the same input may work in another attempt, else 2."""
    return EXIT_FAILED if isinstance(error, RETRYABLE) else EXIT_BAD_INPUT


def connect(launch: Launch, environ: Mapping[str, str] = os.environ) -> Launch:
    """Return `launch` with a new StartupBarrier. Raises ValueError if torchrun's restarts cannot work."""
    check_restarts(environ)
    raise_files()  # the host of the store has connections from all ranks
    return replace(launch, barrier=StartupBarrier(launch, environ))


# -------------------------------------------------------------------------------------------- joining


def gpu_of(launch: Launch, visible: int) -> int:
    """Index of this process's GPU among the visible ones; a launcher may show each process only its own.

    Raises ValueError if there are more processes than GPUs.
    """
    if visible > 1 and launch.local_rank >= visible:
        raise ValueError(
            f"local rank {launch.local_rank} has no GPU: this node has {launch.local_world_size} processes and shows"
            f" {visible} GPUs (LOCAL_RANK or SLURM_LOCALID says so). Launch one process for each GPU (torchrun"
            " --nproc-per-node, srun --ntasks-per-node)."
        )
    return launch.local_rank if visible > 1 else 0


def backend() -> str:
    """The process group's backend: nccl with CUDA, gloo without."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def join(launch: Launch, model: Any, train: TrainSection) -> None:
    """Set up threads, CPU products of BF16, device, process group, Megatron's groups and seeds.

    The process group is nccl's with CUDA, else gloo's.

    Raises ValueError if the layout does not fit the world size, the environment does not allow train.deterministic, the
    processes do not fit the GPUs, or the limit of open files is too low for the ranks.
    """
    check_layout(model, train, launch.world_size, launch.variables)
    hosts_store = launch.barrier is not None and launch.barrier.hosts_store
    check_files(launch.world_size, hosts_store=hosts_store, over_gloo=backend() == "gloo")
    if is_deterministic(train):
        set_deterministic()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(gpu_of(launch, torch.cuda.device_count()))
        check_gpu_machine(launch.local_world_size)
    else:
        warn_unused_gpu()
        torch.set_num_threads(train.threads or _threads(launch))
        replace_slow(torch.float16 if model.fp16 else torch.bfloat16)
    if not dist.is_initialized():
        if backend() == "gloo":
            check_threads(_THREADS)
        assert launch.barrier is not None
        timeout = timedelta(minutes=train.distributed_timeout_minutes)
        launch.barrier.agree("the process group", {}, timeout.total_seconds())
        dist.init_process_group(
            backend(),
            rank=launch.rank,
            world_size=launch.world_size,
            store=launch.barrier.group_store(timeout.total_seconds()),
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
    if train.cuda_graphs and cuda:  # only generators, not states as tensors, work in a captured graph
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

        initialize_rng_tracker(use_cudagraphable_rng=True, force_reset=True)
    seed_streams(train.seed)
    if cuda:
        print_rank_0(f"train: {_COSTS if is_deterministic(train) else _NOT_PROMISED}", once=True)


def is_deterministic(train: TrainSection) -> bool:
    """Whether the run promises the same losses to the bit: as train.deterministic says, else on CPUs."""
    return not torch.cuda.is_available() if train.deterministic is None else train.deterministic


def set_deterministic() -> None:
    """Make this process compute deterministically. Call before any GPU work and before the process group exists.

    * Torch's operations: the deterministic version, where one exists (flash attention's backward, scatter and index_add
      have one). An operation without one raises an error that names it; users tend to filter warnings.
    * Attention: cuDNN's is off, as its backward adds in no fixed order. Newer versions of torch exclude it themselves.
    * cuBLAS: one workspace per stream, set by an environment variable that cuBLAS reads once.
    * NCCL: no reduction inside the switch (NVLS, and NVLSTree over several nodes), whose order is not documented; a
      NCCL_ALGO that is set already stays.

    This package's kernels combine the results of their programs by maxima and integer counts only. Their order does not
    change the result.

    Raises:
        ValueError: CUBLAS_WORKSPACE_CONFIG has a value with which cuBLAS is not deterministic.
    """
    if torch.cuda.is_available():
        workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES[0])
        if workspace not in _WORKSPACES:
            raise ValueError(
                f"CUBLAS_WORKSPACE_CONFIG={workspace!r}: train.deterministic needs {' or '.join(map(repr, _WORKSPACES))};"
                " unset it, or train with --train.deterministic=false"
            )
        os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree")
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True)
    # Torch would also fill every new tensor: that costs time and changes no result here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def name_deterministic_setting(error: Exception) -> Exception:
    """Return torch's refusal of an operation with the setting that allows it; return other errors unchanged."""
    operation, refused, _ = str(error).partition(_NO_IMPLEMENTATION)
    if not refused:
        return error
    return RuntimeError(
        f"training failed: {operation.strip()} {_NO_IMPLEMENTATION}, which train.deterministic asks for: train with"
        " --train.deterministic=false, and the same losses are not promised to the bit"
    )


def _threads(launch: Launch, environ: Mapping[str, str] = os.environ) -> int:
    """OMP_NUM_THREADS, or this rank's share of the cores; launchers of several ranks set 1 themselves."""
    setting = environ.get("OMP_NUM_THREADS")
    if setting and (setting != "1" or launch.local_world_size == 1):
        return torch.get_num_threads()  # torch has read it
    return max(1, usable_cores() // launch.local_world_size)


def warn_unused_gpu() -> None:
    """Warn where training runs on the CPU of a machine that has a GPU."""
    if unused := unused_gpu_reason():
        warn_user(f"this machine has a GPU that is not used: {unused}")


def check_gpu_machine(processes: int) -> None:
    """Warn if kernels cannot be compiled, or if there are fewer cores than processes on this node."""
    reason = kernels.refusal(torch.device("cuda", torch.cuda.current_device()))
    if reason is not None:
        torch.compiler.set_stance("force_eager")  # Triton also compiles Megatron-Core's fused functions
        warn_user(f"{reason}. Without kernels training is slow, in FP8 most of all")
    if (cores := usable_cores()) < processes:
        warn_user(
            f"{processes} processes of this node may use {cores} CPU core{'s' * (cores > 1)}, and each needs its own"
            " to keep its GPU busy: under SLURM ask for whole nodes (--exclusive) or for --cpus-per-task"
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


def release_at_leave(release: Callable[[], None]) -> None:
    """Register `release` for `leave`: it releases resources of the run."""
    _held.callback(release)


def leave() -> None:
    """Release what `release_at_leave` registered, and the process groups. Does nothing if there are none."""
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
