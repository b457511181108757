"""fp8_matmul: three GEMMs that equal the fp64 product of the codes, and gradients that come from what was saved."""

from __future__ import annotations

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8 import fp8_matmul, quantize
from megatron_fp8.recipe import RECIPES as CLASSES
from tests.support.products import assert_close_to_exact
from tests.support.sites import ALL_RECIPES, randn

NAMES = ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"]
SHAPES = [(32, 64, 48), (1, 16, 1), (7, 63, 129), (129, 1000, 7), (7, 63, 129)]


def operands(m: int, k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """a [m, k], b [k, n], dy [m, n]; leaves."""
    a, b, dy = (randn(*size, seed=i, dtype=dtype) for i, size in enumerate([(m, k), (n, k), (m, n)]))
    return a.requires_grad_(), b.t().contiguous().requires_grad_(), dy


def seen(x: torch.Tensor, recipe, role: str, direction: str) -> torch.Tensor:
    """float64: the values that a GEMM sees of an operand, contraction last."""
    side = getattr(quantize(x.detach(), recipe, role, direction), direction)
    return side.dequantize(torch.float32).double()


@pytest.mark.parametrize(("name", "shape"), zip(NAMES, SHAPES, strict=True))
def test_all_three_gemms_are_products_of_codes(name, shape):
    recipe = CLASSES[name]()
    for dtype in (torch.float32, torch.bfloat16):
        a, b, dy = operands(*shape, dtype)
        y = fp8_matmul(a, b, name)
        y.backward(dy)
        w = b.t()
        assert_close_to_exact(
            y.detach(), seen(a, recipe, "input", "rowwise"), seen(w, recipe, "weight", "rowwise")
        )
        dy_row, dy_column = (seen(dy, recipe, "grad_output", d) for d in ("rowwise", "columnwise"))
        assert_close_to_exact(a.grad, dy_row, seen(w, recipe, "weight", "columnwise"))
        assert_close_to_exact(b.grad.t(), dy_column, seen(a, recipe, "input", "columnwise"))
        assert y.dtype == a.grad.dtype == b.grad.dtype == dtype


def test_gradients_are_e5m2_in_hybrid_and_inputs_e4m3():
    a, b, dy = operands(32, 64, 48, torch.float32)
    dy = dy * 0 + 1.0
    dy[0, 0] = 1.0 + 2.0**-3  # a value of E4M3 at this scale, halfway between two of E5M2
    fp8_matmul(a, b, "tensorwise").backward(dy * 384)
    hybrid = quantize(dy * 384, CLASSES["tensorwise"](), "grad_output").rowwise
    assert hybrid.codes.dtype == torch.float8_e5m2
    exact = (hybrid.dequantize().double()) @ seen(b.t(), CLASSES["tensorwise"](), "weight", "columnwise").t()
    torch.testing.assert_close(a.grad.double(), exact, rtol=1e-5, atol=1e-4)


def test_custom_recipe_with_a_plain_operand():
    a, b, dy = operands(32, 64, 48, torch.float32)
    y = fp8_matmul(a, b, ALL_RECIPES["no-weight"])
    y.backward(dy)
    assert (y - a @ b).norm() < 0.1 * y.norm() and torch.isfinite(b.grad).all()


def test_leading_dimensions_vectors_and_nothing():
    a, b, _ = operands(12, 64, 48, torch.float32)
    flat = fp8_matmul(a, b)
    assert torch.equal(fp8_matmul(a.view(3, 4, 64), b), flat.view(3, 4, 48))
    assert fp8_matmul(a[0], b).shape == (48,)
    assert fp8_matmul(a[:0], b).shape == (0, 48)
    with torch.no_grad():
        assert torch.equal(fp8_matmul(a, b), flat)


def test_torch_autocast_changes_nothing():
    a, b, _ = operands(12, 64, 48, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = fp8_matmul(a, b)
    assert torch.equal(inside, fp8_matmul(a, b))


def test_nan_spreads_and_inf_saturates():
    a, b, _ = operands(4, 64, 48, torch.float32)
    with torch.no_grad():
        a[1, 3], a[2, 5] = float("nan"), float("inf")
    y = fp8_matmul(a, b, "rowwise")
    assert y[1].isnan().all() and torch.isfinite(y[[0, 2, 3]]).all()


@pytest.mark.parametrize(
    ("a", "b", "recipe", "message"),
    [
        (torch.zeros(4, 8), torch.zeros(9, 4), None, r"a's last dimension and b's first must be equal"),
        (torch.zeros(2, 4, 8), torch.zeros(2, 8, 4), None, r"one matrix b \[K, N\]"),
        (torch.zeros(4, 8), torch.zeros(8, 4).half(), None, "give both the same dtype"),
        (torch.zeros(4, 8), torch.zeros(8, 4), "fp4", "'fp4' is unknown"),
        (torch.zeros(4, 8).double(), torch.zeros(8, 4).double(), None, "float64"),
    ],
)
def test_bad_input(a, b, recipe, message):
    with pytest.raises(ValueError, match=message):
        fp8_matmul(a, b, recipe)


def test_a_backend_that_cannot_run_is_an_error():
    with pytest.raises(ValueError, match=r"^backend 'native' cannot run on cpu"):
        fp8_matmul(torch.zeros(4, 8), torch.zeros(8, 4), backend="native")


def test_compiled_code_calls_it_outside_of_its_graph():
    compiled = torch.compile(lambda a, b: fp8_matmul(a, b, "mxfp8").relu(), backend="aot_eager")
    grads = []
    for run in (compiled, compiled, lambda a, b: fp8_matmul(a, b, "mxfp8").relu()):
        a, b = (
            torch.randn(64, 64, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in (1, 2)
        )
        run(a, b).square().sum().backward()
        grads.append((a.grad, b.grad))
    for mine in grads[:2]:
        assert_same_bytes(mine[0], grads[2][0], "da")
        assert_same_bytes(mine[1], grads[2][1], "db")
