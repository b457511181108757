"""The linear autograd function on one rank: its GEMMs against float64, and what it saves for backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8 import quantize
from megatron_fp8.backends.base import gemm_in_turn
from megatron_fp8.linear.function import fp8_linear, grouped_linear
from megatron_fp8.recipe import GEMM_OPERANDS
from megatron_fp8.state.fp8_state import FAST_ACCUMULATION, Fp8State
from tests.support.products import assert_close_to_exact, values
from tests.support.sites import ALL_RECIPES, RECIPES, Outcome, data, make_site, randn, run

SHAPES = [  # every pair of sizes of every two of M, K, N once
    (m, k, (1, 7, 33, 129)[(i + j) % 4])
    for i, m in enumerate((1, 7, 33, 129))
    for j, k in enumerate((1, 7, 33, 129))
]
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)


pytestmark = pytest.mark.usefixtures("one_thread")


def operands(recipe: Any, gemm: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> list[Any]:
    """What a GEMM must multiply: sides where both roles are quantized, else matrices (contraction last)."""
    matrices = {"input": x, "weight": w, "grad_output": dy}
    directions = {
        "fprop": {"input": "rowwise", "weight": "rowwise"},
        "dgrad": {"grad_output": "rowwise", "weight": "columnwise"},
        "wgrad": {"grad_output": "columnwise", "input": "columnwise"},
    }[gemm]
    roles = GEMM_OPERANDS[gemm]
    in_fp8 = all(recipe.rule(role) for role in roles)
    found = []
    for role in roles:
        direction, matrix = directions[role], matrices[role]
        if recipe.rule(role) is None:
            found.append(matrix if direction == "rowwise" else matrix.t())
            continue
        side = getattr(quantize(matrix, recipe, role, direction), direction)
        found.append(side if in_fp8 else side.dequantize(matrix.dtype))
    return found


def float64(operand: Any) -> torch.Tensor:
    return operand.double() if isinstance(operand, torch.Tensor) else values(operand)


def assert_gemms_are_exact(recipe: Any, backend: Any, x, w, dy, outcome: Outcome, bias: Any = None) -> None:
    """Captured codes and scales are those of `quantize`, and results are the float64 products of these."""
    products = list(backend.products)
    for gemm, result in (("fprop", outcome.y), ("dgrad", outcome.dx), ("wgrad", outcome.dw)):
        a, b = operands(recipe, gemm, x, w, dy)
        if not isinstance(a, torch.Tensor):
            product = products.pop(0)
            for expected, captured in ((a, product.a), (b, product.b)):
                assert captured.codes.dtype == expected.codes.dtype, gemm
                assert_same_bytes(captured.codes, expected.codes, f"{gemm} codes")
                assert_same_bytes(captured.scale_inv, expected.scale_inv, f"{gemm} scale_inv")
        assert_close_to_exact(result, float64(a), float64(b), bias if gemm == "fprop" else None)
    assert not products


# ---------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float16) for name in ("delayed", "mxfp8")),
        *((name, torch.float32) for name in ("rowwise", "blockwise-fp32", "no-weight")),
    ],
)
def test_gemms_match_the_float64_product_of_codes_and_scales(name, dtype):
    x, w, dy = data(70, 160, 136, dtype)
    site, backend = make_site(name)
    outcome = run(site, x, w, dy)
    assert outcome.y.dtype == outcome.dx.dtype == outcome.dw.dtype == dtype
    assert_gemms_are_exact(ALL_RECIPES[name], backend, x, w, dy, outcome)
    in_fp8 = sum(precision == "fp8" for precision in site.plan.gemms.values())
    assert (site.state.counts.fp8_gemms, site.state.counts.hp_gemms) == (in_fp8, 3 - in_fp8)


@pytest.mark.parametrize("name", ALL_RECIPES)
def test_odd_shapes(name):
    """The first of them has blocks of every size, and a part of one."""
    for m, k, n in [(70, 160, 136), *SHAPES]:
        x, w, dy = data(m, k, n)
        site, backend = make_site(name)
        assert_gemms_are_exact(ALL_RECIPES[name], backend, x, w, dy, run(site, x, w, dy))


@pytest.mark.parametrize("name", ALL_RECIPES)
def test_no_tokens(name):
    x, w, dy = data(0, 33, 7)
    site, _ = make_site(name)
    bias = torch.ones(7, dtype=torch.bfloat16)
    outcome = run(site, x, w, dy, bias)
    assert outcome.y.shape == (0, 7) and outcome.dx.shape == (0, 33)
    assert outcome.dw.shape == (7, 33) and not outcome.dw.any()
    assert outcome.dbias is not None and not outcome.dbias.any()
    assert site.state.finish_iteration().nonfinite == 0


@pytest.mark.parametrize("name", ["delayed", "blockwise", "mxfp8", "no-input"])
def test_leading_dimensions_are_tokens(name):
    x, w, dy = data(30, 33, 48)
    flat = run(make_site(name)[0], x, w, dy)
    folded = run(make_site(name)[0], x.view(5, 2, 3, 33), w, dy.view(5, 2, 3, 48))
    assert folded.y.shape == (5, 2, 3, 48) and folded.dx.shape == (5, 2, 3, 33)
    assert_same_bytes(folded.y.view(30, 48), flat.y)
    assert_same_bytes(folded.dx.view(30, 33), flat.dx)
    assert_same_bytes(folded.dw, flat.dw)
    strided = run(make_site(name)[0], x.t().contiguous().t(), w, dy.t().contiguous().t())
    assert_same_bytes(strided.y, flat.y)
    assert_same_bytes(strided.dw, flat.dw)
    vector = fp8_linear(x[0], w, None, make_site(name)[0])
    assert vector.shape == (48,)
    assert_same_bytes(vector, fp8_linear(x[:1], w, None, make_site(name)[0])[0])


@pytest.mark.parametrize(
    ("name", "bias_dtype"),
    [*((name, torch.bfloat16) for name in ("delayed", "blockwise", "no-input")), ("rowwise", torch.float32)],
)
def test_bias_and_its_gradient(name, bias_dtype):
    x, w, dy = data(70, 48, 40)
    bias = randn(40, seed=9, dtype=bias_dtype) * 10
    site, backend = make_site(name)
    outcome = run(site, x, w, dy, bias)
    assert_gemms_are_exact(ALL_RECIPES[name], backend, x, w, dy, outcome, bias)
    assert outcome.dbias is not None
    assert_same_bytes(outcome.dbias, dy.float().sum(0).to(bias_dtype), "float32 sum of the unquantized dy")


def test_input_that_does_not_fit_is_an_error_with_the_sites_name():
    site, _ = make_site("mxfp8", name="decoder.layers.3.mlp.linear_fc1")
    with pytest.raises(ValueError, match=r"decoder\.layers\.3\.mlp\.linear_fc1: input \(4, 5\).*must be 6"):
        fp8_linear(torch.ones(4, 5), torch.ones(3, 6), None, site)


@pytest.mark.parametrize("name", [*RECIPES, "no-input", "no-grad_output"])
def test_fp8_wgrad_off_is_the_wgrad_of_the_unquantized_operands(name):
    x, w, dy = data(96, 40, 56)
    on, off = make_site(name)[0], make_site(name, fp8_wgrad=False)[0]
    with_codes, without = run(on, x, w, dy), run(off, x, w, dy)
    assert_same_bytes(without.y, with_codes.y)
    assert_same_bytes(without.dx, with_codes.dx)
    if name in RECIPES:
        assert_close_to_exact(without.dw, dy.t().double(), x.t().double())
        assert not torch.equal(without.dw, with_codes.dw)
        assert off.state.counts.hp_gemms == on.state.counts.hp_gemms + 1


def test_delayed_scale_comes_from_earlier_iterations():
    x, w, dy = data(64, 32, 48)
    site, backend = make_site("delayed")
    run(site, x * 8, w, dy * 2)
    site.state.finish_iteration()
    backend.products.clear()
    run(site, x, w, dy)
    fprop, dgrad, wgrad = backend.products
    seen = {"input": (x * 8, 448.0), "weight": (w, 448.0), "grad_output": (dy * 2, 57344.0)}
    # Tensors on both sides: torch's number / tensor is no IEEE division.
    scale = {role: torch.tensor(largest) / t.float().abs().max() for role, (t, largest) in seen.items()}
    expected = {role: torch.tensor(1.0) / s for role, s in scale.items()}
    for product, roles in ((fprop, "fprop"), (dgrad, "dgrad"), (wgrad, "wgrad")):
        for side, role in zip((product.a, product.b), GEMM_OPERANDS[roles], strict=True):
            assert_same_bytes(side.scale_inv, expected[role], f"{roles} {role}")


# ------------------------------------------------------------------------------------- saved for backward


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "mxfp8"])
def test_flipping_one_saved_code_changes_the_gradient_made_from_it(name):
    x, w, dy = data(64, 96, 80)

    def flipped(which: int | None) -> Outcome:
        """Flip an exponent bit of the first element of the which-th float8 tensor that comes back."""
        seen = []

        def unpack(t: torch.Tensor) -> torch.Tensor:
            if t.dtype not in CODES:
                return t
            seen.append(t)
            if len(seen) - 1 != which:
                return t
            bytes_ = t.clone().view(torch.uint8)
            bytes_[3, 5] ^= 0x10
            return bytes_.view(t.dtype)

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            outcome = run(make_site(name)[0], x, w, dy)
        assert len(seen) == 2, "the input's codes and the weight's"
        return outcome

    base, of_x, of_w = flipped(None), flipped(0), flipped(1)
    assert_same_bytes(of_x.dx, base.dx)
    assert_same_bytes(of_w.dw, base.dw)
    assert (of_x.dw != base.dw).any(0).nonzero().tolist() == [[3]], "column 3 of dw, from x's column 3"
    assert (of_w.dx != base.dx).any(0).nonzero().tolist() == [[3]]


def saved_bytes(forward: Any) -> int:
    """Bytes of the distinct storages that a forward saves for its backward."""
    storages: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = forward()
    total = sum(storages.values())
    del y
    return total


@pytest.mark.parametrize("name", RECIPES)
def test_saves_about_half_the_bytes_of_a_bf16_linear(name):
    tokens = 129
    x = randn(tokens, 512, seed=1).requires_grad_()
    linear = torch.nn.Linear(512, 384, bias=True, dtype=torch.bfloat16)
    plain = saved_bytes(lambda: linear(x))
    assert plain == 2 * (tokens * 512 + 384 * 512)
    site, _ = make_site(name)
    ours = saved_bytes(lambda: fp8_linear(x, linear.weight, linear.bias, site))
    least = plain // (4 if name == "nvfp4" else 2)
    assert least <= ours <= 1.15 * least


def test_nothing_is_saved_without_grad():
    x, w, _ = data(64, 32, 48)
    w.requires_grad_()
    for name in ALL_RECIPES:
        site, backend = make_site(name)
        with torch.no_grad():
            assert saved_bytes(lambda site=site: fp8_linear(x, w, None, site)) == 0
        assert [direction for shape, direction in backend.casts if shape == (64, 32)] in (["rowwise"], [])


NEEDS = [  # (x, w, bias), GEMMs beyond fprop, directions of x and dy
    ((True, True, True), 2, "both", "both"),
    ((True, False, False), 1, "rowwise", "rowwise"),
    ((False, True, False), 1, "both", "columnwise"),
    ((False, False, True), 0, "rowwise", None),
]


@pytest.mark.parametrize("needs, gemms, x_direction, dy_direction", NEEDS)
@pytest.mark.parametrize("name", ["delayed", "blockwise"])
def test_only_what_is_needed_is_computed(name, needs, gemms, x_direction, dy_direction):
    x, w, dy = data(128, 256, 384)
    full = run(make_site(name)[0], x, w, dy, torch.zeros(384))
    bias = torch.zeros(384)
    leaves = (x, w, bias)
    for leaf, need in zip(leaves, needs, strict=True):
        leaf.requires_grad_(need)
    site, backend = make_site(name)
    saved = saved_bytes(lambda: fp8_linear(x, w, bias, make_site(name)[0]))
    fp8_linear(x, w, bias, site).backward(dy)
    assert site.state.counts.fp8_gemms == 1 + gemms and site.state.counts.hp_gemms == 0
    directions = {(128, 256): x_direction, (384, 256): "both", (128, 384): dy_direction}
    assert dict(backend.casts) == {shape: d for shape, d in directions.items() if d}
    for leaf, expected in zip(leaves, (full.dx, full.dw, full.dbias), strict=True):
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.grad is not None:
            assert_same_bytes(leaf.grad, expected)
    kept = (128 * 256 if needs[1] else 0) + (384 * 256 if needs[0] else 0)
    assert kept <= saved <= 1.1 * kept


@pytest.mark.parametrize("name", RECIPES)
def test_save_original_input_gives_the_same_bits(name):
    x, w, dy = data(64, 96, 80)
    x[1, 2] = torch.inf  # counted once, not again when it is quantized for wgrad
    site, other = make_site(name)[0], make_site(name)[0]
    for _ in range(2):  # delayed: cold, then warm
        base, original = run(site, x, w, dy), run(other, x, w, dy, save_original_input=True)
        for field in ("y", "dx", "dw"):
            assert_same_bytes(getattr(original, field), getattr(base, field), field)
        assert_same_bytes(other.state.arenas[0].rows, site.state.arenas[0].rows, "recorded")
        site.state.finish_iteration(), other.state.finish_iteration()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        leaf = x.clone().requires_grad_()
        fp8_linear(leaf, w.clone().requires_grad_(), None, other, save_original_input=True)
    assert any(t.data_ptr() == leaf.data_ptr() for t in kept), (
        "the input itself, which its maker may hold anyway"
    )


@pytest.mark.parametrize("name", RECIPES)
def test_columnwise_codes_of_the_weight_can_be_made_again(name):
    """The same bits and records; where one copy serves both directions it is kept all the same."""
    x, w, dy = data(64, 96, 80)
    site, other = make_site(name)[0], make_site(name, state=Fp8State(keeps_columnwise=False))[0]
    for _ in range(2):  # delayed: cold, then warm
        base, again = run(site, x, w, dy), run(other, x, w, dy)
        for field in ("y", "dx", "dw"):
            assert_same_bytes(getattr(again, field), getattr(base, field), field)
        assert_same_bytes(other.state.arenas[0].rows, site.state.arenas[0].rows, "recorded")
        held, shared = other.weights.entry, other.casts["weight"].shared
        assert held is not None and shared is not None
        kept = held.quantized
        assert kept.rowwise is not None
        one_copy = (
            shared.rule.granularity.symmetric and name != "nvfp4"
        )  # whose directions pack other codes in a byte
        assert (kept.columnwise is None) == (not one_copy)
        site.state.finish_iteration(), other.state.finish_iteration()


def test_delayed_backward_uses_the_scales_of_its_forward():
    x, w, dy = data(64, 32, 48)

    def gradients(update_between: bool) -> tuple[torch.Tensor, torch.Tensor]:
        site, _ = make_site("delayed")
        fp8_linear(x * 4, w, None, site)
        site.state.finish_iteration()
        leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = fp8_linear(leaf, weight, None, site)
        if update_between:
            fp8_linear(x * 64, w * 64, None, site)
            site.state.finish_iteration()
        y.backward(dy)
        assert leaf.grad is not None and weight.grad is not None
        return leaf.grad, weight.grad

    assert_all_same_bytes(gradients(True), gradients(False))


@pytest.mark.parametrize("setting", FAST_ACCUMULATION)
def test_gemms_that_accumulate_fast(setting, monkeypatch):
    """Megatron's fp8_fast_accumulation, Fp8Config's fast_accumulation."""
    site, backend = make_site("tensorwise", state=Fp8State(fast_gemms=FAST_ACCUMULATION[setting]))
    fast, gemm = [], backend.gemm

    def noting(*args: Any, **options: Any) -> torch.Tensor:
        fast.append(options["fast_accumulation"])
        return gemm(*args, **options)

    monkeypatch.setattr(backend, "gemm", noting)
    x, w, dy = data(96, 40, 56)
    fp8_linear(x.requires_grad_(), torch.nn.Parameter(w), None, site).backward(dy)
    expected = {"fprop": [True, False, False], "all": [True] * 3, "none": [False] * 3}[setting]
    assert fast == expected
    fast.clear()
    monkeypatch.setattr(backend, "grouped_gemm", partial(gemm_in_turn, backend.gemm), raising=False)
    weights = [torch.nn.Parameter(w) for _ in range(2)]
    grouped_linear(x, weights, (40, 56), [site, site]).backward(dy)
    assert fast[::2] == fast[1::2] == expected, "experts"
