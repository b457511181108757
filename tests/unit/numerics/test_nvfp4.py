"""NVFP4: codes, scales, transform and random bytes against docs/numerics.md written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.support import nvfp4_reference as reference
from megatron_fp8 import quantize
from megatron_fp8.backends import emulated
from megatron_fp8.backends.base import Region
from megatron_fp8.kernels.cpu import fp4 as cpu_fp4
from megatron_fp8.numerics import nvfp4
from megatron_fp8.numerics.cast import RandomKey
from megatron_fp8.recipe import MXFP8BlockScaling, NVFP4BlockScaling
from megatron_fp8.tensor import QuantizedSide

RECIPE, NEAREST = NVFP4BlockScaling(), NVFP4BlockScaling(disable_stochastic_rounding=True)
PLAIN = NVFP4BlockScaling(True, True, True)
SHAPES = [(1, 1), (7, 33), (16, 16), (129, 200), (64, 256), (250, 31)]


def matrix(shape: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 2.0):
    """Normal values times e^(spread * normal): blocks of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x, size = (torch.randn(shape, generator=generator) for _ in range(2))
    return (x * torch.exp(spread * size)).to(dtype)


def assert_side(side: QuantizedSide, wanted: reference.Matrix) -> None:
    assert np.array_equal(nvfp4.unpack(side.codes).numpy(), wanted.codes)
    assert np.array_equal(side.scale_inv.to(torch.float32).numpy(), wanted.scales)
    assert side.tensor_amax.item() == wanted.amax


def test_every_value_and_every_midpoint():
    points = np.concatenate(
        [reference.VALUES, *[np.float32([m]) for m in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 9)]]
    )
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(9)), np.nextafter(points, np.float32(-9))]
    )
    points = np.concatenate([points, -points, np.float32([np.inf, -np.inf, np.nan, -np.nan])])
    codes = nvfp4.encode(torch.from_numpy(points))
    assert np.array_equal(codes.numpy(), reference.to_e2m1(points))
    every = torch.arange(16, dtype=torch.uint8)[None]
    numbers = nvfp4.values(nvfp4.pack(every))
    assert torch.equal(nvfp4.unpack(nvfp4.pack(every)), every)
    assert torch.equal(nvfp4.encode(numbers), every) and torch.signbit(numbers[0, 8])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("role, rows", [("input", 1), ("weight", 16)])
def test_rowwise(shape, dtype, role, rows):
    x = matrix(shape, dtype, seed=shape[1])
    side = quantize(x, RECIPE, role).rowwise
    wanted = reference.quantize(x.float().numpy(), rows)
    assert_side(side, wanted)
    assert side.shape == shape
    scale = np.float32(1) / min(np.float32(2688) / wanted.amax, np.finfo(np.float32).max)
    values = (wanted.values().astype(np.float32) * scale)[:, : shape[1]]
    assert np.array_equal(side.dequantize(torch.float32).numpy(), values)


@pytest.mark.parametrize("shape", SHAPES)
def test_columnwise(shape):
    x = matrix(shape)
    turned = x.t().contiguous().numpy()
    assert_side(
        quantize(x, RECIPE, "input", "columnwise").columnwise,
        reference.quantize(reference.transform(turned), 1),
    )
    assert_side(quantize(x, PLAIN, "input", "both").columnwise, reference.quantize(turned, 1))
    whole = quantize(x, RECIPE, "weight", "both")
    assert torch.equal(whole.columnwise.dequantize(), whole.rowwise.dequantize().t())
    assert torch.equal(whole.columnwise.scale_inv.float(), whole.rowwise.scale_inv.float().t())


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-38, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("role, rows", [("input", 1), ("weight", 16)])
def test_any_magnitude(scale, role, rows):
    x = (matrix((33, 40), spread=0.3) * scale).clamp(-3.4e38, 3.4e38)
    assert_side(quantize(x, RECIPE, role).rowwise, reference.quantize(x.numpy(), rows))


@pytest.mark.parametrize("role, rows", [("input", 1), ("weight", 16)])
def test_nan_and_inf_are_counted(role, rows):
    x = matrix((32, 48))
    x[3, 5], x[20, 40], x[31, 0] = float("nan"), float("inf"), -float("inf")
    done = emulated.quantize(x, RECIPE.rule(role), "both")
    assert int(done.nonfinite) == 3 and float(done.amax) == float("inf")
    assert_side(done.tensor.rowwise, reference.quantize(x.numpy(), rows))
    assert nvfp4.unpack(done.tensor.rowwise.codes)[3, 5] == 0


@pytest.mark.parametrize("shape", [(7, 33), (48, 20)])
@pytest.mark.parametrize("region", [Region(RandomKey(5, 6, 7, 8)), Region(RandomKey(5, 6, 7, 8), 32, 3, 77)])
def test_stochastic_rounding(shape, region):
    x = matrix(shape, torch.bfloat16)
    rule = RECIPE.rule("grad_output")
    done = emulated.quantize(x, rule, "both", region=region).tensor
    rows = np.arange(-(-shape[0] // 16) * 16) + region.row_offset
    index = rows[:, None] * (region.total_cols or shape[1]) + np.arange(shape[1]) + region.col_offset
    draws = reference.draw(index[: shape[0]], (5, 6), (7, 8))
    draws = np.pad(draws, ((0, 0), (0, -shape[1] % 16)))
    assert_side(done.rowwise, reference.quantize(x.float().numpy(), 1, draws=draws))
    draws = reference.draw(index, (5, ~6 & 0xFFFFFFFF), (7, 8)).T
    turned = reference.transform(x.float().t().contiguous().numpy())
    assert_side(done.columnwise, reference.quantize(turned, 1, draws=draws))


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("role", ["input", "weight"])
def test_a_key_changes_no_role_that_is_rounded_to_nearest(role, in_c, monkeypatch):
    if not in_c:
        monkeypatch.setattr(cpu_fp4, "takes", lambda x: False)
    for shape in ((7, 33), (130, 200)):
        x = matrix(shape)
        plain, keyed = quantize(x, RECIPE, role, "both"), quantize(x, RECIPE, role, "both", key=RandomKey(3))
        for one, other in zip(plain.sides, keyed.sides, strict=True):
            assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
    with pytest.raises(AssertionError, match="needs a region"):
        emulated.quantize(x, RECIPE.rule("grad_output"), "both")


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_and_device_change_no_bit(dtype, in_c, monkeypatch):
    if not in_c:
        monkeypatch.setattr(cpu_fp4, "takes", lambda x: False)
    x = matrix((33, 70))

    def parts():
        for role in ("input", "weight", "grad_output"):
            for side in quantize(x, RECIPE, role, "both", key=RandomKey(3)).sides:
                yield from (side.codes.view(torch.uint8), side.scale_inv.view(torch.uint8), side.tensor_amax)
                yield side.dequantize(torch.float32)

    expected = list(parts())
    torch.set_default_dtype(dtype)
    torch.set_default_device("meta")
    try:
        found = list(parts())
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_shard_of_rows_draws_what_the_whole_draws():
    x = matrix((64, 48), torch.bfloat16)
    rule, key = RECIPE.rule("grad_output"), RandomKey(1)

    def reduced(amaxes: torch.Tensor) -> None:
        amaxes.copy_(whole_amaxes)

    whole = emulated.quantize(x, rule, "both", region=Region(key)).tensor
    whole_amaxes = torch.stack([whole.rowwise.tensor_amax, whole.columnwise.tensor_amax])
    parts = [
        emulated.quantize(
            part, rule, "both", region=Region(key, row_offset=32 * i), reduce_amax=reduced
        ).tensor
        for i, part in enumerate(x.split(32))
    ]
    for side, dim in (("rowwise", 0), ("columnwise", 1)):
        codes = torch.cat([nvfp4.unpack(getattr(part, side).codes) for part in parts], dim)
        assert torch.equal(codes, nvfp4.unpack(getattr(whole, side).codes))


def test_the_published_bias_of_stochastic_rounding():
    """Towards zero, by 0.0018 of a step on average: 8 bits cannot tell 256ths apart."""
    values = torch.linspace(0, 6, 6001)[:-1].repeat_interleave(256)
    draws = torch.arange(256, dtype=torch.uint8).repeat(6000)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[nvfp4.encode(values, draws).long()]
    step = torch.where(values < 2, 0.5, torch.where(values < 4, 1.0, 2.0))
    bias = ((numbers - values) / step).view(-1, 256).double().mean(1)
    assert bias.min() > -0.0042 and bias.max() < 1e-5 and -0.0021 < bias.mean() < -0.0015


# ------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("m, n, k", [(5, 7, 33), (64, 48, 128), (1, 1, 1), (130, 33, 70)])
def test_products_are_sums_of_codes_and_block_scales(m, n, k):
    x, w, dy = matrix((m, k), seed=1), matrix((n, k), seed=2), matrix((m, n), seed=3)
    qx, qw, qdy = (
        quantize(t, NEAREST, role, "both") for t, role in ((x, "input"), (w, "weight"), (dy, "grad_output"))
    )
    for a, b in ((qx.rowwise, qw.rowwise), (qdy.rowwise, qw.columnwise), (qdy.columnwise, qx.columnwise)):
        whole = [
            reference.Matrix(
                nvfp4.unpack(s.codes).numpy(),
                s.scale_inv.float().numpy(),
                s.tensor_amax.numpy(),
                s.granularity.rows,
            ).values()
            for s in (a, b)
        ]
        factor = np.float32(a.tensor_amax.numpy() * b.tensor_amax.numpy()) / np.float32(2688**2)
        exact = whole[0] @ whole[1].T * np.float64(factor)
        bound = np.abs(whole[0]) @ np.abs(whole[1]).T * factor * 2.0**-18 + 1e-30
        assert (np.abs(emulated.gemm(a, b).double().numpy() - exact) <= bound).all()
        assert np.allclose(
            emulated.gemm(a, b, out_dtype=torch.float64, exact=True).numpy(), exact, rtol=1e-12, atol=0
        )
    bias = torch.randn(n)
    with_bias = emulated.gemm(qx.rowwise, qw.rowwise, bias=bias)
    assert torch.equal(with_bias, emulated.gemm(qx.rowwise, qw.rowwise) + bias)


def test_the_transform_cancels_in_wgrad():
    """Without rounding: an orthogonal matrix on both operands of a product."""
    x, dy = matrix((100, 32), spread=0.0), matrix((100, 48), seed=1, spread=0.0)
    turned = [nvfp4.hadamard(t.t()).double() for t in (dy, x)]
    plain = dy.t().double() @ x.double()
    assert (turned[0] @ turned[1].t() - plain).norm() < 0.005 * plain.norm()  # of BF16's rounding


def test_an_operand_in_another_format():
    x, w = matrix((40, 50)), matrix((30, 50), seed=1)
    a, b = quantize(x, MXFP8BlockScaling(), "input").rowwise, quantize(w, RECIPE, "weight").rowwise
    exact = a.dequantize().double() @ b.dequantize().double().t()
    assert (emulated.gemm(a, b).double() - exact).abs().max() < 1e-5 * exact.abs().max()
    with pytest.raises(ValueError, match="must be equal"):
        emulated.gemm(a, quantize(w[:, :20].contiguous(), RECIPE, "weight").rowwise)


def test_half_a_byte_a_value():
    side = quantize(matrix((64, 256)), RECIPE, "input").rowwise
    assert side.codes.nbytes == 64 * 256 // 2 and side.scale_inv.nbytes == 64 * 256 // 16
