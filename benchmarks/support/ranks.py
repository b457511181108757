"""Gloo ranks for tests and benchmarks: processes that are started once and run many cases.

    def case(width):                       # at the top level of an importable test module
        with model_parallel(Layout(tp=2, sp=True)):
            ...
            return something_picklable

    def test_it(ranks):
        first, second = ranks(2).run(case, 128, timeout=60)

Importing torch and Megatron-Core takes seconds, so ranks are forked from a process that did (fork_server.py), stay
alive for the whole test session and are shared by all world sizes. Every case gets a process group of its own, destroyed
after it: a rank that raises cannot leave half a collective behind for the next case, and its peers see a closed
connection instead of hanging. Ranks meet in a store that the pool keeps: who waits there is told at once. Who waits for
a file asks every ten milliseconds, in each of a layout's dozens of groups.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support.fork_server import CONTEXT
from benchmarks.support.gloo import share_device
from benchmarks.support.stack_size import with_room
from megatron_fp8.kernels.torch_products import replace_slow

DEFAULT_TIMEOUT_S = 120.0


class RankError(RuntimeError):
    """A case failed on a rank and the exception itself could not be sent; the message has its traceback."""


class RankTimeout(RuntimeError):
    """A case ran past its timeout; the message holds every rank's stacks."""


@dataclass(frozen=True)
class Layout:
    """A parallel layout, in Megatron-Core's short names. Data parallelism is what is left of the world."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool = False

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the dense model."""
        return self.tp * self.pp * self.cp

    def config_fields(self) -> dict[str, Any]:
        """The fields of a TransformerConfig that state this layout."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "sequence_parallel": self.sp,
            "pipeline_dtype": torch.bfloat16 if self.pp > 1 else None,
            # Two interleaved stages are each other's next and previous one: batched messages between them,
            # matched by order alone, would swap activations and gradients without a word.
            "overlap_p2p_comm": self.vpp is not None,
            "batch_p2p_comm": self.vpp is None,
        }


@contextlib.contextmanager
def model_parallel(layout: Layout | None = None, seed: int = 1234) -> Iterator[Layout]:
    """Inside a case: Megatron-Core's groups and random streams for `layout`; installs megatron_fp8."""
    from megatron_fp8.mcore import install

    install()
    layout = layout or Layout()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    reset_megatron()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    try:
        yield layout
    finally:
        reset_megatron()


def reset_megatron() -> None:
    """Forgets Megatron-Core's global state, as if it had just been imported (if it is imported at all)."""
    if "megatron.core" not in sys.modules:
        return
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.core.tensor_parallel import random

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    random._CUDA_RNG_STATE_TRACKER = None
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    random._unset_checkpointing()
    if "megatron.core.transformer.moe.moe_utils" in sys.modules:
        sys.modules["megatron.core.transformer.moe.moe_utils"]._MOE_LAYER_WISE_LOGGING_TRACKER.clear()
    if "megatron.core.transformer.multi_token_prediction" in sys.modules:
        ahead = sys.modules["megatron.core.transformer.multi_token_prediction"]
        ahead.MTPLossLoggingHelper.tracker.clear()


class Ranks:
    """The first `world_size` ranks of a pool."""

    def __init__(self, pool: RankPool, world_size: int):
        self.pool, self.world_size = pool, world_size

    def run(
        self, case: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT_S, **kwargs: Any
    ) -> list[Any]:
        """Calls `case(*args, **kwargs)` on every rank and returns the results in rank order.

        `case` and whatever goes in or out must be picklable; the process group 'gloo' is initialised during
        the call. An exception is raised here again (the earliest, if several ranks failed), its message
        followed by the rank's traceback. After `timeout` seconds RankTimeout shows where every rank stood,
        and the ranks are replaced.
        """
        return self.pool.run(self.world_size, case, args, kwargs, timeout)


class RankPool:
    """Rank processes, started when first needed. Inside `with` its folder is gone afterwards, else when Python ends."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._store: dist.TCPStore | None = None
        self._cases = 0

    def __call__(self, world_size: int) -> Ranks:
        return Ranks(self, world_size)

    def run(
        self, world_size: int, case: Callable[..., Any], args: tuple, kwargs: dict, timeout: float
    ) -> list[Any]:
        """See Ranks.run."""
        self._grow(world_size)
        self._cases += 1
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting = (self._store.port, f"case{self._cases}")
        payload = pickle.dumps((case, args, kwargs))
        workers = self._workers[:world_size]
        for rank, worker in enumerate(workers):
            worker.send((sys.path, payload, rank, world_size, meeting, timeout))
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < world_size:
            waiting = {w.connection: r for r, w in enumerate(workers) if r not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = "\n".join(w.stacks() for w in workers)
                self.close()
                raise RankTimeout(f"{case.__qualname__} ran past {timeout} s on {world_size} ranks\n{stacks}")
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                answers[rank] = workers[rank].receive()
                if answers[rank].died:
                    self.close()
                    raise RankError(f"rank {rank} of {case.__qualname__} died\n{answers[rank].trace}")
        failed = sorted((a.time, r) for r, a in answers.items() if a.trace)
        if failed:
            rank = failed[0][1]
            raise answers[rank].exception(rank)
        return [answers[r].value for r in range(world_size)]

    def _grow(self, count: int) -> None:
        while len(self._workers) < count:
            self._workers.append(_Worker(Path(self._folder.name), len(self._workers)))

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._folder.cleanup()

    def close(self) -> None:
        """Kills the ranks; a later run starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()


@dataclass
class _Answer:
    """What a rank says about a case: a value, or a traceback and, if it pickles, the exception."""

    time: float
    value: Any = None
    error: bytes | None = None
    trace: str = ""
    died: bool = False

    def exception(self, rank: int) -> BaseException:
        note = f"--- rank {rank} ---\n{self.trace}"
        if self.error is None:
            return RankError(note)
        error: BaseException = pickle.loads(self.error)
        error.__cause__ = RankError(note)
        return error


class _Worker:
    """The parent's side of one rank."""

    def __init__(self, folder: Path, index: int):
        ours, theirs = CONTEXT.Pipe()
        self.connection: Connection = ours
        self._log = folder / f"rank{index}-{time.monotonic_ns()}.log"
        self._process = CONTEXT.Process(target=_serve, args=(theirs, str(self._log)), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> _Answer:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self._process.join(5)
            return _Answer(0.0, trace=f"exit code {self._process.exitcode}\n{self._tail()}", died=True)

    def stacks(self) -> str:
        """Makes the rank write its stacks to its log (by a C signal handler, so even if it hangs)."""
        before = self._log.stat().st_size if self._log.exists() else 0
        # A log says that the handler is in place.
        if self._process.is_alive() and self._process.pid and before:
            os.kill(self._process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        return f"--- {self._log.stem} ---\n{self._tail(before)}"

    def _tail(self, start: int = 0) -> str:
        return self._log.read_text(errors="replace")[start:][-6000:] if self._log.exists() else "(no log)"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection, log: str) -> None:
    """A rank's main loop: one case a message, until the parent closes the pipe."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    print("ready", file=sys.stderr, flush=True)
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    replace_slow()
    os.environ["OMP_NUM_THREADS"] = "1"
    share_device()
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(with_room(_run_case, *pickle.loads(message)))


@functools.cache
def _store_at(port: int) -> dist.TCPStore:
    """A rank's connection to the pool's store."""
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def _run_case(
    path: list[str], payload: bytes, rank: int, world_size: int, meeting: tuple[int, str], timeout: float
) -> bytes:
    """Runs one case inside a process group of its own; returns the pickled _Answer."""
    sys.path.extend(entry for entry in path if entry not in sys.path)
    try:
        case, args, kwargs = pickle.loads(payload)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(meeting[1], _store_at(meeting[0])),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout + 60),  # the parent's timeout comes first, with all the stacks
        )
        dist.barrier()  # a rank that is done at once must not close what another is still connecting to
        answer = pickle.dumps(_Answer(time.monotonic(), value=case(*args, **kwargs)))
    except BaseException as error:
        failed = _Answer(time.monotonic(), trace=traceback.format_exc(), error=_pickled(error))
        # The frames hold models and hooks of the case: let go of them before the next one.
        traceback.clear_frames(error.__traceback__)
        answer = pickle.dumps(failed)
    finally:
        reset_megatron()
        if dist.is_initialized():
            dist.destroy_process_group()
        _empty_case_objects()
        gc.collect()
        gc.freeze()  # what is alive now are modules: walking through all of torch's takes 0.3 s a time
    return answer


def _empty_case_objects() -> None:
    """Lets go of what the case's models hold: DDP hangs hooks on autograd nodes that hold DDP again, a circle through C++
    which gc cannot see, and every process group in it keeps a thread. (What earlier cases left is frozen, not listed.)"""
    owners = ("megatron.core.distributed.", "megatron.core.optimizer.")
    for thing in gc.get_objects():
        if str(type(thing).__module__).startswith(owners) and hasattr(thing, "__dict__"):
            vars(thing).clear()


def _pickled(error: BaseException) -> bytes | None:
    """The exception as bytes, or None if it does not survive the way there and back."""
    try:
        data = pickle.dumps(error)
        return data if type(pickle.loads(data)) is type(error) else None
    except Exception:
        return None


def _die_with(parent: int) -> None:
    """Ends this rank when the test process is gone, even in the middle of a collective."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
