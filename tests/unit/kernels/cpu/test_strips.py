"""Strips of a product's columns that are an odd number of blocks wide: packed in memory of their own, and no further."""

from __future__ import annotations

import pytest
import torch

from megatron_fp8.kernels.cpu import loops


@pytest.mark.parametrize("loop", [loops.AVX512, loops.AMX])
@pytest.mark.parametrize("columns_dense", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "threads"), [(40, 2048, 2), (300, 8192, 1), (300, 8192, 2), (96, 4096, 3)]
)
def test_strips_of_odd_width_keep_to_themselves(
    n: int, k: int, threads: int, columns_dense: bool, loop: int
) -> None:
    """Without that a thread's panels lay in another's, or beyond all memory: NaN, or the end of the process."""
    if loop not in loops.inner_loops():
        pytest.skip("no such instructions")
    generator = torch.Generator().manual_seed(n + k)
    a = torch.randint(-8, 9, (33, k), generator=generator).to(torch.float8_e4m3fn)
    b = torch.randint(-8, 9, (n, k), generator=generator).to(torch.float8_e4m3fn)
    expected = a.to(torch.float32).to(torch.float64) @ b.to(torch.float32).to(torch.float64).t()
    if columns_dense:
        b = b.t().contiguous().t()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(3):
            made = loops.multiply(loops.Operand(a), loops.Operand(b), torch.float32, loop=loop)
            assert made is not None
            assert torch.equal(
                made.to(torch.float64), expected
            )  # sums of small integers are exact in any order
    finally:
        torch.set_num_threads(before)
