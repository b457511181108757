"""How many files of the package a reader has to open to follow a hidden state through a linear, forward and backward."""

from __future__ import annotations

import functools
import sys
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch

import megatron_fp8
from benchmarks.support.fp8_gpt import fp8_config
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.kernels.cpu import loops, mkl

PACKAGE = Path(megatron_fp8.__file__).parent
TOKENS, INPUTS, OUTPUTS = 256, 128, 256  # large enough for the compiled loops

MOST = {"own": 9, "mkl": 10, "none": 9}
"""Who raises it makes the way longer. A GEMM of another library is one file more."""


def visited(gemm: str) -> dict[str, list[str]]:
    """A rank case: files and functions of an iteration whose delayed scales have a history, on a processor with this
    GEMM, 'own' being what there is."""
    if gemm == "own":
        return _visited()
    lacks = mock.patch.object(loops, "inner_loop", lambda: None)
    lacks_both = mock.patch.object(mkl, "has_matmul", lambda: False)
    with lacks, lacks_both if gemm == "none" else nullcontext():
        return _visited()


def _visited() -> dict[str, list[str]]:
    from megatron_fp8.mcore import install, uninstall
    from megatron_fp8.mcore.layers.linear import Fp8ColumnParallelLinear
    from megatron_fp8.mcore.runtime import state_of

    layout = Layout(tp=2, sp=True)
    seen: dict[str, set[str]] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            seen.setdefault(str(path.relative_to(PACKAGE)), set()).add(frame.f_code.co_name)

    with model_parallel(layout):
        config = fp8_config(layout, "delayed", gradient_accumulation_fusion=False)
        init = functools.partial(torch.nn.init.normal_, std=0.02)
        linear = Fp8ColumnParallelLinear(
            INPUTS, OUTPUTS, config=config, init_method=init, bias=False, gather_output=False
        )
        uninstall()  # what stands in for CUDA on a CPU is not on the way
        try:
            for watch in (None, note):
                x = torch.randn(TOKENS // layout.tp, 1, INPUTS).bfloat16().requires_grad_()
                sys.setprofile(watch)
                linear(x)[0].sum().backward()
                sys.setprofile(None)
                counts = state_of(config).finish_iteration()
        finally:
            sys.setprofile(None)
            install()
        assert counts.fp8_gemms == 3 and x.grad is not None and x.grad.isfinite().all()
    return {file: sorted(names) for file, names in sorted(seen.items())}


@pytest.mark.parametrize("gemm", ["own", "mkl", "none"])
def test_a_hidden_state_visits_few_files(gemm: str, ranks: RankPool) -> None:
    for seen in ranks(2).run(visited, gemm):
        way = "\n".join(f"{file}: {', '.join(names)}" for file, names in seen.items())
        assert {"mcore/layers/linear.py", "linear/passes.py", "backends/emulated.py"} <= seen.keys(), way
        assert len(seen) <= MOST[gemm], way
