"""Compiled kernels against the torch operations that they stand in for: every byte, on every kind of input."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8 import quantize
from megatron_fp8.backends import emulated
from megatron_fp8.backends.base import CastRequest
from megatron_fp8.kernels.cast_dispatch import (
    block_amaxes,
    cast,
    compute_e8m0,
    decode,
    e8m0_to_scale,
    e8m0_to_scale_inv,
)
from megatron_fp8.kernels.cpu import emulation as cpu
from megatron_fp8.kernels.cpu import matrix_quantize
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Granularity,
    MXFP8BlockScaling,
)
from megatron_fp8.tensor import QuantizedSide

FORMATS = [pytest.param(E4M3, id="e4m3"), pytest.param(E5M2, id="e5m2")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EVERY_16_BITS = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
EVERY_CODE = torch.arange(256, dtype=torch.int32).to(torch.uint8)
SCALES = [None, 0.75, 3.0, 1 / 3, 448.0, 2.0**-9, 2.0**20, 2.0**127, 2.0**-126, 3.4028235e38, 1e-38]
SHAPES = [(1, 1), (1, 1000), (7, 129), (129, 7), (1000, 1), (129, 1000), (300, 257), (64, 256)]
BLOCKS = [(0, 0), (1, 0), (0, 1), (1, 32), (32, 1), (1, 128), (128, 1), (128, 128), (5, 3)]
RECIPES = {
    "tensorwise": Float8CurrentScaling(),
    "rowwise": Float8RowwiseScaling(),
    "blockwise": Float8BlockScaling(),
    "blockwise-fp32": Float8BlockScaling(use_f32_scales=True),
    "mxfp8": MXFP8BlockScaling(),
}


@pytest.fixture
def both(monkeypatch):
    """`both(f)`: (f() with the kernels, f() with torch operations), whatever the size of the tensors."""
    assert cpu.reason() is None, f"these tests compare the kernels, and there are none: {cpu.reason()}"

    cpu.load_kernels()  # where they are loaded, small tensors use them too

    def run(function):
        with monkeypatch.context() as patch:
            compiled = function()
            patch.setattr(cpu, "usable", lambda _: False)
            return [compiled, function()]

    return run


def mixed(shape: tuple[int, int], dtype: torch.dtype, special: bool, seed: int = 0) -> torch.Tensor:
    """Magnitudes over most of float32's range from row to row; with zeros, and with NaN and Inf if asked."""
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(shape, generator=generator)
        * 10.0 ** torch.randint(-6, 4, shape[:1], generator=generator)[:, None]
    )
    x[torch.rand(shape, generator=generator) < 0.05] = -0.0
    if special:
        x[torch.rand(shape, generator=generator) < 0.01] = torch.inf
        x[torch.rand(shape, generator=generator) < 0.01] = -torch.nan
        x[: shape[0] // 2] = x[: shape[0] // 2].nan_to_num(0, 5, -5)
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_16_bit_value(fmt, dtype, both):
    x = EVERY_16_BITS.view(dtype)
    for value in SCALES:
        scale = None if value is None else torch.tensor(value)
        assert_same_bytes(*both(lambda scale=scale: cast(x, scale, fmt)), f"{dtype} x {value}")


@pytest.mark.parametrize("fmt", FORMATS)
def test_float32_around_every_code_and_midpoint(fmt, both):
    codes = EVERY_CODE.view(fmt.dtype).float()
    grid = codes[codes.isfinite() & (codes >= 0)].unique()
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, grid[-1:] * 1.0625, grid[-1:] * 2]).numpy()
    near = [points, np.nextafter(points, np.float32(-np.inf)), np.nextafter(points, np.float32(np.inf))]
    x = torch.from_numpy(np.concatenate([*near, *(-p for p in near)]))
    for value in (None, 0.5, 2.0**-9, 3.0):
        scale = None if value is None else torch.tensor(value)
        scaled = x if scale is None else x / scale
        assert_same_bytes(*both(lambda scaled=scaled, scale=scale: cast(scaled, scale, fmt)), f"x {value}")


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_float32_bits(fmt, both):
    """Random bit patterns: NaNs of all payloads and signs, Inf, subnormals."""
    bits = torch.randint(-(2**31), 2**31, (300_000,), generator=torch.Generator().manual_seed(1))
    special = torch.tensor(
        [0, -(2**31), 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, -1, -0x800000]
    )
    x = torch.cat([special, bits]).to(torch.int32).view(torch.float32)
    for value in SCALES:
        scale = None if value is None else torch.tensor(value)
        assert_same_bytes(*both(lambda scale=scale: cast(x, scale, fmt)), f"x {value}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_code_decoded(fmt, dtype, both):
    compiled, plain = both(lambda: decode(EVERY_CODE.view(fmt.dtype), dtype))
    assert compiled.dtype == dtype and compiled.isnan().sum() == (2 if fmt is E4M3 else 6)
    assert_same_bytes(compiled, plain, f"{fmt.name} to {dtype}")


QUIET_NAN = {
    torch.bfloat16: 0x7FC0,
    torch.float16: 0x7E00,
    torch.float32: 0x7FC00000,
    torch.float64: 0x7FF8000000000000,
}
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("scale", [None, 1.0, 3.0, 2.0**-127])
@pytest.mark.parametrize("dtype", QUIET_NAN, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_codes_give_the_canonical_quiet_nan(fmt, dtype, scale, both):
    """All codes, alone and under scales, by the kernels and by torch: NaN has one pattern of bits in each dtype."""
    codes = EVERY_CODE.view(fmt.dtype).repeat(3, 1)

    def values():
        if scale is None:
            return decode(codes, dtype)
        scale_inv = torch.tensor([[scale]] * 3)
        return QuantizedSide(codes, scale_inv, Granularity(1, 0), pow2=scale != 3.0).dequantize(dtype)

    for found in both(values):
        assert found.dtype is dtype
        nan = found.isnan()
        is_nan = (0x7F if fmt is E4M3 else 0x7D) <= (EVERY_CODE & 0x7F)
        assert torch.equal(nan, is_nan.expand(3, -1))
        assert set(found.view(BITS[dtype.itemsize])[nan].tolist()) == {QUIET_NAN[dtype]}


@pytest.mark.parametrize("special", [False, True], ids=["finite", "nonfinite"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block_amaxes(shape, dtype, special, both):
    x = mixed(shape, dtype, special)
    for cuts in (*([b] for b in BLOCKS), [(1, 32), (32, 1)], [(1, 0), (0, 1)], [(1, 128), (128, 1)]):
        (compiled, count), (plain, expected) = both(lambda cuts=cuts: block_amaxes(x, cuts))
        for block, mine, theirs in zip(cuts, compiled, plain, strict=True):
            assert_same_bytes(mine, theirs, f"amax of {block}")
        assert (count is None) == (expected is None), cuts
        assert count is None or (count.dtype == expected.dtype and int(count) == int(expected)), cuts


@pytest.mark.parametrize("special", [False, True], ids=["finite", "nonfinite"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_quantize_and_dequantize(name, dtype, special, both):
    """Both directions, partial blocks, both formats; and the values that GEMMs read."""
    for shape in SHAPES:
        x = mixed(shape, dtype, special)
        for role in ("input", "weight", "grad_output"):
            compiled, plain = both(lambda x=x, role=role: quantize(x, RECIPES[name], role, "both"))
            for side in ("rowwise", "columnwise"):
                what, mine, theirs = (
                    f"{name} {role} {side} {shape}",
                    getattr(compiled, side),
                    getattr(plain, side),
                )
                assert_same_bytes(mine.codes, theirs.codes, what)
                assert_same_bytes(mine.scale_inv, theirs.scale_inv, what)
                assert mine.codes.stride() == theirs.codes.stride() or 1 in shape
                for to in DTYPES:
                    values, expected = both(lambda to=to, theirs=theirs: theirs.dequantize(to))
                    assert_same_bytes(values, expected, f"{what} values in {to}")


@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_of_any_size(fmt):
    """The kernels know no list of recipes: any block, against a scale for every element."""
    for rows, cols in [(7, 129), (64, 200)]:
        x = mixed((rows, cols), torch.float32, special=True)
        for height, width in [(0, 5), (3, 0), (5, 3), (2, 1), (7, 33), (100, 1000)]:
            tall, wide = height or rows, width or cols
            grid = (-(-rows // tall), -(-cols // wide))
            scale = torch.rand(grid, generator=torch.Generator().manual_seed(2)) + 0.5
            each = scale.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :cols]
            codes = cpu.cast(x, scale, (height, width), fmt.dtype)
            assert_same_bytes(codes, cast(x, each, fmt), f"blocks of {height} x {width}")
            values = cpu.decode(codes, scale, (height, width), torch.float32)
            assert_same_bytes(values, decode(codes) * each, f"{height} x {width}")


@pytest.mark.parametrize("fmt", FORMATS)
def test_e8m0_scales(fmt, both):
    """Every exponent with the mantissas around 1.75, zero, subnormals, Inf; then every E8M0 code, both ways."""
    mantissas = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF], dtype=torch.int32)
    bits = (torch.arange(255, dtype=torch.int32)[:, None] << 23) + mantissas
    amax = torch.cat([bits.flatten(), torch.tensor([0x7F800000], dtype=torch.int32)]).view(torch.float32)
    assert_same_bytes(*both(lambda: compute_e8m0(amax, fmt)), fmt.name)
    for convert in (e8m0_to_scale, e8m0_to_scale_inv):
        assert_same_bytes(*both(lambda convert=convert: convert(EVERY_CODE)), convert.__name__)


def test_the_nan_scale_of_mx(both):
    """E8M0's 0xFF is NaN, as torch has it, and so is every number of its block: one pattern of bits, whoever decodes."""
    powers = both(lambda: e8m0_to_scale_inv(EVERY_CODE))
    assert_same_bytes(*powers, "powers")
    torchs = EVERY_CODE.view(torch.float8_e8m0fnu).float()  # whose NaN has other bits
    assert torch.equal(powers[0][:255], torchs[:255]) and torchs[255].isnan()
    assert powers[0].view(torch.int32)[255] == 0x7FC00000
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).view(4, 64)
    scale = torch.full((4, 2), 127, dtype=torch.uint8)
    scale[1, 1] = 0xFF
    side = QuantizedSide(codes, scale.view(torch.float8_e8m0fnu), Granularity(1, 32), pow2=True)
    for dtype, bits in ((torch.float32, 0x7FC00000), (torch.bfloat16, 0x7FC0)):
        with_c, with_torch = both(lambda dtype=dtype: side.dequantize(dtype))
        assert_same_bytes(with_c, with_torch, str(dtype))
        integers = with_torch.view(torch.int32 if dtype == torch.float32 else torch.int16)
        assert (integers[1, 32:] == bits).all() and not with_torch[1, :32].isnan().any()
    finite = replace(side, codes=torch.ones(4, 64).to(torch.float8_e4m3fn))
    y = emulated.gemm(finite, finite, out_dtype=torch.bfloat16)
    assert y.isnan()[1].all() and y.isnan()[:, 1].all() and y.isnan().sum() == 7


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_an_empty_matrix_is_cast_and_multiplied(shape, name, both):
    """C divides by the number of columns: it must not see an empty matrix, alone or among others."""
    x, w = torch.empty(shape, dtype=torch.bfloat16), mixed((7, shape[1]), torch.bfloat16, False)
    rule = RECIPES[name].rule("input")
    for direction in ("rowwise", "columnwise", "both"):
        a, others = emulated.quantize(x, rule, direction), [CastRequest(w, rule, direction, None, None)]
        each = emulated.quantize_each([CastRequest(x, rule, direction, None, None), *others])
        assert a.tensor.shape == each[0].tensor.shape == shape
    a, b = quantize(x, RECIPES[name], "input"), quantize(w, RECIPES[name], "weight")
    assert_same_bytes(*both(lambda: emulated.gemm(a.rowwise, b.rowwise)), name)


def test_only_plain_contiguous_cpu_tensors_and_small_ones_load_nothing(monkeypatch):
    monkeypatch.setattr(cpu, "_load", functools.cache(cpu._load.__wrapped__))
    large = torch.zeros(256, 256)
    assert not cpu.usable(large[:3])
    assert cpu.usable(large) and cpu.usable(torch.nn.Parameter(large))
    assert cpu.usable(large[:3]), "it is loaded"
    assert not cpu.usable(large[:0])
    assert not cpu.usable(large.t()[:, :128])
    assert not cpu.usable(large.to("meta"))


def test_what_torch_transforms_is_not_read_by_c():
    """torch.func's wrappers have no memory, and make_fx would miss what C writes."""
    cpu.load_kernels()
    f = lambda x: quantize(x, Float8CurrentScaling(), "input").dequantize()  # noqa: E731
    x = torch.ones(4, 32)
    assert torch.func.functionalize(f)(x).sum() == 128
    assert torch.func.grad(lambda x: (x * x).sum() + f(x).sum())(x).sum() == 256
    with pytest.raises(RuntimeError, match="tracing tensor"):  # it reads a count of NaN
        make_fx(f)(x)


def test_what_does_not_fit_is_named_before_c_sees_it():
    x, scale = torch.zeros(4, 64), torch.ones(4, 2)
    wrong = [
        (lambda: cpu.cast(x.t(), None, (0, 0), torch.float8_e4m3fn), "contiguous"),
        (lambda: cpu.cast(x, scale.double(), (1, 32), torch.float8_e4m3fn), "float64"),
        (lambda: cpu.cast(x, scale[:3], (1, 32), torch.float8_e4m3fn), "8 contiguous elements"),
        (lambda: cpu.cast(x, scale.to("meta"), (1, 32), torch.float8_e4m3fn), "meta"),
        (lambda: matrix_quantize.block_amaxes(x[:, :7], [(0, 0)]), "contiguous"),
        (lambda: matrix_quantize.e8m0_of_amax(scale.bfloat16(), 8), "bfloat16"),
        (lambda: matrix_quantize.power_of_e8m0(scale, True), "torch.uint8"),
    ]
    for call, said in wrong:
        with pytest.raises(AssertionError, match=said):
            call()


def test_no_more_threads_than_a_system_gives(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 100_000)
    assert cpu.thread_count(1 << 40) == cpu.MAX_THREADS and cpu.thread_count(1) == 1
