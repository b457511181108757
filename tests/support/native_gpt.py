"""The small GPT on the native backend without a GPU: kernels interpreted, products computed in float64.

What a GPU would launch is counted; what it would multiply is checked by tests/support/scaled_mm.py.
"""

from __future__ import annotations

import os

if "CUDA_VISIBLE_DEVICES" not in os.environ:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is loaded

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.support.fp8_gpt import digest, fp8_config
from benchmarks.support.gpt import build_chunks, train
from benchmarks.support.ranks import Layout, model_parallel

# One layer, 64 tokens a microbatch, one microbatch: what the interpreter does in seconds.
MODEL: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "num_attention_heads": 2,
    "bias_activation_fusion": True,
    "fp8_backend": "native",
}
TRAINING: dict[str, Any] = {"sequence": 32, "micro_batch": 2, "global_batch": 2, "vocab": 64}

HOW = ("fused", "written", "apart")
"""LazyTensor results computed by the linears' kernels; written first, then quantized; producers that do not know."""


@dataclass
class Seen:
    """One rank's training. ``calls``: launches of each step, forward to optimizer."""

    losses: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    calls: list[Counter[str]] = field(default_factory=list)
    counts: list[dict[str, int]] = field(default_factory=list)


@contextmanager
def native_on_cpu(how: str = "fused") -> Iterator[None]:
    """The native backend runs on CPU tensors."""
    from benchmarks.support.launched_kernels import unchecked
    from megatron_fp8 import kernels
    from megatron_fp8.backends.native import backend as native
    from megatron_fp8.kernels.lazy_tensor import materialize
    from megatron_fp8.mcore.layers.linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear
    from tests.support.scaled_mm import fake_torch
    from tests.support.triton_interpreter import lean_interpreter

    lean_interpreter()
    with ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))
        stack.enter_context(unchecked())
        stack.enter_context(fake_torch())
        stack.enter_context(mock.patch.object(native, "device_reason", return_value=None))
        stack.enter_context(mock.patch.object(kernels, "run_on", return_value=True))
        if how == "written":
            stack.enter_context(mock.patch.object(native, "source_of", materialize))
        if how == "apart":
            for linear in (Fp8ColumnParallelLinear, Fp8RowParallelLinear):
                stack.enter_context(mock.patch.object(linear, "makes_codes_of", return_value=False))
        yield


def native_training(
    layout: Layout, recipe: str, how: str, fields: dict[str, Any], options: dict[str, Any], steps: int = 2
) -> Seen:
    """A rank case."""
    from benchmarks.support.launched_kernels import launched
    from megatron_fp8.mcore.iteration import iteration_counts
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    seen = Seen()
    with native_on_cpu(how), launched() as calls, model_parallel(layout):

        def after_step(step: int, run: Any) -> None:
            seen.calls.append(Counter(calls))
            calls.clear()
            seen.digests.append(digest(run.chunks))
            seen.counts.append(iteration_counts())

        config = fp8_config(layout, recipe, **{**MODEL, **fields})
        run = train(
            config, steps=steps, on_step=after_step, spec=get_gpt_layer_fp8_spec, **{**TRAINING, **options}
        )
        seen.losses = run.losses
    return seen


def wgrads(recipe: str, fields: dict[str, Any], overwriting: bool) -> tuple[list[int], list[int], list[str]]:
    """A rank case: two steps of two microbatches. For each step, how many products were written to a tensor that was
    given, and how many not; and all gradients and weights."""
    from megatron_fp8.linear import gemm_site
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
    from tests.support.scaled_mm import fake_torch

    into: list[int] = []
    others: list[int] = []
    digests: list[str] = []
    with native_on_cpu(), fake_torch() as fake, model_parallel(Layout()), ExitStack() as stack:
        if not overwriting:
            stack.enter_context(mock.patch.object(gemm_site, "is_zeros", return_value=False))

        def after_step(step: int, run: Any) -> None:
            written = [product["into"] for product in fake.history]
            into.append(sum(written))
            others.append(len(written) - sum(written))
            fake.history.clear()
            digests.append(digest(run.chunks))

        config = fp8_config(Layout(), recipe, **{**MODEL, **fields})
        options = {**TRAINING, "global_batch": 4}
        train(config, steps=2, on_step=after_step, spec=get_gpt_layer_fp8_spec, **options)
    return into, others, digests


def evaluated(recipe: str) -> Seen:
    """A rank case: a forward pass in evaluation."""
    import torch

    from benchmarks.support.launched_kernels import launched
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    with native_on_cpu(), model_parallel(Layout()):
        (chunk,) = build_chunks(
            fp8_config(Layout(), recipe, **MODEL), spec=get_gpt_layer_fp8_spec, sequence=32, vocab=64
        )
        chunk.eval()
        tokens = torch.arange(64).view(2, 32)
        with torch.no_grad(), launched() as calls:
            chunk(tokens, tokens, None)
    return Seen(calls=[calls])


def sizes_noted(recipe: str, fields: dict[str, Any]) -> tuple[str, dict[str, list[str]]]:
    """A rank case: what is said where a model is prepared, and its report's notes by site."""
    import io
    from contextlib import redirect_stderr

    from megatron_fp8.files import terminal
    from megatron_fp8.mcore.report import site_report
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    terminal._printed.clear()
    with native_on_cpu(), model_parallel(Layout()), redirect_stderr(io.StringIO()) as said:
        config = fp8_config(Layout(), recipe, **{**MODEL, **fields})
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=32, vocab=64)
        report = site_report(chunks)
    return said.getvalue(), {entry["name"]: entry["notes"] for entry in report}


def native_trainings(layout: Layout, cases: list[tuple[Any, ...]]) -> list[Seen]:
    """A rank case: several trainings, one after the other; each entry is native_training's arguments after the layout."""
    return [native_training(layout, *case) for case in cases]


def gpu_checks(how: str, experts: int = 0) -> str:
    """A rank case: the GPU check of fused layers, here; what it says, or its AssertionError's words."""
    from benchmarks.gpu_fused import layers
    from benchmarks.gpu_models import DRY

    with native_on_cpu(how), model_parallel(Layout()):
        try:
            return layers("mxfp8", replace(DRY, experts=experts), steps=1)
        except AssertionError as error:
            return f"FAIL {error}"
