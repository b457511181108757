"""Products of many pairs in one call: each is the product alone, for any sizes and number of threads."""

from __future__ import annotations

import pytest
import torch

from megatron_fp8.kernels.cpu import emulation
from megatron_fp8.kernels.cpu.grouped import Product, multiply_each
from tests.support.threads import threads

SIZES = [(300, 96, 256), (17, 400, 64), (1000, 130, 130), (33, 700, 96), (129, 96, 31), (1, 300, 300)]


@pytest.mark.parametrize("loop", [emulation.AVX512, emulation.AMX, emulation.FLOAT32])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("add", [False, True])
def test_each_is_the_product_alone(loop: int, count: int, add: bool) -> None:
    """Also with one that takes most of the time, which all threads multiply, and one whose scales C refuses."""
    if loop not in emulation.inner_loops():
        pytest.skip("no such instructions")
    generator = torch.Generator().manual_seed(1)

    def operand(rows: int, k: int, scale: float) -> emulation.Operand:
        codes = torch.randint(0, 255, (k, rows), generator=generator, dtype=torch.uint8)
        codes[codes & 0x7F == 0x7F] = 0
        values = codes.view(torch.float8_e4m3fn).t()
        return emulation.Operand(values, torch.tensor(scale, device="cpu", dtype=torch.float32))

    products, expected, scales = [], [], [0.5, 3.0, 1.0, 2.0**-120, 0.1, 2.0]
    for (m, n, k), scale in zip(SIZES, scales, strict=True):
        a, b, out = operand(m, k, scale), operand(n, k, 0.25), torch.randn(m, n, generator=generator)
        products.append(Product(a, b, out, add))
        alone = emulation.multiply(a, b, torch.float32, loop=loop)
        expected.append(out.clone() if alone is None else out + alone if add else alone)
    with threads(count):
        done = multiply_each(products, loop=loop)
    assert done == [True, True, True, False, True, True]
    for i, (product, whole) in enumerate(zip(products, expected, strict=True)):
        assert torch.equal(product.out, whole), f"product {i}"


def test_of_none_there_is_nothing_to_do() -> None:
    assert multiply_each([]) == []
