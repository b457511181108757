"""Starts and watches this node's ranks by torch's elastic agent.

Differences from torchrun: bad input (exit code 2) is not retried; a signal makes the ranks save, without a time limit;
the exit code is the ranks' own; node 0 has the first ranks; no rank outlives the launcher.

    SIGINT (Ctrl-C), SIGTERM, SIGHUP    the ranks get SIGTERM: a training finishes its iteration, saves and ends
    SIGINT again, a second later        the ranks are killed
    SIGUSR1                             is passed on, as SLURM expects

A signal that was ignored when the launcher started (nohup, `&` in a script) stays ignored.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    registry,
)

from ...files.atomic_io import as_value_error
from ..stop import AGAIN_S, EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, STOPPED_CODE

JOIN_S = 600
"""Longest time in seconds between the first node to join and the last."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class LaunchSpec:
    """What to start.

    Attributes:
        command: a program's path and its arguments.
        ranks: number of ranks on this node.
        nodes: number of nodes, each with a launcher.
        node: this node's number, from 0.
        host, port: where the launcher of node 0 listens; port 0, for one node: any free port.
        max_restarts: how often all ranks start again after one died.
        logs: folder for copies of the ranks' output.
        stopped_code: exit code on every node, in place of 0, of a training that was stopped and saved.
    """

    command: list[str]
    ranks: int
    nodes: int = 1
    node: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    max_restarts: int = 0
    logs: Path | None = None
    stopped_code: int = EXIT_DONE


def say(text: str) -> None:
    """Print a line of the launcher to stderr, if it still has a reader."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def launch(spec: LaunchSpec, *, debug: bool = False) -> int:
    """Start the ranks, wait for all, return their exit code; 128 + the number of a signal that ended them.

    Args:
        debug: also show torch's messages.

    Raises:
        ValueError: this node cannot listen at its address, or the folder of logs cannot be made.
        DistError: other nodes did not join, or left.
    """
    if not debug:
        quiet = logging.getLogger("torch.distributed.elastic")
        quiet.addHandler(logging.NullHandler())
        quiet.propagate = False
    if spec.ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: ranks share the cores
    if spec.nodes > 1:
        # Ranks of several nodes make their own store: nodes count their own ranks' restarts (startup_barrier.py).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if spec.stopped_code:
        os.environ[STOPPED_CODE] = str(spec.stopped_code)
    logs = _logs(spec.logs)
    handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    # There is nothing to save yet, and torch's waits for other nodes would delay a handler in Python.
    for number in handled:
        signal.signal(number, signal.SIG_DFL)
    agent = None
    try:
        agent = _Agent(spec, logs, _rendezvous(spec), handled)
        return agent.exit_code(agent.run())
    except SignalException as error:  # SIGQUIT, or a signal while the ranks start
        return 128 + error.sigval
    except RendezvousError as error:
        raise DistError(_rendezvous_message(error, spec)) from error
    finally:
        if agent is not None and agent.stop is None:
            agent.handler.shutdown()


def _logs(folder: Path | None) -> DefaultLogsSpecs:
    if folder is None:
        return DefaultLogsSpecs(os.devnull)
    with as_value_error(f"--logs={folder} cannot be used", ": give another folder by --logs."):
        specs = DefaultLogsSpecs(str(folder), tee=Std.ALL)
        if not os.access(folder, os.W_OK):
            raise PermissionError(0, "not writable")
    return specs


def _rendezvous(spec: LaunchSpec) -> RendezvousHandler:
    """Torch's rendezvous of the nodes, which sorts them by their names. On other nodes, waits for node 0."""
    first = spec.node == 0
    parameters = RendezvousParameters(
        "c10d",
        f"{spec.host}:{spec.port}",
        run_id=uuid.uuid4().hex if spec.nodes == 1 else "megatron_fp8",  # the same on all nodes
        min_nodes=spec.nodes,
        max_nodes=spec.nodes,
        local_addr=spec.host
        if first
        else f"~{spec.node:06}",  # ~ sorts behind any name; only node 0's is used
        is_host=first,
        join_timeout=JOIN_S,
        read_timeout=60 if first else JOIN_S,
    )
    if spec.nodes > 1:
        say(f"waiting     for {spec.nodes} nodes at {spec.host}:{spec.port}, at most {JOIN_S // 60} minutes")
    try:
        return registry.get_rendezvous_handler(parameters)
    except RendezvousError as error:
        reason = " ".join(str(error.__cause__ or error).split("Exception raised from")[0].split())[:200]
        if first:
            raise ValueError(
                f"this node cannot listen at --master {spec.host}:{spec.port} ({reason}): give an address of this node"
                " and a free port."
            ) from error
        raise DistError(
            f"no launcher answers at --master {spec.host}:{spec.port} ({reason}): is node 0 there, and is that its"
            " address and a port that this node may reach?"
        ) from error


def _rendezvous_message(error: RendezvousError, spec: LaunchSpec) -> str:
    kind = type(error).__name__
    where = f"the launchers of {spec.nodes} nodes at {spec.host}:{spec.port}"
    if "Timeout" in kind:
        return f"{where}, did not all start: look at the other nodes."
    if "Closed" in kind:
        return f"{where}, have ended this run: another node's log has the cause."
    return f"{where}, lost each other ({kind}: {' '.join(str(error).split())}): look at node 0."


class _Agent(LocalElasticAgent):
    """Torch's agent, with this package's signals and exit codes."""

    def __init__(
        self,
        spec: LaunchSpec,
        logs: DefaultLogsSpecs,
        handler: RendezvousHandler,
        handled: Iterable[signal.Signals],
    ) -> None:
        program, *arguments = _ended_with_parent(spec.command)
        worker = WorkerSpec(
            role="rank",
            local_world_size=spec.ranks,
            rdzv_handler=handler,
            entrypoint=program,
            args=tuple(arguments),
            max_restarts=spec.max_restarts,
            monitor_interval=0.1,
        )
        super().__init__(worker, logs, log_line_prefix_template="[rank${rank}]:")
        self.handler = handler
        self.stop: signal.Signals | None = None
        """The first signal to end; None if there was none."""
        self._stopped_at, self._killed = 0.0, False
        self._spec, self._handled, self._job = spec, handled, handler.get_run_id()
        handler.get_run_id = lambda: self._job  # type: ignore[method-assign]

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        store: Any = worker_group.store
        if self._spec.nodes > 1:  # locks of a run's folder contain an id that no other launch has
            if self._spec.node == 0:
                self._job = uuid.uuid4().hex if self._job == "megatron_fp8" else self._job
                store.set("job", self._job)
            self._job = store.get("job").decode()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers: dict[int, Any] = super()._start_workers(worker_group)
        for number in _SIGNALS:  # torch has installed handlers of its own
            signal.signal(number, self._pass_on if number in self._handled else signal.SIG_IGN)
        return workers

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal to the launcher."""
        context: Any = self._pcontext
        ranks = [handler.proc for handler in context.subprocess_handlers.values()]
        if number != signal.SIGUSR1:
            first, now = self.stop is None, time.monotonic()
            if first:
                self.stop, self._stopped_at = signal.Signals(number), now
            if all(rank.poll() is not None for rank in ranks):
                raise SystemExit(128 + number)
            if first:
                again = f"; again, after {AGAIN_S:g} s or later: they end at once, unsaved"
                say(
                    f"{signal.Signals(number).name}: asked the ranks to finish their iteration, save and end"
                    f"{again if number == signal.SIGINT else ''}"
                )
            if number == self.stop == signal.SIGINT and now - self._stopped_at > AGAIN_S:
                number, self._killed = signal.SIGKILL, True
        for rank in ranks:
            rank.send_signal(number if number in (signal.SIGUSR1, signal.SIGKILL) else signal.SIGTERM)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            codes = {failure.exitcode for failure in result.failures.values()}
            if self.stop is not None or {EXIT_BAD_INPUT, self._spec.stopped_code} & codes:
                self._remaining_restarts = 0
            if tries := self._remaining_restarts:
                most = self._spec.max_restarts
                restart = f"All ranks start again: restart {most - tries + 1} of {most}."
                say(f"restart     {self._death(result.failures)} {restart}")
        return result

    def exit_code(self, result: RunResult) -> int:
        """Report why the ranks failed, if they did; return the exit code."""
        if not result.is_failed():
            return EXIT_DONE if self.stop is None else self._spec.stopped_code
        if not result.failures:
            say("error: a rank hangs in the kernel and cannot be ended.")
            return EXIT_FAILED
        code = result.failures[_first_failure(result.failures)].exitcode
        if code in (EXIT_BAD_INPUT, self._spec.stopped_code):  # the ranks have printed why
            return code
        if self.stop is not None and (self._killed or code == -signal.SIGTERM):
            early = "the ranks ended before there was anything to save"
            say(f"{self.stop.name}: {'the ranks were ended, unsaved' if self._killed else early}")
            return 128 + self.stop
        say(f"error: {self._death(result.failures)}")
        return code if code > 0 else EXIT_FAILED

    def _death(self, failures: Mapping[int, ProcessFailure]) -> str:
        """A line: which rank died, how, and where its output is."""
        rank = _first_failure(failures)
        failure = failures[rank]
        how = f"ended with exit code {failure.exitcode}"
        if failure.exitcode < 0:
            with suppress(ValueError):
                how = f"was killed by {signal.Signals(-failure.exitcode).name}"
            if failure.exitcode == -signal.SIGKILL:
                how += " (the system does that when memory runs out)"
        logs = ""
        if self._spec.logs and self._pcontext is not None:
            logs = f" Its output is in {Path(self._pcontext.error_files[failure.local_rank]).parent}."
        return f"rank {rank} {how}.{logs}"


def _first_failure(failures: Mapping[int, ProcessFailure]) -> int:
    """The rank whose end caused the end of the others.

    Order: bad input, then death by a signal, then the earliest; last, ranks that the agent ended.
    """

    def order(rank: int) -> tuple[bool, bool, bool, float, int]:
        code = failures[rank].exitcode
        return code != EXIT_BAD_INPUT, code == -signal.SIGTERM, code > 0, failures[rank].timestamp, rank

    return min(failures, key=order)


def _ended_with_parent(command: list[str]) -> list[str]:
    """A command line that runs `command`, and ends it by SIGTERM when this process dies, even of SIGKILL.

    util-linux 2.33 has the program for it; without it `command` runs unchanged. torch starts ranks without a preexec_fn.
    """
    runner = [shutil.which("setpriv") or "", "--pdeathsig", "TERM", "--"]
    works = runner[0] and subprocess.run([*runner, "true"], capture_output=True).returncode == 0
    return [*runner, *command] if works else command
