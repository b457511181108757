"""Codes and scales do not depend on whether the calling thread flushes subnormal numbers to zero."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8 import quantize
from megatron_fp8.kernels.cpu import emulation as cpu
from megatron_fp8.numerics.cast import RandomKey, cast_stochastic
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.subnormals import flushes_subnormals
from megatron_fp8.params.fp8_parameter import fp8_parameter
from megatron_fp8.params.shards import quantize_shards
from megatron_fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
)
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.fp8_weights import quantizer_of
from tests.support.slots import observe
from tests.support.threads import threads

RECIPES = {
    "tensorwise": Float8CurrentScaling(),
    "rowwise": Float8RowwiseScaling(),
    "blockwise": Float8BlockScaling(),
    "blockwise-fp32": Float8BlockScaling(use_f32_scales=True),
    "mxfp8": MXFP8BlockScaling(),
}
SMALL, LARGE = (7, 129), (600, 129)
"""Torch's operations take the first, compiled kernels the second, and two threads."""


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with threads(2):
        yield


@contextmanager
def flushing() -> Iterator[None]:
    """As after torch.set_flush_denormal(True); whoever runs inside leaves it so."""
    assert torch.set_flush_denormal(True), "this processor cannot flush subnormal numbers"
    try:
        yield
        assert flushes_subnormals(), "the thread's mode was not put back"
    finally:
        torch.set_flush_denormal(False)


def sample(shape: tuple[int, int], size: float, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * size).to(dtype)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("size", [1e-39, 1e-37, 1e36])
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantize_and_dequantize(recipe, size, shape):
    """Subnormal elements, subnormal amaxes of some blocks, and subnormal inverses of scales."""
    for dtype in (torch.float32, torch.bfloat16):
        x = sample(shape, size, dtype)
        x[0, :40] *= 1e-3

        def run(x=x):
            q = quantize(x, RECIPES[recipe], "grad_output", "both")
            return [
                found.reshape(-1)
                for side in (q.rowwise, q.columnwise)
                for found in (side.codes, side.scale_inv, side.dequantize(), side.dequantize(torch.bfloat16))
            ]

        expected = run()
        assert any(bool(values.float().any()) for values in expected)
        with flushing():
            found = run()
        assert_all_same_bytes(found, expected, f"{dtype}, result")


def test_the_threads_of_compiled_kernels():
    """Called as they are, on a new thread: the helpers that OpenMP starts there flush as it does."""
    assert cpu.reason() is None and cpu.thread_count(LARGE[0] * LARGE[1]) == 2
    x, scale = sample(LARGE, 1e-39, torch.float32), torch.tensor(2.0**127)
    codes = cpu.cast(x, scale, (0, 0), torch.float8_e4m3fn)
    inverse = 1 / scale
    values = cpu.decode(codes, inverse, (0, 0), torch.float32)
    assert values[0].any() and values[-1].any()

    def run():
        with flushing():
            assert cpu.thread_count(x.numel()) == 2
            found = cpu.cast(x, scale, (0, 0), torch.float8_e4m3fn)
            return found, cpu.decode(codes, inverse, (0, 0), torch.float32)

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(run).result()
    assert_same_bytes(found[0], codes, "codes")
    assert_same_bytes(found[1], values, "values")


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_stochastic_rounding(fmt):
    x, scale = sample(SMALL, 1e-38, torch.float32), torch.tensor(2.0**120)
    expected = cast_stochastic(x, scale, fmt, RandomKey(1))
    with flushing():
        assert_same_bytes(cast_stochastic(x, scale, fmt, RandomKey(1)), expected, fmt.name)


def test_delayed_scales():
    """Amaxes are recorded, compared and divided by as they are; a subnormal one is not taken for 'not cast'."""

    def run() -> torch.Tensor:
        state = Fp8State()
        arena = state.arena(None)
        recipe = DelayedScaling(amax_history_len=4)
        slots = [arena.add(recipe, E4M3) for _ in range(3)]
        for factor in (1.0, 2.0, 0.5):
            for slot, amax in zip(slots, (one, tiny, large), strict=True):
                observe(slot, amax * factor if amax is not tiny else amax)
            state.finish_iteration()
        return arena.scale[:3].clone()

    one, tiny, large = torch.tensor(1.0), torch.tensor(3e-39), torch.tensor(3e38)
    expected = run()
    with flushing():
        assert_same_bytes(run(), expected, "scales")


def test_sharded_masters():
    master = sample((64, 64), 1e-39, torch.float32)

    def run():
        weight = fp8_parameter(torch.zeros(64, 64, dtype=torch.bfloat16), quantizer_of(RECIPES["tensorwise"]))
        quantize_shards([weight], [master.view(-1)], [0], None)
        return weight.codes[0].clone(), weight.dequantize(torch.float32).clone()

    expected = run()
    assert expected[0].any()
    with flushing():
        found = run()
    assert_all_same_bytes(found, expected, "shards")
