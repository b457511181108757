"""A log of collectives, waits and whatever else a test adds, in the order in which they happen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# Collective -> position of the tensor that this rank sends.
SENT = {
    "all_reduce": 0,
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all_single": 1,
}


@dataclass
class Sent:
    """One collective's local contribution."""

    name: str
    dtype: torch.dtype
    bytes: int
    asynchronous: bool


@dataclass
class Log:
    """`sent` in order; `events`: 'issue all_reduce', later 'wait all_reduce', or 'do all_reduce' if synchronous."""

    sent: list[Sent] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def count(self, name: str) -> int:
        """How many collectives of this name there were."""
        return sum(s.name == name for s in self.sent)


class _Work:
    def __init__(self, work: Any, log: Log, name: str):
        self._work, self._log, self._name = work, log, name

    def wait(self) -> None:
        self._log.events.append(f"wait {self._name}")
        self._work.wait()


@contextlib.contextmanager
def recorded() -> Iterator[Log]:
    """Every collective of torch.distributed inside is logged, and done."""
    log = Log()

    def wrapping(name: str) -> Any:
        original = getattr(dist, name)

        def collective(*args: Any, **kwargs: Any) -> Any:
            tensor = args[SENT[name]]
            asynchronous = bool(kwargs.get("async_op"))
            log.sent.append(Sent(name, tensor.dtype, tensor.numel() * tensor.element_size(), asynchronous))
            log.events.append(f"{'issue' if asynchronous else 'do'} {name}")
            work = original(*args, **kwargs)
            return _Work(work, log, name) if asynchronous else work

        return collective

    with contextlib.ExitStack() as stack:
        for name in SENT:
            stack.enter_context(mock.patch.object(dist, name, wrapping(name)))
        yield log
