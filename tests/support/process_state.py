"""What a file of tests may not leave changed in its process, where the next file would find it.

`left_behind(state())` says what differs by then, and puts it back; `with put_back():` is for code that has to change it,
such as a command's `main`. Of warnings' filters pytest itself takes care, after each test;
how a warning looks is changed by libraries when they are imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

WATCHED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
OF_OTHERS = ("PYTEST_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "PYTORCH_", "KMP_", "TOKENIZERS_")
"""What the names of variables begin with that pytest sets, or libraries when they are imported."""


@dataclass(frozen=True)
class Global:
    """One thing that belongs to the process: how to read it and how to put a value back."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _installed() -> bool:
    mcore = sys.modules.get("megatron_fp8.mcore")
    return mcore is not None and mcore.is_installed()


def _install(wanted: bool) -> None:
    from megatron_fp8 import mcore

    (mcore.install if wanted else mcore.uninstall)()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(OF_OTHERS)}


def _set_environment(values: dict[str, str]) -> None:
    for name in _environment():
        del os.environ[name]
    os.environ.update(values)


def _megatron_groups() -> bool:
    groups = sys.modules.get("megatron.core.parallel_state")
    return groups is not None and groups.model_parallel_is_initialized()


def _forget_megatron_groups(_: bool) -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def _signals() -> dict[signal.Signals, Any]:
    found = {number: signal.getsignal(number) for number in WATCHED_SIGNALS}
    if (
        found[signal.SIGINT] is signal.SIG_IGN
    ):  # the suite was started in the background; asyncio, for one, sets it
        found[signal.SIGINT] = signal.default_int_handler
    return found


def _set_signals(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _fills() -> bool:
    return bool(torch.utils.deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]


def _fill(wanted: bool) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = wanted  # type: ignore[attr-defined]


GLOBALS = {
    "megatron_fp8.mcore.install()": Global(_installed, _install),
    "Megatron-Core's groups": Global(_megatron_groups, _forget_megatron_groups),
    "torch.distributed's process group": Global(
        torch.distributed.is_initialized, lambda _: torch.distributed.destroy_process_group()
    ),
    "environment variables": Global(_environment, _set_environment),
    "working directory": Global(os.getcwd, os.chdir),
    "handlers of signals": Global(_signals, _set_signals),
    "torch's default dtype": Global(torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": Global(torch.get_default_device, torch.set_default_device),
    "torch's threads": Global(torch.get_num_threads, torch.set_num_threads),
    "torch's grad mode": Global(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.use_deterministic_algorithms": Global(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "whether deterministic algorithms fill new memory": Global(_fills, _fill),
    "torch's float32 precision of products": Global(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
}


def state() -> dict[str, Any]:
    """Every global by its name."""
    return {name: one.read() for name, one in GLOBALS.items()}


def left_behind(before: dict[str, Any]) -> list[str]:
    """A line for each global that is not what it was; all are as before afterwards."""
    found = []
    for name, one in GLOBALS.items():
        was, now = before[name], one.read()
        if was != now:
            found.append(f"{name}: {_difference(was, now)}")
            one.write(was)
    return found


@contextmanager
def put_back() -> Iterator[None]:
    """What is changed inside is as before afterwards."""
    before = state()
    try:
        yield
    finally:
        left_behind(before)


def _difference(was: Any, now: Any) -> str:
    if isinstance(was, dict):
        names = sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key))
        return ", ".join(f"{name} was {was.get(name)!r} and is {now.get(name)!r}" for name in names)
    return f"was {was!r} and is {now!r}"
