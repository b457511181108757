"""Starts and watches this node's ranks by torch's elastic agent.

Differences from torchrun: bad input (exit code 2) is not retried; a signal to end makes the ranks save; the exit code
is the ranks' own; a dead rank is reported with its last line and its log; no rank outlives the launcher.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler

from ..failure import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED
from ..stop import ASKED_BY, STOPPED_CODE
from .node_rendezvous import FIRST_LINE_S, Nodes, said_after
from .parent_death import ends_with_parent
from .rank_logs import RankLogs
from .signals import Signals, Stopped

_SETTLE_S = 10.0
"""After a rank has ended, a line says that the launcher waits for the others. Torch kills them after 30 s."""


@dataclass(frozen=True)
class Launching:
    """What to start.

    Attributes:
        command: a program's path and its arguments.
        ranks: number of ranks on this node.
        max_restarts: how often all ranks start again after one died.
        logs: folder for the ranks' output; None: a temporary folder, which stays if the launch fails.
        stopped_code: exit code on every node, in place of 0, of a training that was stopped and saved.
    """

    command: list[str]
    ranks: int
    nodes: Nodes = field(default_factory=Nodes)
    max_restarts: int = 0
    logs: Path | None = None
    stopped_code: int = EXIT_DONE


def say(text: str) -> None:
    """Print a line of the launcher to stderr."""
    print(text, file=sys.stderr, flush=True)


def launch(launching: Launching, *, debug: bool = False) -> int:
    """Start the ranks, wait for all, return their exit code; 128 + the number of a signal that ended them.

    Args:
        debug: also show torch's messages.

    Raises:
        ValueError: the nodes' addresses or numbers do not work, or the folder of logs cannot be made.
        DistError: other nodes did not join, or left.
    """
    if not debug:
        quiet = logging.getLogger("torch.distributed.elastic")
        quiet.addHandler(logging.NullHandler())
        quiet.propagate = False
    if launching.ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: ranks share the cores
    # Ranks of several nodes make their own store (node_rendezvous.py).
    if launching.nodes.count > 1:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if launching.stopped_code:
        os.environ[STOPPED_CODE] = str(launching.stopped_code)
    os.environ["PYTHONUNBUFFERED"] = "1"  # show lines without delay
    folder = _folder(launching.logs)
    asked_by = folder.absolute() / f".asked_by_{uuid.uuid4().hex}"  # several nodes may share the folder
    os.environ[ASKED_BY] = str(asked_by)
    signals = Signals(say, asked_by)
    code = EXIT_FAILED
    try:
        with signals.heard():
            code = _run(launching, RankLogs(folder, terminal=sys.stdout.isatty()), signals)
    finally:
        with suppress(OSError):
            asked_by.unlink(missing_ok=True)
        if launching.logs is None and code != EXIT_FAILED:
            shutil.rmtree(folder, ignore_errors=True)
    return code


def _folder(logs: Path | None) -> Path:
    try:
        if logs is None:
            return Path(tempfile.mkdtemp(prefix="megatron_fp8_logs_"))
        logs.mkdir(parents=True, exist_ok=True)
        if not os.access(logs, os.W_OK):
            raise PermissionError(0, "not writable")
    except OSError as error:
        where = f"--logs={logs}" if logs else f"the temporary folder {tempfile.gettempdir()}"
        raise ValueError(
            f"{where} cannot be used ({error.strerror}): give another folder by --logs."
        ) from error
    return logs


def _run(launching: Launching, logs: RankLogs, signals: Signals) -> int:
    try:
        rendezvous = launching.nodes.rendezvous(say)
        agent = _Agent(launching, rendezvous, logs, signals)
        try:
            return agent.end(agent.run())
        finally:
            logs.show(ended=True)
            if signals.stop is None:
                rendezvous.shutdown()
    except Stopped as stopped:
        say(f"{stopped}: ended before any rank had started")
        return 128 + signal.Signals[str(stopped)]
    except SignalException as ended:
        number = signals.stop or ended.sigval
        say(f"{number.name}: the ranks were ended, unsaved")
        return 128 + number
    except RendezvousError as error:
        raise DistError(_rendezvous_message(error, launching.nodes)) from error
    except BrokenPipeError:
        raise DistError(
            "the reader of the output has ended, as `| head` does: the ranks were signalled to save and end."
        ) from None


def _rendezvous_message(error: RendezvousError, nodes: Nodes) -> str:
    kind = type(error).__name__
    where = f"the launchers of {nodes.count} nodes, which meet at {nodes.host}:{nodes.port}"
    if "Timeout" in kind:
        return f"{where}, did not all start: look at the other nodes."
    if "Closed" in kind:
        return f"{where}, have ended this run: another node's log has the cause."
    return f"{where}, lost each other ({kind}: {' '.join(str(error).split())}): look at node 0."


class _Agent(LocalElasticAgent):
    """Torch's agent, which also shows the ranks' output, forwards signals and does not retry bad input."""

    def __init__(
        self, launching: Launching, rendezvous: RendezvousHandler, logs: RankLogs, signals: Signals
    ) -> None:
        program, *arguments = ends_with_parent(launching.command)
        spec = WorkerSpec(
            role="rank",
            local_world_size=launching.ranks,
            rdzv_handler=rendezvous,
            entrypoint=program,
            args=tuple(arguments),
            max_restarts=launching.max_restarts,
            monitor_interval=0.1,
        )
        super().__init__(spec, logs)
        self._launching, self._logs, self._signals = launching, logs, signals

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._signals.listen(ranks_run=False)
        others = f"{self._launching.nodes.count} nodes to connect at --master"
        with said_after(FIRST_LINE_S, say, others):
            super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers: dict[int, Any] = super()._start_workers(worker_group)
        self._signals.listen(ranks_run=True)  # torch has installed handlers of its own
        return workers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None
        self._signals.hand_on(self._pcontext.pids().values())
        with said_after(_SETTLE_S, say, "the other ranks to end after one did; they are killed after 30 s"):
            result = super()._monitor_workers(worker_group)
        self._logs.show()
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._handle_failure(result)
        return result

    def _handle_failure(self, result: RunResult) -> None:
        """Decide whether the ranks start again, and report it."""
        codes = [failure.exitcode for failure in result.failures.values()]
        if self._signals.stop is not None or {EXIT_BAD_INPUT, self._launching.stopped_code} & set(codes):
            self._remaining_restarts = 0
        if (tries := self._remaining_restarts) > 0:
            most = self._worker_group.spec.max_restarts
            say(
                f"restart     {self._death(result.failures)} All ranks start again: restart {most - tries + 1} of {most}."
            )

    def end(self, result: RunResult | None) -> int:
        """Report why the ranks failed, if they did; return the exit code."""
        stop = self._signals.stop
        if result is None or not result.is_failed():
            return EXIT_DONE if stop is None else self._launching.stopped_code
        failure = result.failures[_root(result.failures)] if result.failures else None
        if failure is not None and failure.exitcode == self._launching.stopped_code:
            return failure.exitcode
        if stop is not None and failure is not None and failure.exitcode in (-signal.SIGTERM, -stop):
            say(f"{stop.name}: the ranks ended before there was anything to save")
            return 128 + stop
        errors = self._logs.errors()
        bad_input = failure is not None and failure.exitcode == EXIT_BAD_INPUT
        if errors and not bad_input:
            say(self._death(result.failures))
        reported = (
            bad_input and self._logs.said_errors
        )  # on a busy machine ranks end some time after they report bad input
        for line in errors or ([] if reported else [f"error: {self._death(result.failures)}"]):
            say(line)
        return failure.exitcode if failure is not None and failure.exitcode > 0 else EXIT_FAILED

    def _death(self, failures: Mapping[int, ProcessFailure]) -> str:
        """A line: which rank died and how, its last line of output, and its log."""
        if not failures:
            return "a rank hangs in the kernel and cannot be ended."
        rank = _root(failures)
        code = failures[rank].exitcode
        how = f"ended with exit code {code}"
        if code < 0:
            with suppress(ValueError):
                how = f"was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (the system does that when memory runs out)"
        line, path = self._logs.last_line(rank)
        last = f" Its last line: {line[:300].rstrip('.')}." if line else " It said nothing."
        return f"rank {rank} {how}.{last}" + (f" Its log: {path}." if path else "")


def _root(failures: Mapping[int, ProcessFailure]) -> int:
    """The rank whose end caused the end of the others.

    Order: bad input, then death by a signal, then the earliest; last, ranks that the agent ended.
    """

    def order(rank: int) -> tuple[bool, bool, bool, float, int]:
        code = failures[rank].exitcode
        return code != EXIT_BAD_INPUT, code == -signal.SIGTERM, code > 0, failures[rank].timestamp, rank

    return min(failures, key=order)
