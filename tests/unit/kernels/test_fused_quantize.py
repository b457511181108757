"""RMSNorm and SwiGLU made and quantized in one pass.

What each promises: the value against torch's, the codes of that value in all bytes.
"""

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.backends import emulated
from megatron_fp8.kernels.fused_quantize import Swiglu, SwigluGradient, row_rstd, swiglu_weight_grad
from megatron_fp8.kernels.quantize import (
    Record,
    measure,
    quantize_blocks,
    quantize_rows,
    quantize_tensor,
    write_matrix,
)
from megatron_fp8.mcore.layers import norm
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.recipe import BLOCK_1X32, BLOCK_1X128, ROW, TENSOR, Rule
from tests.support.matrices import (
    BYTES,
    DEVICE,
    DTYPES,
    assert_quantized,
    assert_recorded,
    normalized,
    strided,
)

CASES = [((7, 33), dtype) for dtype in DTYPES] + [((130, 140), torch.bfloat16), ((1, 1), torch.bfloat16)]


def activations(shape, dtype, seed=0):
    """Numbers as they come, a row of zeros, and outliers."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[-1] = 0
    x[0, ::5] *= 6
    return x.to(DEVICE, dtype)


def assert_codes(source, fmt, what):
    """Every pass over the source gives the codes that the emulated backend makes of the source's values.

    Returns:
        The values.
    """
    scale = torch.tensor(2.5, device=DEVICE)
    record = Record.new(DEVICE)
    sides = quantize_tensor(source, fmt, scale=scale, record=record)
    values = write_matrix(source)
    expected = emulated.quantize(values, Rule(fmt, TENSOR), "both", scale=scale)
    assert_quantized(sides, expected, f"{what} tensor")
    assert_recorded(record, expected, what)
    for granularity, kind in ((BLOCK_1X128, "pow2"), (BLOCK_1X32, "e8m0")):
        record = Record.new(DEVICE)
        sides = quantize_blocks(source, fmt, block=granularity.cols, kind=kind, record=record)
        expected = emulated.quantize(values, Rule(fmt, granularity, kind), "both")
        assert_quantized(sides, expected, f"{what} {granularity}")
        assert_recorded(record, expected, what)
    row_amax, col_amax = measure(source, rows=True, cols=True)
    sides = quantize_rows(source, fmt, row_amax, col_amax)
    assert_quantized(sides, emulated.quantize(values, Rule(fmt, ROW, "pow2"), "both"), f"{what} rows")
    return values


def ulps(a, b):
    """Largest distance in units in the last place; numbers of unlike sign are compared as to zero."""
    as_int = BYTES[a.dtype]
    top = torch.iinfo(as_int).max
    lines = [
        torch.where(t.view(as_int) < 0, -(t.view(as_int) & top).long(), t.view(as_int).long()) for t in (a, b)
    ]
    return int((lines[0] - lines[1]).abs().max())


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_norm(shape, dtype):
    x = activations(shape, dtype)
    weight = 1 + activations((2, shape[1]), torch.bfloat16, seed=1)[0]
    assert shape[1] == 1 or weight.unique().numel() > 10
    for zero_centered in (False, True):
        source = normalized(x, weight, zero_centered)
        values = assert_codes(source, E4M3, f"norm {shape} {dtype}")
        rstd = row_rstd(x, 1e-5)
        exact = 1 / (x.double().square().mean(-1) + 1e-5).sqrt()
        assert ((rstd - exact).abs() / exact).max() < 4e-7
        # Given the statistic, mcore's formula in all bits; as it comes, within rounding.
        formula = (x * rstd[:, None]).mul_(weight.float() + float(zero_centered)).to(dtype)
        assert_same_bytes(values, formula, f"norm {shape} {dtype}")
        theirs = norm.rms_norm(x, weight, 1e-5, zero_centered)
        assert ulps(values, theirs) <= (8 if dtype == torch.float32 else 1)


def test_weights_that_are_not_finite_stay_in_their_row():
    x = activations((20, 60), torch.bfloat16)
    weights = torch.ones(20, device=DEVICE)
    weights[3], weights[4] = float("nan"), float("inf")
    values = assert_codes(Swiglu(x, weights), E4M3, "weights")
    assert values.isfinite().all(1).tolist() == [i not in (3, 4) for i in range(20)]
    assert_codes(SwigluGradient(x[:, :30], x, weights), E5M2, "weights, gradient")


def test_norm_of_special_rows():
    """NaN spoils its row, an Inf is NaN and the rest of its row 0; strided rows are read in place."""
    x = activations((40, 70), torch.bfloat16)
    x[3, 5], x[4, 6] = float("nan"), float("inf")
    weight = torch.ones(70, device=DEVICE)
    values = assert_codes(normalized(strided(x), weight), E4M3, "special")
    theirs = norm.rms_norm(x, weight)
    assert torch.equal(values.isnan(), theirs.isnan()) and int(values.isnan().sum()) == 71
    assert not values[4, :6].any()
    assert_same_bytes(row_rstd(strided(x), 1e-5), row_rstd(x, 1e-5), "strided")


def torch_swiglu(x, weights):
    """mcore/activation.py's formulas (without its stored input): value, and gradients of x and weights for dy."""
    gate, up = x.float().chunk(2, -1)
    y = torch.nn.functional.silu(gate) * up
    return (y if weights is None else y * weights.float()[:, None]).to(x.dtype)


def torch_swiglu_grad(dy, x, weights):
    gate, up = x.float().chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    dy = dy.float()
    of_weights = (dy * (gate * sigmoid) * up).sum(-1)
    if weights is not None:
        dy = dy * weights.float()[:, None]
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([dgate, dy * (gate * sigmoid)], -1), of_weights


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_swiglu(shape, dtype, weighted):
    rows, cols = shape
    x = activations((rows, 2 * cols), dtype)
    weights = activations((rows + 1, 1), torch.float32, seed=2)[:-1, 0] if weighted else None
    values = assert_codes(Swiglu(x, weights), E4M3, f"swiglu {shape} {dtype}")
    assert ulps(values, torch_swiglu(x, weights)) <= (64 if dtype == torch.float32 else 1)
    dy = activations(shape, dtype, seed=3)
    grad = assert_codes(SwigluGradient(dy, x, weights), E5M2, f"swiglu gradient {shape} {dtype}")
    dx, of_weights = torch_swiglu_grad(dy, x, weights)
    # 1 + gate * (1 - sigmoid) cancels near gate = -1.28: float32's error is relative to what is added, not to the sum.
    terms, _ = torch_swiglu_grad(dy.abs(), x.abs(), weights.abs() if weighted else None)
    bound = torch.finfo(dtype).eps * dx.abs() + 2.0**-18 * terms + torch.finfo(dtype).tiny
    assert ((grad.float() - dx).abs() <= bound).all()
    torch.testing.assert_close(swiglu_weight_grad(dy, x), of_weights, rtol=1e-4, atol=1e-4)


def test_swiglu_extremes():
    """Gates at which exp overflows or vanishes: silu is 0 or the gate, the gradient stays finite."""
    gates = torch.tensor([[-3e38, -1e4, -200.0, -88.0, -0.0, 0.0, 88.0, 1e4, 3e38]], device=DEVICE)
    x = torch.cat([gates, torch.ones_like(gates)], 1)
    values = write_matrix(Swiglu(x))
    torch.testing.assert_close(values, torch.nn.functional.silu(gates), rtol=1e-4, atol=1e-37)
    grad = write_matrix(SwigluGradient(torch.ones_like(gates), x))
    assert grad.isfinite().all()


def test_errors():
    with pytest.raises(ValueError, match="an even last dimension"):
        Swiglu(torch.zeros(2, 3, device=DEVICE))


def test_zeros_behind_the_last_row():
    """Whatever the statistics and weights of the last rows are, rows that are not there have codes of zero."""
    x = activations((20, 140), torch.bfloat16)
    x[-1] = float("inf")
    weights = torch.ones(20, device=DEVICE)
    weights[-2], weights[-1] = float("nan"), float("inf")
    scale = torch.tensor(2.5, device=DEVICE)
    for source in (
        normalized(x, -torch.ones(140, device=DEVICE)),
        Swiglu(x, weights),
        SwigluGradient(x[:, :70], x, weights),
    ):
        row_amax, col_amax = measure(source, rows=True, cols=True)
        casts = {
            16: lambda s=source, **o: quantize_tensor(s, E4M3, scale=scale, **o),
            32: lambda s=source, **o: quantize_blocks(s, E4M3, block=32, kind="e8m0", **o),
            64: lambda s=source, a=row_amax, b=col_amax, **o: quantize_rows(s, E4M3, a, b, **o),
            128: lambda s=source, **o: quantize_blocks(s, E4M3, block=128, **o),
        }
        for pad_to, cast in casts.items():
            found, plain = cast(pad_to=pad_to).columnwise, cast().columnwise
            assert found.codes.shape[1] == -(-20 // pad_to) * pad_to
            assert_same_bytes(found.codes[:, :20], plain.codes, f"{source.kind} {pad_to}")
            assert_same_bytes(found.scale_inv, plain.scale_inv, f"{source.kind} {pad_to}")
            assert not found.codes[:, 20:].view(torch.uint8).any(), f"{source.kind} {pad_to}"
