"""Megatron-Core's HybridDeviceOptimizer on a machine without a GPU: its own code, with streams that do nothing.

    with offloading(fraction=1.0) as optim:     # fields of OptimizerConfig
        ...

While it divides its parameters they count as a GPU's, so that it makes copies "on the CPU", steps those and copies back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


class Stream:
    """A stream, and an event on it: everything has happened already."""

    def wait_stream(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> Stream:
        return self

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def _as_cpu_copy(tensor: torch.Tensor) -> torch.Tensor:
    """In place of pin_memory, which ends the copy to the CPU."""
    tensor.is_cpu_copy = True  # type: ignore[attr-defined]
    return tensor


@contextmanager
def offloading(
    fraction: float = 1.0, overlap: bool = False, same_adam: bool = False
) -> Iterator[dict[str, Any]]:
    """``same_adam``: the CPU's Adam has the bits of the one that is not offloaded."""
    from megatron.core import optimizer
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    from megatron_fp8.mcore.optimizer import optimizer_setup

    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def divided(self: Any, fraction: float) -> Any:
        on_gpu = property(lambda tensor: not getattr(tensor, "is_cpu_copy", False))
        with (
            mock.patch.object(torch.Tensor, "is_cuda", on_gpu),
            mock.patch.object(torch.Tensor, "pin_memory", _as_cpu_copy),
        ):
            return divide(self, fraction)

    with ExitStack() as stack:
        for where, name, value in (
            (HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", divided),
            (optimizer_setup, "compat", SimpleNamespace(has_cuda=lambda: True)),
            (torch.cuda, "current_stream", lambda *_: Stream()),
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "stream", lambda _: nullcontext()),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        if same_adam:
            stack.enter_context(mock.patch.object(optimizer, "CPUAdam", optimizer.Adam))
        yield {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": fraction,
            "overlap_cpu_optimizer_d2h_h2d": overlap,
            "pin_cpu_grads": False,
        }
