"""The checks of training: a GPT on Megatron-Core, native against emulated FP8 and BF16, with and without CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_common import Machine, supported
from benchmarks.gpu_models import DRY, TINY, Training
from megatron_fp8.train import cuda_graph
from megatron_fp8.train.launch.parallel import set_deterministic

GRAPHS = ("delayed", "tensorwise", "blockwise")


def checks() -> dict[str, Callable[[Machine], str]]:
    """Every check by name."""
    names = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
    found: dict[str, Callable[[Machine], str]]
    found = {f"training {name}": partial(training, name=name) for name in names}
    return found | {f"graph training {name}": partial(graph_training, name=name) for name in GRAPHS}


def training(machine: Machine, name: str) -> str:
    """A GPT on Megatron-Core, one rank: losses follow the emulated backend's, and are the same twice, to the bit."""
    if not machine.dry:
        set_deterministic()  # before the first product, when cuBLAS reads its setting
    supported(machine, name)
    steps = 2 if machine.dry else 12

    def losses(backend: str) -> list[float]:
        run = Training(DRY if machine.dry else TINY, name, backend)
        found = torch.stack([run.step() for _ in range(steps)]).tolist()
        sites = [s for s in run.report() if s["layer"] is not None]
        assert sites and {(s["precision"], s["backend"]) for s in sites} == {("fp8", backend)}, sites[0][
            "reason"
        ]
        return found

    native, again, emulation = (losses(b) for b in (machine.backend.name, machine.backend.name, "emulated"))
    bf16 = Training(DRY if machine.dry else TINY, None, "auto")
    plain = torch.stack([bf16.step() for _ in range(steps)]).tolist()
    apart = max(abs(a - b) / b for a, b in zip(native, emulation, strict=True))
    from_bf16 = max(abs(a - b) / b for a, b in zip(native, plain, strict=True))
    assert native == again, "two runs of the same seed differ"
    assert apart < 5e-3, f"losses {apart:.1e} from the emulated backend's"
    assert native[-1] < native[0] or machine.dry, f"the loss does not fall: {native}"
    return f"{native[0]:.3f} -> {native[-1]:.3f}; {apart:.1e} from the emulated, {from_bf16:.1e} from BF16"


def graph_training(machine: Machine, name: str) -> str:
    """The same GPT, with dropout: the losses of iterations that a CUDA graph replays are the eager ones, to the bit.

    With BF16 weights and with FP8 parameters. A dry run runs what would be captured.
    """
    if not machine.dry:
        set_deterministic()  # before the first product, when cuBLAS reads its setting
    supported(machine, name)
    steps = cuda_graph.EAGER_ITERATIONS + (2 if machine.dry else 7)

    def losses(graphs: bool, fp8_param: bool = False) -> list[float]:
        sizes, found = DRY if machine.dry else TINY, []
        run = Training(sizes, name, machine.backend.name, graphs=graphs, dropout=0.1, fp8_param=fp8_param)
        for _ in range(steps):
            found.append(run.step())
            if machine.dry and run.graph is not None:
                run.graph._graph = None  # what is not captured must run each time
        return torch.stack(found).tolist()

    eager = losses(False)
    with mock.patch.object(cuda_graph, "new_graph", _uncaptured) if machine.dry else nullcontext():
        for fp8_param in (False, True):
            replayed = losses(True, fp8_param)
            assert replayed == eager, f"{fp8_param=}: losses {replayed}, without a graph {eager}"
    return f"{steps - cuda_graph.EAGER_ITERATIONS} replays, {eager[0]:.3f} -> {eager[-1]:.3f} with both"


@contextmanager
def _uncaptured() -> Iterator[Any]:
    """A graph whose work runs as it would be captured, and whose replay does nothing."""
    yield SimpleNamespace(replay=lambda: None)
