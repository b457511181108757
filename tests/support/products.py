"""Operands of every kind for FP8 products, and comparison with the exact product."""

from __future__ import annotations

import torch

from benchmarks.support import nvfp4_reference, reference
from megatron_fp8 import quantize
from megatron_fp8.numerics import nvfp4

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def randn(*shape: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    rows = torch.exp2(torch.randint(-4, 5, (shape[0], 1), generator=g).float())
    return (torch.randn(shape, generator=g) * rows).bfloat16()


def operands(which: str, recipe, m: int, n: int, k: int, x=None, w=None, dy=None):
    """The two sides that a linear layer's GEMM reads; x [M,K], w [N,K], dy [M,N]."""
    x = randn(m, k, seed=1) if x is None else x
    w = randn(n, k, seed=2) if w is None else w
    dy = randn(m, n, seed=3) if dy is None else dy
    if which == "fprop":
        return quantize(x, recipe, "input").rowwise, quantize(w, recipe, "weight").rowwise
    if which == "dgrad":
        return quantize(dy, recipe, "grad_output").rowwise, quantize(
            w, recipe, "weight", "columnwise"
        ).columnwise
    grad = quantize(dy, recipe, "grad_output", "columnwise").columnwise
    return grad, quantize(x, recipe, "input", "columnwise").columnwise


def values(side) -> torch.Tensor:
    """float64 values of a side, decoded by the oracle from the captured bytes alone."""
    if side.tensor_amax is not None:
        amax, codes = side.tensor_amax.numpy(), nvfp4.unpack(side.codes).numpy()
        matrix = nvfp4_reference.Matrix(codes, side.scale_inv.float().numpy(), amax, side.granularity.rows)
        return torch.from_numpy(matrix.values() * (float(amax) / 2688))
    mx = side.scale_inv.dtype is torch.float8_e8m0fnu
    spec = reference.E4M3 if side.codes.dtype is torch.float8_e4m3fn else reference.E5M2
    granularity = side.granularity
    rule = reference.Rule(spec, (granularity.rows or None, granularity.cols or None), mx=mx)
    codes = side.codes.contiguous().view(torch.uint8).numpy()
    inverse = side.scale_inv.contiguous().view(torch.uint8 if mx else torch.float32).numpy()
    return torch.from_numpy(
        reference.dequantize(codes, inverse.reshape(1, 1) if inverse.ndim == 0 else inverse, rule)
    )


def assert_close_to_exact(
    actual: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
):
    """|error| <= what a plain float32 GEMM of these values shows (x 4), and one rounding of the result."""
    size = a.abs() @ b.abs().t()
    exact = a @ b.t()
    plain = ((a.float() @ b.float().t()).double() - exact).abs()
    accumulation = 4 * max(2.0**-23, (plain / size.clamp(min=1e-300)).max().item() if size.numel() else 0.0)
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    allowed = accumulation * size + UNIT[actual.dtype] * exact.abs() * 1.01
    allowed += torch.finfo(actual.dtype).smallest_normal * UNIT[actual.dtype]  # a subnormal result
    error = (actual.double() - exact).abs()
    assert actual.shape == exact.shape
    for row, col in (error > allowed).nonzero().tolist()[:1]:
        raise AssertionError(f"at ({row}, {col}): {actual[row, col]}, expected {exact[row, col]}")
