"""The block-scaled GEMM against the emulated backend's float64 product of the same codes and scales."""

from __future__ import annotations

import pytest
import torch

from megatron_fp8.backends import emulated
from megatron_fp8.kernels import block_matmul as block_matmul_module
from megatron_fp8.kernels.block_matmul import Product, block_matmul, grouped_block_matmul
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.recipe import BLOCK_1X128, BLOCK_128X128, Rule
from tests.support.matrices import DEVICE


def operand(rows, cols, fmt, granularity, kind, seed):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    # Blocks of very different size: a scale taken from the wrong block is seen.
    x *= torch.exp2(
        torch.arange(cols, device=DEVICE) // 128 * 3 - torch.arange(rows, device=DEVICE)[:, None] % 7
    )
    x[rows // 2 :] *= 32
    side = emulated.quantize(x, Rule(fmt, granularity, kind), "rowwise").tensor.rowwise
    assert side is not None
    return side


CASES = {
    "fprop": (E4M3, BLOCK_1X128, E4M3, BLOCK_128X128),
    "dgrad-hybrid": (E5M2, BLOCK_1X128, E4M3, BLOCK_128X128),
    "wgrad-hybrid": (E5M2, BLOCK_1X128, E4M3, BLOCK_1X128),
    "square": (E4M3, BLOCK_128X128, E4M3, BLOCK_128X128),
}


def assert_close(out, a, b, what):
    """Every element is as exact as float32 sums of its own terms can be (Hopper's keep fewer bits for 128 of them)."""
    exact = emulated.gemm(a, b, out_dtype=torch.float64, exact=True)
    terms = a.dequantize(torch.float64).abs() @ b.dequantize(torch.float64).abs().t()
    worst = ((out - exact).abs() / terms.clamp_(min=1e-30)).max()
    assert worst < (1e-6 if DEVICE.type == "cpu" else 1e-3), f"{what}: {worst}"


@pytest.mark.parametrize("name", CASES)
def test_product(name):
    fmt_a, block_a, fmt_b, block_b = CASES[name]
    for (m, n, k), kind in {(1, 1, 1): "pow2", (33, 129, 200): "pow2", (130, 40, 384): "fp32"}.items():
        a, b = operand(m, k, fmt_a, block_a, kind, 1), operand(n, k, fmt_b, block_b, kind, 2)
        out = block_matmul(
            a.codes,
            a.scale_inv,
            b.codes,
            b.scale_inv,
            a_height=block_a.rows,
            b_height=block_b.rows,
            out_dtype=torch.float32,
        )
        assert_close(out, a, b, f"{name} {m, n, k}")


def test_bias_and_dtypes():
    """The bias is added in float32, and there is one rounding. Scales may have any strides."""
    a, b = operand(33, 200, E4M3, BLOCK_1X128, "fp32", 1), operand(40, 200, E4M3, BLOCK_1X128, "fp32", 2)
    bias = torch.randn(40, generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.bfloat16)
    args = (a.codes, a.scale_inv, b.codes, b.scale_inv.t().contiguous().t())
    out = block_matmul(*args, out_dtype=torch.float32)
    biased = block_matmul(*args, out_dtype=torch.float32, bias=bias)
    assert torch.equal(biased, out + bias)
    assert torch.equal(block_matmul(*args, bias=bias), biased.to(torch.bfloat16))


def test_added_to_what_is_there():
    """In the product, with the bits of an addition after it; what is around the matrix stays."""
    a, b = operand(33, 200, E4M3, BLOCK_1X128, "pow2", 1), operand(40, 200, E5M2, BLOCK_1X128, "pow2", 2)
    args = (a.codes, a.scale_inv, b.codes, b.scale_inv)
    around = torch.randn(35, 40, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    before, into = around.clone(), around[1:-1]
    assert block_matmul(*args, out_dtype=torch.float32, into=into) is into
    before[1:-1] += block_matmul(*args, out_dtype=torch.float32)
    assert torch.equal(around, before)


def test_tiles_in_bands():
    """More tiles than a band holds, both ways: every tile of the result is made once."""
    codes = torch.full((9 * 128 + 5, 1), 0x38, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    rows = torch.arange(1.0, len(codes) + 1, device=DEVICE)[:, None]
    out = block_matmul(codes, rows, codes[:130], rows[:130], out_dtype=torch.float32)
    assert torch.equal(out, rows * rows[:130].t())


def test_nan_and_nothing():
    a, b = (operand(40, 256, E4M3, BLOCK_1X128, "pow2", seed) for seed in (1, 2))
    a.codes.view(torch.uint8)[3, 200] = 0x7F
    out = block_matmul(a.codes, a.scale_inv, b.codes, b.scale_inv)
    assert out[3].isnan().all() and out.isnan().sum() == 40
    empty = torch.empty(40, 0, dtype=torch.float8_e4m3fn, device=DEVICE)
    scale = torch.empty(40, 0, device=DEVICE)
    bias = torch.arange(40.0, device=DEVICE)
    assert torch.equal(block_matmul(empty, scale, empty, scale, bias=bias), bias.bfloat16().expand(40, 40))
    assert block_matmul(empty[:0], scale[:0], empty, scale).shape == (0, 40)


def test_a_device_with_less_shared_memory_takes_fewer_stages(monkeypatch):
    """An RTX 40 has half of an H100's; what was found to fit is not tried again. None at all is one line."""
    from triton.runtime.errors import OutOfResources

    room, tried = 2, []

    def launch(stages):
        tried.append(stages)
        if stages > room:
            raise OutOfResources(stages * 32768, room * 32768, "shared memory")

    monkeypatch.setattr(block_matmul_module, "_stages", {})
    for _ in range(2):
        block_matmul_module.launch_with_room(launch, torch.device("cuda", 0))
    assert tried == [4, 3, 2, 2]
    room = 0
    with pytest.raises(RuntimeError, match="no room on cuda:1 for a tile") as caught:
        block_matmul_module.launch_with_room(launch, torch.device("cuda", 1))
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 16), (130, 70, 208)])
@pytest.mark.parametrize("name", CASES)
def test_descriptors_and_pointers_give_the_same_bytes(
    name: str, m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one pair and grouped; codes that no descriptor can describe go by pointers."""
    fmt_a, block_a, fmt_b, block_b = CASES[name]
    a, b = operand(m, k, fmt_a, block_a, "fp32", 1), operand(n, k, fmt_b, block_b, "fp32", 2)
    args, heights = (a.codes, a.scale_inv, b.codes, b.scale_inv), (block_a.rows, block_b.rows)
    of = dict(zip(("a_height", "b_height"), heights, strict=True))
    described, found = count_calls(monkeypatch, "_tensor_descriptor"), {}
    for tma in (False, True):
        monkeypatch.setattr(block_matmul_module, "has_tma", lambda tma=tma: tma)
        grouped = torch.empty(m, n, device=DEVICE)
        grouped_block_matmul(a.codes, [Product(*args, grouped)], **of)
        found[tma] = block_matmul(*args, **of, out_dtype=torch.float32), grouped
    assert len(described) == 2, "both operands of the one pair"
    assert all(map(torch.equal, found[True], found[False])) and torch.equal(*found[True])
    moved = torch.empty(m * k + 8, dtype=a.codes.dtype, device=DEVICE)[8:].view(m, k).copy_(a.codes)
    assert torch.equal(block_matmul(moved, *args[1:], **of, out_dtype=torch.float32), grouped)
    assert len(described) == 2


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[object, ...]]:
    """Arguments of all calls of a function of the module from now on."""
    calls, real = [], getattr(block_matmul_module, name)
    monkeypatch.setattr(block_matmul_module, name, lambda *args: calls.append(args) or real(*args))
    return calls


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
