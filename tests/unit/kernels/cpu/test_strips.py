"""Strips of a product that are an odd number of blocks wide, and layers of a long k: packed in memory of their own, and
no further; sums that go on from layer to layer."""

from __future__ import annotations

import pytest
import torch

from megatron_fp8.kernels.cpu import emulation
from tests.support.threads import threads


@pytest.mark.parametrize("loop", [emulation.AVX512, emulation.AMX, emulation.FLOAT32])
@pytest.mark.parametrize("columns_dense", ["", "b", "a", "ab"])
@pytest.mark.parametrize(
    ("m", "n", "k", "count"),
    [(33, 40, 2048, 2), (33, 300, 8192, 1), (33, 300, 8192, 2), (33, 96, 4096, 3), (1100, 40, 6200, 1)],
)
def test_strips_of_odd_width_keep_to_themselves(
    m: int, n: int, k: int, count: int, columns_dense: str, loop: int
) -> None:
    """Without that a thread's panels lay in another's, or beyond all memory: NaN, or the end of the process."""
    if loop not in emulation.inner_loops():
        pytest.skip("no such instructions")
    generator = torch.Generator().manual_seed(n + k)
    a = torch.randint(-8, 9, (m, k), generator=generator).to(torch.float8_e4m3fn)
    b = torch.randint(-8, 9, (n, k), generator=generator).to(torch.float8_e4m3fn)
    expected = a.to(torch.float32).to(torch.float64) @ b.to(torch.float32).to(torch.float64).t()
    if "a" in columns_dense:
        a = a.t().contiguous().t()
    if "b" in columns_dense:
        b = b.t().contiguous().t()
    with threads(count):
        for _ in range(3):
            made = emulation.multiply(emulation.Operand(a), emulation.Operand(b), torch.float32, loop=loop)
            assert made is not None
            assert torch.equal(made.double(), expected)  # sums of small integers are exact in any order
