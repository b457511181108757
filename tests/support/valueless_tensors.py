"""A GPU's stand-in that has no values: whoever asks for one, and so would wait for the GPU, gets an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fp8.backends.native import backend as native
from megatron_fp8.backends.native import products
from megatron_fp8.backends.native.layout import Refusal, Request
from megatron_fp8.numerics import host_sync
from megatron_fp8.state.fp8_state import Fp8State


class Launches:
    """Triton kernels that are launched and do nothing; ``names``: what was launched so far."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @property
    def count(self) -> int:
        """How many."""
        return len(self.names)

    def kernel(self, name: str) -> _Kernel:
        """The stand-in of one."""
        return _Kernel(name.strip("_"), self.names)


class _Kernel:
    def __init__(self, name: str, names: list[str]) -> None:
        self.name, self.names = name, names

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: self.names.append(self.name)


def _scaled_mm_v2(*args: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """torch's, whose form with ``out`` has no shape function."""
    found = torch.ops.aten._scaled_mm_v2(*args)
    return found if out is None else out


def in_order(request: Request) -> str | None:
    """The refusal of a GPU with all products but those of transposed codes."""
    return "transposed" if any(request.turned) else None


@contextmanager
def gpu_without_values(refusal: Refusal = in_order) -> Iterator[Launches]:
    """Tensors without values: who asks for one gets DataDependentOutputException. Kernels are launched and do nothing.

    The device is the CPU in name (a fake GPU cannot be indexed where there is none), where kernels are said to run.
    ``refusal``: of its products.
    """
    from megatron_fp8 import kernels as dispatch
    from megatron_fp8.backends.native import placement
    from megatron_fp8.kernels import (
        block_matmul,
        delayed_update,
        fp4_quantize,
        fused_quantize,
        gemm_layouts,
        param_cast,
        quantize,
        zero_pool,
    )

    launches = Launches()
    kernels = [
        *(
            (quantize, name)
            for name in ("find_amaxes", "cast_tensor", "cast_rows", "quantize_tiles", "write_values")
        ),
        *((param_cast, name) for name in ("_piece_amax", "_piece_cast")),
        (fused_quantize, "_row_rstd"),
        (fused_quantize, "_weight_grad"),
        (delayed_update, "_update"),
        (gemm_layouts, "_tile_scales"),
        (gemm_layouts, "_transpose"),
        (block_matmul, "_block_matmul"),
        (fp4_quantize, "find_fp4_amaxes"),
        (fp4_quantize, "cast_fp4"),
        (fp4_quantize, "find_factor"),
    ]
    patches = [mock.patch.object(module, name, launches.kernel(name)) for module, name in kernels]
    patches.append(mock.patch.object(torch, "_scaled_mm_v2", _scaled_mm_v2))
    patches += [mock.patch.object(module, "refusals", lambda *_: refusal) for module in (native, products)]
    patches.append(mock.patch.object(dispatch, "run_on", lambda _: True))
    patches.append(mock.patch.object(host_sync, "read_waits", lambda _: True))
    patches.append(mock.patch.object(placement, "has_kernels", lambda _: True))
    patches.append(mock.patch.object(zero_pool, "_fills_each", lambda _: False))
    patches.append(mock.patch.object(zero_pool, "_pools", {}))
    with FakeTensorMode():
        for patch in patches:
            patch.start()
        zero_pool.take(torch.device("cpu"))  # its block's fill is no cast's
        try:
            yield launches
        finally:
            for patch in patches:
                patch.stop()


def warm(state: Fp8State) -> None:
    """Every slot as after an iteration."""
    for arena in state.arenas:
        for slot in arena.slots:
            slot.warm = True
        for history in arena._histories.values():
            history.cold = 0
        arena.update(0)
