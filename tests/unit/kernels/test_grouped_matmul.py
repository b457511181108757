"""Block-scaled products of many pairs in one launch: each is the product alone."""

from __future__ import annotations

import pytest
import torch

from megatron_fp8.kernels.block_matmul import block_matmul
from megatron_fp8.kernels.grouped_matmul import Product, grouped_block_matmul
from tests.support.matrices import DEVICE

SIZES = [(130, 40, 200), (1, 136, 128), (33, 260, 16), (128, 128, 300)]


def codes(rows: int, cols: int, seed: int) -> torch.Tensor:
    made = torch.randint(
        0, 127, (rows, cols), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    return made.to(DEVICE).view(torch.float8_e4m3fn)


def scales(rows: int, k: int, height: int, seed: int) -> torch.Tensor:
    """Turned, as a columnwise side's are, where the seed is odd."""
    shape = (-(-rows // height), -(-k // 128))
    made = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return made.t().contiguous().t() if seed % 2 else made


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("height", [1, 128])
def test_each_is_the_product_alone(height: int, add: bool, whole: bool) -> None:
    """Also where all N and K are multiples of 16, and codes are read 16 at once."""
    sizes = [(m, -(-n // 16) * 16, -(-k // 16) * 16) for m, n, k in SIZES] if whole else SIZES
    products, expected = [], []
    for seed, (m, n, k) in enumerate(sizes):
        a, b, out = codes(m, k, seed), codes(n, k, seed + 9), torch.randn(m, n).to(DEVICE)
        of_a, of_b = scales(m, k, 1, seed), scales(n, k, height, seed + 9)
        products.append(Product(a, of_a, b, of_b, out))
        alone = block_matmul(a, of_a, b, of_b, b_height=height, out_dtype=torch.float32)
        expected.append(alone + out if add else alone)
    grouped_block_matmul(products[0].a, products, a_height=1, b_height=height, add=add)
    for i, (product, wanted) in enumerate(zip(products, expected, strict=True)):
        assert torch.equal(product.out, wanted), f"product {i}"
