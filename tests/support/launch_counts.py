"""What a GPU would launch, by name, without one: tensors have no values, kernels and operations are written down.

A launch is a Triton kernel, a scaled product, or any operation of torch's that is neither a view nor an allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fp8.backends.native.layout import Refusal
from tests.support.valueless_tensors import gpu_without_values, in_order

_FREE = ("empty", "new_empty", "_unsafe_view", "detach", "lift_fresh", "_reshape_alias", "set_", "is_pinned")


class _Operations(TorchDispatchMode):
    """Names the operations that would launch something."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace != "prim" and not (func.is_view or name.startswith(_FREE)):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def launches_by_name(refusal: Refusal = in_order) -> Iterator[list[str]]:
    """The names of all launches so far; tensors made inside have no values. ``refusal``: of the GPU's products.

    Collectives send nothing: each is a launch, as NCCL's are.
    """
    with gpu_without_values(refusal) as launches, ExitStack() as stack:
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            stack.enter_context(mock.patch.object(dist, name, _collective(name, launches.names)))
        stack.enter_context(_Operations(launches.names))
        yield launches.names


def _collective(name: str, names: list[str]) -> Callable[..., None]:
    return lambda *_, **__: names.append(name)
