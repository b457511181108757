"""Products of any shape, layout and recipe against float64: of a matmul, a linear layer, and experts in one call, which
have the bytes of one linear after the other besides.

What is multiplied is asked of `quantize` alone, with contiguous copies; the sums are compared within what a plain float32
product of the same numbers shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8 import fp8_matmul, quantize
from megatron_fp8.linear.function import grouped_linear
from megatron_fp8.nn import Fp8Linear
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.draws import draws
from tests.support.products import assert_close_to_exact, values
from tests.support.sites import RECIPES, in_turn, make_site

NAMES = sorted(RECIPES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = st.sampled_from((1, 2, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 160, 257)) | st.integers(1, 300)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "every second column": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],
    "inside": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 1), value=torch.nan)[1:-1, 3:-2],
    "one row": lambda x: x[:1].expand_as(x),
    "one column": lambda x: x[:, :1].expand_as(x),
}
CONTENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "zeros": lambda x: x * 0,
    "outliers": lambda x: torch.where(x > 2, x * 8, x),
    "sparse": lambda x: torch.where(x > 1.5, x, 0),
    "tiny": lambda x: x * 2**-12,
    "rows apart": lambda x: x * torch.exp2(torch.arange(len(x)) % 9 - 6.0)[:, None],
}


@st.composite
def matrices(draw: st.DrawFn, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, cols] of some content in some layout."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    content = CONTENTS[draw(st.sampled_from(sorted(CONTENTS)))]
    made = content(torch.randn(rows, cols, generator=generator)).to(dtype)
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](made) if rows else made


def seen(x: torch.Tensor, recipe: Any, role: str, direction: str) -> torch.Tensor:
    """float64: the values that a GEMM sees of an operand, the contraction last."""
    side = getattr(quantize(x.detach().contiguous(), recipe, role, direction), direction)
    if side.tensor_amax is not None:  # in whole blocks: the transform fills the last one
        return values(side)
    return side.dequantize(torch.float32).double()


def assert_products(name: str, x: Any, w: Any, dy: Any, y: Any, dx: Any, dw: Any, bias: Any = None) -> None:
    """All three GEMMs of a linear layer; x [M, K], w [N, K], dy [M, N]."""
    recipe = RECIPES[name]
    assert_close_to_exact(
        y.detach(), seen(x, recipe, "input", "rowwise"), seen(w, recipe, "weight", "rowwise"), bias
    )
    assert_close_to_exact(
        dx, seen(dy, recipe, "grad_output", "rowwise"), seen(w, recipe, "weight", "columnwise")
    )
    assert_close_to_exact(
        dw, seen(dy, recipe, "grad_output", "columnwise"), seen(x, recipe, "input", "columnwise")
    )


@draws(10, often=2)
@given(st.sampled_from(NAMES), st.sampled_from(DTYPES), SIZES, SIZES, SIZES, st.data())
def test_matmul(name, dtype, m, k, n, data):
    x, w, dy = (data.draw(matrices(*size, dtype)) for size in ((m, k), (n, k), (m, n)))
    a, b = x.detach().requires_grad_(), w.t().detach().requires_grad_()
    y = fp8_matmul(a, b, RECIPES[name])
    y.backward(dy)
    assert_products(name, x, w, dy, y, a.grad, b.grad.t())


@draws(10, often=2)
@given(st.sampled_from(NAMES), st.sampled_from(DTYPES), SIZES, SIZES, SIZES, st.booleans(), st.data())
def test_linear(name, dtype, m, k, n, bias, data):
    x, w, dy = (data.draw(matrices(*size, dtype)) for size in ((m, k), (n, k), (m, n)))
    linear = Fp8Linear(k, n, bias=bias, recipe=RECIPES[name], dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(w)
    leaf = x.detach().requires_grad_()
    y = linear(leaf)
    y.backward(dy)
    assert_products(name, x, w, dy, y, leaf.grad, linear.weight.grad, linear.bias)


@draws(5, often=2)
@given(st.sampled_from(NAMES), st.lists(st.integers(0, 140), min_size=1, max_size=5), SIZES, SIZES, st.data())
def test_experts_in_one_call(name, tokens, k, n, data):
    x = data.draw(matrices(sum(tokens), k, torch.bfloat16))
    dy = data.draw(matrices(sum(tokens), n, torch.bfloat16))
    weights = [data.draw(matrices(n, k, torch.bfloat16)).contiguous() for _ in tokens]
    y, dx, grads = experts(grouped_linear, name, x, weights, tokens, dy)
    alone_y, alone_dx, alone_grads = experts(in_turn, name, x, weights, tokens, dy)
    assert_same_bytes(y, alone_y, "y")
    assert_same_bytes(dx, alone_dx, "dx")
    parts = [each.split(tokens) for each in (x, dy, y, dx)]
    for e, (part, grad, result, back) in enumerate(zip(*parts, strict=True)):
        if len(part):
            assert_same_bytes(grads[e], alone_grads[e], f"dw of expert {e}")
            assert_products(name, part, weights[e], grad, result, back, grads[e])
        else:
            assert grads[e] is None or not grads[e].any()


def experts(
    linear: Any, name: str, x: torch.Tensor, weights: Any, tokens: list[int], dy: torch.Tensor
) -> tuple[torch.Tensor, Any, list[Any]]:
    """y, the gradient of x, and those of the weights, by sites that share a state of their own."""
    state = Fp8State()
    sites = [
        make_site(name, state=state, name=f"experts.{e}", recording=False)[0] for e in range(len(tokens))
    ]
    leaf, leaves = x.detach().requires_grad_(), [w.detach().requires_grad_() for w in weights]
    y = linear(leaf, leaves, tokens, sites)
    y.backward(dy)
    return y.detach(), leaf.grad, [w.grad for w in leaves]
