"""Which files of the package a reader has to open to follow a hidden state through a linear, forward and backward: those
of the first walk of docs/architecture.md, nine."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.support.fp8_gpt import fp8_config
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.kernels.cpu import loops, mkl
from tests.support.architecture import PACKAGE, walk

TOKENS, INPUTS, OUTPUTS = 256, 128, 256  # large enough for the compiled loops

WALK = walk("A hidden state")
MORE = {"own": set(), "none": {"kernels/cpu/products.py"}, "mkl": {"kernels/cpu/products.py"}}
"""By who multiplies: gemm.c or, where the processor lacks what it is written for, torch or MKL, with one file more."""


def visited(gemm: str) -> dict[str, list[str]]:
    """A rank case: files and functions of an iteration whose delayed scales have a history, on a processor with this
    GEMM, 'own' being what there is."""
    if gemm == "own":
        return _visited()
    lacks = mock.patch.object(loops, "inner_loop", lambda: None)
    with lacks, mock.patch.object(mkl, "has_matmul", lambda: gemm == "mkl"):
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
    seen.pop("kernels/torch_products.py", None)  # where torch multiplies; its walk ends there
    return {file: sorted(names) for file, names in sorted(seen.items())}


@pytest.mark.skipif(loops.reason() is not None, reason="the walk is that of the compiled kernels")
@pytest.mark.parametrize("gemm", MORE)
def test_a_hidden_state_visits_the_files_of_its_walk(gemm: str, ranks: RankPool) -> None:
    assert len(WALK) == len(set(WALK)) == 9, "who makes the way longer changes this"
    if gemm == "mkl" and mkl.function() is None:
        pytest.skip("torch was built without MKL")
    for seen in ranks(2).run(visited, gemm):
        way = "\n".join(f"{file}: {', '.join(names)}" for file, names in seen.items())
        assert seen.keys() == {*WALK, *MORE[gemm]}, way
