"""`quantize`, byte for byte: every recipe, role, direction and dtype against the written-out reference."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from benchmarks.support import reference
from benchmarks.support.compare import assert_same_bytes
from megatron_fp8 import Format, quantize
from megatron_fp8.kernels.gemms import matmul_high_precision
from megatron_fp8.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
)
from tests.support.draws import draws

TENSOR, ROW, WIDE, SQUARE, MX = (None, None), (1, None), (1, 128), (128, 128), (1, 32)

# name: recipe, block of input and grad_output, block of weight, options of the scale
RECIPES = {
    "delayed": (DelayedScaling(margin=1), TENSOR, TENSOR, {"margin": 1}),
    "tensorwise": (Float8CurrentScaling(), TENSOR, TENSOR, {}),
    "tensorwise-pow2": (Float8CurrentScaling(use_power_2_scales=True), TENSOR, TENSOR, {"pow2": True}),
    "tensorwise-epsilon": (Float8CurrentScaling(amax_epsilon=50.0), TENSOR, TENSOR, {"epsilon": 50.0}),
    "rowwise": (Float8RowwiseScaling(), ROW, ROW, {"pow2": True}),
    "rowwise-hybrid": (Float8RowwiseScaling(fp8_format=Format.HYBRID), ROW, ROW, {"pow2": True}),
    "blockwise": (Float8BlockScaling(), WIDE, SQUARE, {"pow2": True}),
    "blockwise-hybrid": (Float8BlockScaling(fp8_format=Format.HYBRID), WIDE, SQUARE, {"pow2": True}),
    "blockwise-fp32": (Float8BlockScaling(use_f32_scales=True), WIDE, SQUARE, {}),
    "blockwise-epsilon": (Float8BlockScaling(amax_epsilon=0.5), WIDE, SQUARE, {"pow2": True, "epsilon": 0.5}),
    "mxfp8": (MXFP8BlockScaling(), MX, MX, {"mx": True}),
    "mxfp8-hybrid": (MXFP8BlockScaling(fp8_format=Format.HYBRID), MX, MX, {"mx": True}),
}
ROLES = ("input", "weight", "grad_output")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(r, c) for r in (1, 7, 129, 1000) for c in (1, 33, 200)] + [(0, 5), (5, 0), (0, 0), (64, 256)]


def rule_for(name: str, role: str) -> reference.Rule:
    """The specification of a recipe's role, from the table above and not from the package."""
    recipe, block, weight_block, options = RECIPES[name]
    hybrid = recipe.fp8_format is Format.HYBRID
    spec = reference.E5M2 if hybrid and role == "grad_output" else reference.E4M3
    return reference.Rule(spec, weight_block if role == "weight" else block, **options)


@lru_cache
def data(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Sizes that vary by rows and columns, with zeros, subnormals and a row and a column of zeros."""
    g = torch.Generator().manual_seed(seed)
    rows, cols = shape
    reach = 6 if dtype is torch.float16 else 30
    row_size = torch.randint(-reach, reach, (rows, 1), generator=g)
    col_size = torch.randint(-4, 5, (1, cols), generator=g)
    x = torch.randn(shape, generator=g) * torch.exp2((row_size + col_size).float())
    x[torch.rand(shape, generator=g) < 0.05] = 0.0
    x[torch.rand(shape, generator=g) < 0.02] = 2.0**-133
    if rows > 5:
        x[3] = 0.0
    if cols > 5:
        x[:, 4] = -0.0
    return x.to(dtype)


def check_side(side, codes: np.ndarray, inverse: np.ndarray, rule: reference.Rule, what: str):
    assert side.codes.dtype is {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[rule.spec.name]
    assert side.scale_inv.dtype is (torch.float8_e8m0fnu if rule.mx else torch.float32)
    assert_same_bytes(
        side.scale_inv, inverse.reshape(()) if rule.block == TENSOR else inverse, f"{what} scale_inv"
    )
    assert_same_bytes(side.codes, codes, f"{what} codes")


def check(x: torch.Tensor, name: str, role: str, direction: str = "both", known: dict | None = None):
    """Both directions of x against the reference; ``known``: its results for this x, which roles of one rule share."""
    rule, wide, known = rule_for(name, role), x.detach().float().numpy(), {} if known is None else known
    wanted = {"both": ("rowwise", "columnwise")}.get(direction, (direction,))
    for way in wanted:
        if (rule, way) not in known:
            known[rule, way] = {"rowwise": reference.quantize, "columnwise": reference.columnwise}[way](
                wide, rule
            )
    q = quantize(x, RECIPES[name][0], role, direction)
    assert q.shape == x.shape
    assert (q.rowwise is None) == (direction == "columnwise")
    assert (q.columnwise is None) == (direction == "rowwise")
    for way in wanted:
        check_side(getattr(q, way), *known[rule, way], rule, way)
    return q


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("name", RECIPES)
def test_codes_and_scales(name, shape):
    """Of each recipe a third of the shapes in each dtype; test_any_matrix draws the rest."""
    dtype, known = DTYPES[(SHAPES.index(shape) + list(RECIPES).index(name)) % 3], {}
    for role in ROLES:
        check(data(shape, dtype), name, role, known=known)


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", RECIPES)
def test_one_direction_at_a_time(name, role, direction):
    check(data((129, 200), torch.bfloat16), name, role, direction)


@pytest.mark.parametrize(
    "special", [math.nan, -math.nan, math.inf, -math.inf], ids=["nan", "-nan", "inf", "-inf"]
)
@pytest.mark.parametrize("name", RECIPES)
def test_nonfinite_values(name, special):
    """One, a row of them, all of them: the codes say so, and no scale becomes NaN, Inf or zero."""
    x = data((130, 160), DTYPES[list(RECIPES).index(name) % 3]).clone()
    for place in ((5, 7), (129, 159), (6, slice(None)), (slice(None), slice(None))):
        x[place] = special
        known = {}
        for role in ROLES:
            q = check(x, name, role, known=known)
            for side in (q.rowwise, q.columnwise):
                inverse = side.scale_inv.float()
                assert bool((inverse > 0).all()) and bool(inverse.isfinite().all())
        if math.isnan(special):
            assert q.rowwise.codes[place].view(torch.uint8).unique().tolist() == [0x7F]


@pytest.mark.parametrize("size", [0.0, 2.0**-149, 2.0**-133, 2.0**-126, 2.0**-100, 2.0**100, 3.3e38])
@pytest.mark.parametrize("name", RECIPES)
def test_extreme_magnitudes(name, size):
    """All-zero and all-subnormal tensors, and tensors at the top of float32's range."""
    g = torch.Generator().manual_seed(1)
    x = (torch.rand((40, 140), generator=g) - 0.5).sign() * torch.tensor(size)
    x[::2] /= 2
    for dtype in (torch.float32, torch.bfloat16):
        known = {}
        for role in ROLES:
            check(x.to(dtype), name, role, known=known)


@pytest.mark.parametrize("name", RECIPES)
def test_strides_do_not_matter(name):
    x = data((129, 200), torch.bfloat16)
    views = {
        "transposed": x.t(),
        "every other": x[1::2, ::3],
        "columns": x[:, 5:105],
        "expanded": x[:1].expand(40, 200),
    }
    for view in views.values():
        assert not view.is_contiguous() or view.shape == (1, 200)
        known = {}
        for role in ROLES:
            check(view, name, role, known=known)


@pytest.mark.parametrize("name", RECIPES)
def test_input_is_left_alone_and_results_own_their_memory(name):
    x = data((64, 256), torch.float32).clone()
    before = x.clone()
    for role in ROLES:
        q = quantize(x, RECIPES[name][0], role, "both")
        codes = q.rowwise.codes.view(torch.uint8).clone()
        x.fill_(math.nan)
        assert_same_bytes(q.rowwise.codes, codes)
        x.copy_(before)
    assert_same_bytes(x, before)


@pytest.mark.parametrize("size", [1000, 40_000])
@pytest.mark.parametrize("name", RECIPES)
def test_chunks_do_not_matter(name, size, monkeypatch):
    """Large tensors are worked through in pieces; so are these small ones, with ragged last pieces."""
    monkeypatch.setattr("megatron_fp8.numerics.cast.CHUNK", size)
    x = data((300, 200), torch.bfloat16).clone()
    x[277, 13], x[5, 6] = math.nan, -math.inf
    for role in ROLES:
        rule = rule_for(name, role)
        exact = reference.dequantize(*reference.quantize(x.float().numpy(), rule), rule)
        back = check(x, name, role).dequantize()
        assert back.isnan().nonzero().tolist() == [[277, 13]]
        back[277, 13] = exact[277, 13] = 0.0
        assert_same_bytes(back, torch.from_numpy(exact).float().bfloat16())


@draws(60)
@given(
    x=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=140),
        elements=st.floats(width=32),
        fill=st.sampled_from([0.0, 1.0, -3.75, float("nan"), float("inf"), 2.0**-140]),
    ),
    name=st.sampled_from(sorted(RECIPES)),
    role=st.sampled_from(ROLES),
    dtype=st.sampled_from(DTYPES),
)
def test_any_matrix(x, name, role, dtype):
    check(torch.from_numpy(x).to(dtype), name, role)


# ------------------------------------------------------------------------------------------ dequantize


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", RECIPES)
def test_dequantize(name, dtype):
    """From either direction, in x's orientation: code times scale_inv in float32, rounded once."""
    x = data((129, 200), dtype)
    for role in ROLES:
        rule = rule_for(name, role)
        turned = {"rowwise": reference.quantize, "columnwise": reference.columnwise}
        for direction, spell_out in turned.items():
            codes, inverse = spell_out(x.float().numpy(), rule)
            exact = torch.from_numpy(reference.dequantize(codes, inverse, rule))
            if direction == "columnwise":
                exact = exact.t()
            q = quantize(x, RECIPES[name][0], role, direction)
            assert q.dequantize().dtype is dtype
            assert_same_bytes(q.dequantize(torch.float32), exact.float(), f"{direction} float32")
            assert_same_bytes(q.dequantize(), exact.float().to(dtype), f"{direction} {dtype}")


# ------------------------------------------------------------------------------------ other libraries


def test_mxfp8_against_torchao():
    """torchao's MX with the round-up scale: the same codes and scales on BF16 data."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    x = (torch.randn(512, 256, generator=torch.Generator().manual_seed(3)) * 5).bfloat16()
    for role, fmt, recipe in (
        ("input", torch.float8_e4m3fn, MXFP8BlockScaling()),
        ("grad_output", torch.float8_e5m2, MXFP8BlockScaling(fp8_format=Format.HYBRID)),
    ):
        scale, codes = to_mx(x, fmt, 32, ScaleCalculationMode.RCEIL)
        q = quantize(x, recipe, role, "both")
        assert_same_bytes(q.rowwise.scale_inv, scale, "scale")
        assert_same_bytes(q.rowwise.codes, codes.view(torch.uint8).view(512, 256), "codes")
        scale, codes = to_mx(x.t().contiguous(), fmt, 32, ScaleCalculationMode.RCEIL)
        assert_same_bytes(q.columnwise.scale_inv, scale, "columnwise scale")
        assert_same_bytes(q.columnwise.codes, codes.view(torch.uint8).view(256, 512), "columnwise codes")


@pytest.mark.parametrize("name, axis", [("tensorwise-pow2", None), ("rowwise", -1)])
def test_power_of_two_scales_against_torchao(name, axis):
    """torchao's float8 scales, tensorwise and per row, rounded down to powers of two; and their codes."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale

    granularity = ScalingGranularity.TENSORWISE if axis is None else ScalingGranularity.AXISWISE
    x = torch.randn(300, 200, generator=torch.Generator().manual_seed(4)).bfloat16()
    theirs = tensor_to_scale(
        x,
        torch.float8_e4m3fn,
        scaling_granularity=granularity,
        axiswise_dim=axis,
        round_scales_to_power_of_2=True,
    )
    codes = (x.float() * theirs).clamp(-448, 448).to(torch.float8_e4m3fn)
    q = quantize(x, RECIPES[name][0], "input")
    assert_same_bytes(q.rowwise.scale_inv, 1 / theirs.float(), "scale")
    assert_same_bytes(q.rowwise.codes, codes, "codes")


@pytest.mark.parametrize("role, block", [("input", (1, 128)), ("weight", (128, 128))])
def test_blockwise_against_torchao(role, block):
    """torchao's blocks: its scales but for a last bit (it divides by 448), its codes for the same scales."""
    from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8

    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(5))
    theirs = _choose_scale_float8(x, list(block))
    in_full = quantize(x, RECIPES["blockwise-fp32"][0], role).rowwise
    torch.testing.assert_close(in_full.scale_inv, theirs, rtol=2e-7, atol=0)
    q = quantize(x, RECIPES["blockwise"][0], role).rowwise
    assert_same_bytes(q.codes, _quantize_affine_float8(x, q.scale_inv), "codes")


# -------------------------------------------------------------------------------------------- custom


def test_custom_recipe_quantizes_by_role():
    recipe = CustomRecipe(
        lambda role: {"input": MXFP8BlockScaling(), "weight": Float8BlockScaling()}.get(role)
    )
    x = data((129, 200), torch.bfloat16)
    for role, name in (("input", "mxfp8"), ("weight", "blockwise")):
        q, expected = quantize(x, recipe, role, "both"), quantize(x, RECIPES[name][0], role, "both")
        for side, other in ((q.rowwise, expected.rowwise), (q.columnwise, expected.columnwise)):
            assert_same_bytes(side.codes, other.codes)
            assert_same_bytes(side.scale_inv, other.scale_inv)
    with pytest.raises(ValueError, match="grad_output"):
        quantize(x, recipe, "grad_output")


@pytest.mark.parametrize(
    "x, role, direction, message",
    [
        (torch.ones(2, 3, dtype=torch.int32), "input", "rowwise", "int32"),
        (torch.ones(2, 3, dtype=torch.float64), "input", "rowwise", "float64"),
        (torch.ones(2, 3, 4), "input", "rowwise", r"\(2, 3, 4\)"),
        (torch.ones(3), "input", "rowwise", r"\(3,\)"),
        (torch.ones(2, 3), "bias", "rowwise", "bias"),
        (torch.ones(2, 3), "input", "diagonal", "diagonal"),
    ],
    ids=["int32", "float64", "3-D", "1-D", "role", "direction"],
)
def test_bad_input_is_named(x, role, direction, message):
    with pytest.raises(ValueError, match=message):
        quantize(x, MXFP8BlockScaling(), role, direction)


@pytest.mark.parametrize("rows", [3, 200])  # with torch's operations, and with compiled ones
@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8"])
def test_numbers_that_are_not_in_memory(name, rows):
    """torch marks some negated and some zero tensors instead of writing them; memory then holds something else."""
    recipe = RECIPES[name][0]
    x = torch.randn(rows, 256)
    for marked, written in (
        (torch._neg_view(x), -x),
        (torch._efficientzerotensor(x.shape), torch.zeros_like(x)),
    ):
        got, want = (quantize(m, recipe, "input", "both") for m in (marked, written))
        for side in ("rowwise", "columnwise"):
            assert_same_bytes(getattr(got, side).codes, getattr(want, side).codes)
            assert_same_bytes(getattr(got, side).scale_inv, getattr(want, side).scale_inv)


def test_high_precision_products_of_numbers_that_are_not_in_memory():
    a, b = torch.randn(200, 256).bfloat16(), torch.randn(96, 256).bfloat16()
    product = matmul_high_precision(torch._neg_view(a), b, torch.float32)
    assert_same_bytes(product, matmul_high_precision(-a, b, torch.float32))
    assert not matmul_high_precision(a, torch._efficientzerotensor(b.shape).bfloat16(), torch.float32).any()
