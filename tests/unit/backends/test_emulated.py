"""The emulated GEMM against the float64 product of the captured codes and scales."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8 import Format, quantize
from megatron_fp8.backends import emulated
from megatron_fp8.backends.emulated import gemm
from megatron_fp8.kernels import gemms
from megatron_fp8.kernels.cpu import emulation
from megatron_fp8.kernels.gemms import keeps_float32, matmul_high_precision
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.rule import TENSOR, Rule
from megatron_fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
)
from tests.support.products import UNIT, assert_close_to_exact, operands, randn, values

HYBRID = Format.HYBRID
POWERS_OF_TWO = {
    "tensorwise-pow2": Float8CurrentScaling(use_power_2_scales=True),
    "rowwise": Float8RowwiseScaling(fp8_format=HYBRID),
    "blockwise": Float8BlockScaling(fp8_format=HYBRID),
    "mxfp8": MXFP8BlockScaling(fp8_format=HYBRID),
}
FP32_SCALES = {
    "delayed": DelayedScaling(),
    "tensorwise": Float8CurrentScaling(),
    "blockwise-fp32": Float8BlockScaling(fp8_format=HYBRID, use_f32_scales=True),
}
RECIPES = POWERS_OF_TWO | FP32_SCALES
SHAPES = [(1, 1, 1), (7, 1, 129), (1, 33, 1000), (129, 65, 7), (63, 130, 257), (64, 96, 512)]
GEMMS = ("fprop", "dgrad", "wgrad")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("which", GEMMS)
@pytest.mark.parametrize("name", RECIPES)
def test_all_gemms_and_odd_shapes(name, which, shape):
    m, n, k = shape
    a, b = operands(which, RECIPES[name], m, n, k)
    assert a.codes.shape[1] == b.codes.shape[1] == {"fprop": k, "dgrad": n, "wgrad": m}[which]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        result = gemm(a, b, out_dtype=dtype)
        assert result.dtype is dtype and result.is_contiguous()
        assert_close_to_exact(result, values(a), values(b))


@pytest.mark.parametrize("which", GEMMS)
@pytest.mark.parametrize("name", RECIPES)
def test_bfloat16_result_is_rounded_once(name, which):
    """A BF16 product scaled afterwards equals the exact result on 3 outputs in 4; here it is 99.9 %."""
    a, b = operands(which, RECIPES[name], 160, 192, 256)
    expected = (values(a) @ values(b).t()).bfloat16()
    assert (gemm(a, b, out_dtype=torch.bfloat16) == expected).float().mean() >= 0.999


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("which", GEMMS)
@pytest.mark.parametrize("name", RECIPES)
def test_exact_mode_is_the_float64_product(name, which, shape):
    a, b = operands(which, RECIPES[name], *shape)
    exact = values(a) @ values(b).t()
    result = gemm(a, b, out_dtype=torch.float64, exact=True)
    if name == "tensorwise-pow2":  # one scale: every partial sum fits float64, in any order
        assert_same_bytes(result + 0.0, exact + 0.0)
    assert bool(((result - exact).abs() <= 1e-14 * (values(a).abs() @ values(b).abs().t())).all())
    assert_same_bytes(gemm(a, b, exact=True), result.float())


@pytest.mark.parametrize("name", RECIPES)
def test_bias_is_added_before_the_rounding(name):
    a, b = operands("fprop", RECIPES[name], 40, 50, 60)
    bias = (torch.randn(50, generator=torch.Generator().manual_seed(4)) * 30).bfloat16()
    assert_close_to_exact(gemm(a, b, bias=bias), values(a), values(b), bias)
    in_bf16 = gemm(a, b, out_dtype=torch.bfloat16, bias=bias)
    expected = (values(a) @ values(b).t() + bias.double()).bfloat16()
    assert (in_bf16 == expected).float().mean() >= 0.999
    exact = gemm(a, b, out_dtype=torch.float64, bias=bias, exact=True)
    torch.testing.assert_close(exact, values(a) @ values(b).t() + bias.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("m, n, k", [(0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0)])
@pytest.mark.parametrize("which", GEMMS)
@pytest.mark.parametrize("name", RECIPES)
def test_empty_operands(name, which, m, n, k):
    """No tokens (an idle expert), or nothing to contract: empty, or zeros plus the bias."""
    a, b = operands(which, RECIPES[name], m, n, k)
    for dtype in (torch.float32, torch.bfloat16):
        for exact in (False, True):
            result = gemm(a, b, out_dtype=dtype, exact=exact)
            assert result.shape == (a.codes.shape[0], b.codes.shape[0]) and result.dtype is dtype
            assert bool((result == 0).all())
            bias = torch.ones(b.codes.shape[0])
            assert bool((gemm(a, b, out_dtype=dtype, exact=exact, bias=bias) == 1).all())


@pytest.mark.parametrize(
    "size_a, size_b",
    [
        (2.0**-130, 2.0**100),  # scale_inv is subnormal
        (2.0**-126, 2.0**126),
        (2.0**-70, 2.0**-50),  # the product is a subnormal float32
        (2.0**-140, 1.0),
        (2.0**90, 2.0**20),
        (2.0**120, 2.0**-120),
        (0.0, 2.0**-130),
    ],
)
@pytest.mark.parametrize("name", RECIPES)
def test_scales_at_the_ends_of_float32(name, size_a, size_b):
    """BF16 GEMMs flush subnormals: tiny and huge scales must take another way, and lose nothing."""
    g = torch.Generator().manual_seed(5)
    x = (torch.randn(33, 140, generator=g).double() * size_a).float()
    w = (torch.randn(20, 140, generator=g).double() * size_b).float()
    a, b = operands("fprop", RECIPES[name], 33, 20, 140, x=x, w=w)
    exact, size = values(a) @ values(b).t(), values(a).abs() @ values(b).abs().t()
    for dtype in (torch.float32, torch.bfloat16):
        result = gemm(a, b, out_dtype=dtype)
        assert bool(result.isfinite().all())
        allowed = (2.0**-20 * size) + UNIT[dtype] * exact.abs() * 1.01 + 2.0**-134
        assert bool(((result.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("name", RECIPES)
def test_blocks_of_every_size_in_one_operand(name):
    """One block of zeros, one tiny and one huge beside ordinary ones: each contributes at its own size."""
    x = randn(256, 384, seed=6).float()
    x[:, :128] *= 2.0**-90
    x[:, 128:160] = 0.0
    x[128:] *= 2.0**30
    w = randn(70, 384, seed=7).float()
    w[:, :128] *= 2.0**90
    a, b = operands("fprop", RECIPES[name], 256, 70, 384, x=x, w=w)
    assert_close_to_exact(gemm(a, b), values(a), values(b))


@pytest.mark.parametrize(
    "m, n, k", [(33, 127, 33), (300, 129, 33), (31, 127, 129), (32, 31, 1), (33, 127, 34), (31, 127, 132)]
)
@pytest.mark.parametrize("name", RECIPES)
def test_a_nan_stays_in_its_row_whatever_the_contraction(name, m, n, k):
    """oneDNN's BF16 product by AMX multiplies what lies behind a row by zero, and NaN times zero is NaN."""
    x = randn(m, k, seed=8)
    x[13, 0] = math.nan
    a, b = operands("fprop", RECIPES[name], m, n, k, x=x)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for exact in (False, True):
            nan = gemm(a, b, out_dtype=dtype, exact=exact).isnan()
            assert nan.all(1).nonzero().flatten().tolist() == [13] and nan.sum() == n


def test_a_bias_of_another_shape_and_a_result_that_cannot_be_are_refused():
    for name in RECIPES:
        for m, n in ((40, 40), (4, 4), (40, 50)):
            a, b = operands("fprop", RECIPES[name], m, n, 60)
            for shape in ((1,), (n - 1,), (n, 1), (1, n), ()):
                with pytest.raises(ValueError, match=rf"one for each row of b|\({n},\) is needed"):
                    gemm(a, b, bias=torch.ones(shape))
            for dtype in (torch.int32, torch.float8_e4m3fn, torch.complex64):
                with pytest.raises(ValueError, match="out_dtype"):
                    gemm(a, b, out_dtype=dtype)


def test_e5m2_times_e5m2_is_refused():
    grad = quantize(randn(8, 16, seed=9), Float8CurrentScaling(), "grad_output").rowwise
    with pytest.raises(ValueError, match="E5M2"):
        gemm(grad, grad)


def test_contractions_must_agree():
    a, _ = operands("fprop", MXFP8BlockScaling(), 4, 5, 6)
    with pytest.raises(ValueError, match=r"\(4, 6\).*\(3, 7\)"):
        gemm(a, quantize(torch.ones(3, 7), MXFP8BlockScaling(), "weight").rowwise)


@pytest.mark.parametrize("name", RECIPES)
def test_the_precision_of_float32_products_is_the_users_own(name, monkeypatch):
    """Torch may round float32 operands to TF32 or bfloat16: those of FP8 products do not need more bits, or keep them."""

    def product(a, b):
        """What torch may do then, on processors with matrix units for BF16."""
        return a.bfloat16().float() @ b.bfloat16().float().t()

    # As without compiled kernels, or for small matrices.
    monkeypatch.setattr(gemms, "multiplies", lambda a, b: False)
    monkeypatch.setattr(emulated, "matmul_fp32", product)
    a, b = operands("fprop", RECIPES[name], 64, 96, 512)
    before = torch.backends.mkldnn.matmul.fp32_precision
    for setting in ("tf32", "bf16"):
        try:
            torch.backends.mkldnn.matmul.fp32_precision = setting
            actual = gemm(a, b)
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = before
        assert_close_to_exact(actual, values(a), values(b))
    seen = []
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    for setting in ("tf32", "ieee", "none"):
        torch.backends.cuda.matmul.fp32_precision = setting
        seen.append(keeps_float32(torch.device("cuda")))
    assert seen == [False, True, True]


class _Operations(TorchDispatchMode):
    """Which operations ran, with the dtypes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.found.append((str(function), out.dtype))
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_in_high_precision_on_a_gpu_run_on_tensor_cores(dtype):
    """16-bit operands and a float32 result: in float32 they would be multiplied outside the tensor cores."""
    with FakeTensorMode(), _Operations() as operations:
        a, b = (torch.empty(n, 64, dtype=dtype, device="cuda") for n in (48, 32))
        result = matmul_high_precision(a, b, torch.float32)
        matmul_high_precision(a, b, dtype, bias=torch.empty(32, dtype=torch.float32, device="cuda"))
    assert result.dtype == torch.float32 and result.shape == (48, 32)
    assert [found for found in operations.found if "mm" in found[0]] == [("aten.mm.dtype", torch.float32)] * 2
    assert ("aten._to_copy.default", torch.float32) not in operations.found, "operands stay as they are"


# ------------------------------------------------------------------------------------------------ the short way, in C

DELAYED = Rule(E4M3, TENSOR, delayed=True)
LARGE = (130, 150)
"""Large enough for C."""


@contextmanager
def in_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compiled kernels inside."""
    with monkeypatch.context() as patch:
        patch.setattr(emulation, "usable", lambda *_: False)
        yield


@contextmanager
def flushing() -> Iterator[None]:
    """This thread takes subnormal numbers for zeros."""
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**127, 1e-38])
def test_a_scale_that_is_known_takes_one_pass(scale, dtype, fmt, monkeypatch):
    """The bytes of two passes: codes, scale_inv (subnormal of 2^127), amax and count, with NaN and Inf and without, of
    any strides, in any floating-point mode."""
    rule, known = replace(DELAYED, fmt=fmt), torch.tensor(scale)
    x = torch.randn(LARGE, generator=torch.Generator().manual_seed(1)) * torch.logspace(-42, 4, LARGE[1])
    ill = x.clone()
    ill[3, 5], ill[77, 0], ill[129, 149] = torch.nan, torch.inf, -torch.inf
    for matrix in (x, ill, x.t(), ill * 0, x[:, :1].expand(LARGE)):
        matrix = matrix.to(dtype)
        with in_torch(monkeypatch):
            expected = emulated.quantize(matrix, rule, "both", scale=known)
        with flushing():
            found = emulated.quantize(matrix, rule, "both", scale=known)
        assert_same_bytes(found.amax, expected.amax, "amax")
        assert found.nonfinite == expected.nonfinite
        for side, other in zip(found.tensor.sides, expected.tensor.sides, strict=True):
            assert_same_bytes(side.codes, other.codes, "codes")
            assert_same_bytes(side.scale_inv, other.scale_inv, "scale_inv")
            assert (side.finite, side.granularity) == (other.finite, other.granularity)


@pytest.mark.parametrize("short", [True, False], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_in_c_has_the_bits_of_torch(biased, out, short, monkeypatch):
    """Both orientations of codes, with this processor's GEMM or without one; NaN stays in its row."""
    if not short:
        monkeypatch.setattr(emulation, "inner_loop", lambda: None)
    a, b = (torch.randn(LARGE, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3))
    a[5, 6] = torch.nan
    bias = torch.randn(LARGE[0]).bfloat16() if biased else None
    for scales in ((3.0, 0.7), (2.0**100 - 1, 2.0**-70), (2.0**60 + 1e13, 1.5 * 2.0**38)):
        left, right = (
            emulated.quantize(x * 100, DELAYED, "both", scale=torch.tensor(scale)).tensor
            for x, scale in zip((a, b), scales, strict=True)
        )
        for sides in ((left.rowwise, right.rowwise), (left.columnwise, right.columnwise)):
            bias = bias if sides[1].codes.shape[0] == LARGE[0] else None
            with in_torch(monkeypatch):
                expected = emulated.gemm(*sides, out_dtype=out, bias=bias)
            with flushing():
                found = emulated.gemm(*sides, out_dtype=out, bias=bias)
            assert found.dtype == out and torch.equal(found.isnan(), expected.isnan())
            assert bool(found.isnan().any()) and not bool(found.isnan().all())
            assert_same_bytes(found.nan_to_num(), expected.nan_to_num(), f"{scales}")


def test_a_product_is_added_to_its_own_shape_alone():
    """C would read and write beyond the tensors."""
    recipe = Float8CurrentScaling()
    a, b, longer = (
        quantize(torch.randn(n, k), recipe, "weight").rowwise for n, k in ((64, 256), (48, 256), (48, 288))
    )
    into = torch.zeros(64, 48)
    for other, where in ((longer, into), (b, into.t()), (b, torch.zeros(64 * 48)), (b, into[:32])):
        with pytest.raises(ValueError, match=r"must be equal|cannot be added"):
            emulated.accumulate(a, other, where)
    assert not bool(into.any())


def test_a_capture_on_a_gpu_is_refused_in_words(monkeypatch):
    """The host reads scales, which torch would call an operation that is not permitted."""
    side = SimpleNamespace(codes=SimpleNamespace(is_cuda=True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError, match="emulated backend cannot be captured as a CUDA graph: the host reads"
    ):
        emulated._foldable(side, side)
