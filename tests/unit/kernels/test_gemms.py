"""The compiled BF16 GEMM with a float32 result; where the processor lacks the instruction, what stands in for it."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from megatron_fp8 import quantize
from megatron_fp8.backends import emulated
from megatron_fp8.kernels import gemms
from megatron_fp8.kernels.cpu import emulation
from megatron_fp8.kernels.gemms import add_in_product, add_matmul_fp32, matmul_fp32, matmul_high_precision
from megatron_fp8.recipe import MXFP8BlockScaling
from tests.support.threads import threads

SHAPES = [
    (1, 1, 1 << 14),
    (14, 32, 1024),
    (15, 33, 1023),
    (13, 31, 1),
    (129, 200, 513),
    (300, 7, 514),
    (1000, 65, 63),
]


def matrix(rows: int, cols: int, layout: str, seed: int) -> torch.Tensor:
    """bfloat16 [rows, cols], rowwise or columnwise contiguous, or cut out of a larger matrix."""
    generator = torch.Generator().manual_seed(seed)
    if layout == "columnwise":
        return torch.randn(cols, rows, generator=generator).bfloat16().t()
    if layout == "cut out":
        return torch.randn(rows + 3, cols + 5, generator=generator).bfloat16()[2:-1, 1:-4]
    return torch.randn(rows, cols, generator=generator).bfloat16()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "layouts", [("rowwise", "rowwise"), ("columnwise", "columnwise"), ("cut out", "columnwise")]
)
def test_against_float64(monkeypatch, shape, layouts):
    monkeypatch.setattr(emulation, "MIN_PRODUCT", 1)
    m, n, k = shape
    a, b = matrix(m, k, layouts[0], 1), matrix(n, k, layouts[1], 2)
    exact = a.double() @ b.double().t()
    scale = a.double().abs() @ b.double().abs().t()
    of_float32 = ((a.float() @ b.float().t() - exact).abs() / scale).max()
    c = matmul_high_precision(a, b, torch.float32)
    assert c.dtype is torch.float32 and c.shape == (m, n)
    error = ((c - exact).abs() / scale).max()
    assert error <= 4 * max(float(of_float32), 2**-24), (float(error), float(of_float32))


def test_is_used_where_the_processor_has_it(monkeypatch):
    """A silent return to the slow way would pass every other test."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if platform.machine() == "x86_64" and cpuinfo.exists() else set()
    assert (emulation.AVX512 in emulation.inner_loops()) == ("avx512_bf16" in flags)
    float32 = {"avx2", "fma", "f16c"} <= flags or platform.machine() == "aarch64"
    assert (emulation.FLOAT32 in emulation.inner_loops()) == float32
    assert emulation.has_matmul() == bool(emulation.inner_loops())
    calls = []
    multiply = emulation.multiply
    monkeypatch.setattr(
        emulation, "multiply", lambda a, *given: calls.append(a.values.shape) or multiply(a, *given)
    )
    a, b = matrix(128, 128, "rowwise", 1), matrix(64, 128, "rowwise", 2)
    matmul_high_precision(a, b, torch.float32)
    assert calls == ([a.shape] if emulation.has_matmul() else [])
    matmul_high_precision(a[:1], b[:1], torch.float32)
    assert len(calls) == int(emulation.has_matmul())  # small ones are not worth a packing


def test_an_element_depends_on_its_row_and_column_alone():
    """Neither the other rows, nor threads, change a bit (a library's GEMM promises neither)."""
    if not emulation.has_matmul():
        return
    a, b = matrix(301, 1100, "rowwise", 3), matrix(97, 1100, "columnwise", 4)
    whole = matmul_fp32(a, b)
    for count in (1, 3):
        with threads(count):
            assert torch.equal(matmul_fp32(a, b), whole)
    for rows, cols in (
        (slice(0, 1), slice(0, 97)),
        (slice(100, 133), slice(40, 41)),
        (slice(300, 301), slice(96, 97)),
    ):
        assert torch.equal(matmul_fp32(a[rows], b[cols]), whole[rows, cols])


def test_nan_and_inf_stay_in_their_row_and_column(monkeypatch):
    monkeypatch.setattr(emulation, "MIN_PRODUCT", 1)
    a, b = matrix(40, 65, "rowwise", 5), matrix(50, 65, "rowwise", 6)
    a[17, 64], b[33, 0] = torch.nan, torch.inf
    found = matmul_high_precision(a, b, torch.float32)
    exact = a.double() @ b.double().t()
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found.isinf(), exact.isinf()) and bool(exact.isinf().any())


@pytest.mark.parametrize("shape", [(0, 5, 7), (5, 0, 7), (5, 7, 0)], ids=str)
def test_empty(monkeypatch, shape):
    monkeypatch.setattr(emulation, "MIN_PRODUCT", 0)
    m, n, k = shape
    found = matmul_high_precision(
        torch.ones(m, k, dtype=torch.bfloat16), torch.ones(n, k, dtype=torch.bfloat16), torch.float32
    )
    assert found.shape == (m, n) and not found.any()


@pytest.mark.parametrize("rows", [8, 160], ids=["small", "large"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_products_leave_the_process_alone(monkeypatch, compiled, rows):
    """Two threads multiply in emulated FP8 while a third multiplies float32: same bits and settings at any time."""
    if not compiled:
        monkeypatch.setattr(emulation, "reason", lambda: "not wanted")
    settings = torch.backends.mkldnn.matmul, torch.backends.mkldnn, torch.backends
    before = [setting.fp32_precision for setting in settings]
    x, w = matrix(rows, 256, "rowwise", 7), matrix(rows, 256, "rowwise", 8)
    sides = [quantize(m, MXFP8BlockScaling(), "input").rowwise for m in (x, w)]
    expected = emulated.gemm(*sides)
    a, b = torch.randn(96, 300), torch.randn(300, 96)
    alone = a @ b
    seen, wrong, stop = set(), [], threading.Event()

    def multiply() -> None:
        for _ in range(12):
            if not torch.equal(emulated.gemm(*sides), expected):
                wrong.append("an emulated product")

    def watch() -> None:
        while not stop.is_set():
            seen.add(tuple(setting.fp32_precision for setting in settings))
            if not torch.equal(a @ b, alone):
                wrong.append("a float32 product")

    watcher = threading.Thread(target=watch)
    workers = [threading.Thread(target=multiply) for _ in range(2)]
    for thread in (watcher, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    watcher.join()
    assert not wrong and seen <= {tuple(before)}, (wrong[:1], seen)
    assert [setting.fp32_precision for setting in settings] == before


@pytest.fixture
def asked_anew() -> Iterator[None]:
    gemms._adds_to_float32.cache_clear()
    yield
    gemms._adds_to_float32.cache_clear()


def test_a_product_that_is_added(asked_anew, monkeypatch):
    """To float32 in one product of torch's, which takes these tensors (their shape function says so); else by a pass."""
    a, b, into = matrix(14, 70, "rowwise", 1), matrix(32, 70, "columnwise", 2), torch.ones(14, 32)
    expected = 1 + matmul_high_precision(a, b, torch.float32)
    add_matmul_fp32(into, a, b)
    assert torch.equal(into, expected)
    calls = []
    whole = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *args, **options: calls.append(whole(*args, **options)))
    meta = [t.to("meta") for t in (into, a, b)]
    assert add_in_product(*meta) and calls[-1] is meta[0] and meta[0].dtype is torch.float32
    assert not add_in_product(meta[0].bfloat16(), *meta[1:]) and not add_in_product(meta[0], a.float(), b)
    assert len(calls) == 2, "one asks"


def test_a_torch_that_adds_to_operands_dtype_alone(asked_anew, monkeypatch):
    """2.8 and 2.9: their shape function takes float32, and their CUDA code does not."""
    asked = MagicMock(
        side_effect=RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")
    )
    monkeypatch.setattr(torch, "addmm", asked)
    a, b, into = (
        torch.ones(16, 16, dtype=dtype, device="meta")
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)
    )
    assert not add_in_product(into, a, b) and not add_in_product(into, a, b)
    asked.assert_called_once()
