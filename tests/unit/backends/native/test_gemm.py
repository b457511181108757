"""The native GEMM through a product that checks every layout rule: the float64 result, for all recipes and odd shapes."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8 import quantize
from megatron_fp8.backends import emulated
from megatron_fp8.backends.native import backend as native
from megatron_fp8.backends.native.layout import Mode, Operand, Request, mode_of, plan
from megatron_fp8.backends.native.placement import place_codes, tiles_of
from megatron_fp8.backends.native.probe import reads_transposed, refusals
from megatron_fp8.files import terminal
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.recipe import CustomRecipe, Float8CurrentScaling, Float8RowwiseScaling, Granularity, Rule
from tests.support.products import operands
from tests.support.scaled_mm import fake_torch, unswizzle
from tests.support.sites import NATIVE_RECIPES as RECIPES
from tests.support.sites import RECIPES as ALL_RECIPES
from tests.support.sites import randn

CPU = torch.device("cpu")
SIZES = (1, 2, 7, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 199)
SHAPES = [(m, SIZES[(3 * i + 5) % 14], SIZES[(5 * i + 2) % 14]) for i, m in enumerate(SIZES)]
KIND = {
    "delayed": "tensor",
    "tensorwise": "tensor",
    "tensorwise-pow2": "tensor",
    "rowwise": "row",
    "mxfp8": "mx",
    "nvfp4": "fp4",
}


def kind_of(name: str, which: str) -> str:
    if name in KIND:  # MX of E5M2 is the older product's too
        return KIND[name] + (" v1" if name == "mxfp8" and which != "fprop" else "")
    gradients_e5m2 = name == "blockwise-fp32" and which != "fprop"
    return ("block 1d" if which == "wgrad" else "block") + (" v1" if gradients_e5m2 else "")


def assert_rounded(result: torch.Tensor, exact: torch.Tensor, roundings: int, what: str) -> None:
    """The float64 result, rounded; a few may be an ulp off where float64 sums of E5M2 products depend on their order,
    or where a bias joins what was rounded to float32 before."""
    expected = exact.to(result.dtype)
    differ = result != expected
    unit = torch.finfo(result.dtype).eps
    allowed = unit * expected.double().abs() + (roundings - 1) * 1e-5
    assert bool(((result.double() - expected.double()).abs() <= allowed).all()), what
    assert int(differ.sum()) <= (1 + result.numel() // 500 if roundings == 1 else result.numel()), what


@pytest.mark.parametrize("which", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", ALL_RECIPES)
def test_equals_the_float64_product(name, which):
    """Bits: scale products and roundings are the specified ones, padding adds nothing, and M, N, K are cut back."""
    with fake_torch() as fake:
        for shape in [*SHAPES, (3, 650, 5), (5, 3, 1300)]:
            a, b = operands(which, ALL_RECIPES[name], *shape)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                bias = randn(b.codes.shape[0], seed=5, dtype=dtype)
                for added in (None, bias, bias.float()):
                    result = native.gemm(a, b, out_dtype=dtype, bias=added)
                    exact = emulated.gemm(a, b, out_dtype=torch.float64, bias=added, exact=True)
                    assert result.is_contiguous() and result.dtype == dtype
                    rounded_once = added is None or added.dtype == dtype != torch.float32
                    assert_rounded(result, exact, 1 if rounded_once else 2, f"{name} {which} {shape} {dtype}")
                    assert fake.last["kind"] == kind_of(name, which)


def test_fast_accumulation_is_for_scales_outside_the_contraction():
    with fake_torch() as fake:
        for name, recipe in RECIPES.items():
            a, b = operands("fprop", recipe, 64, 64, 128)
            for asked in (False, True):
                native.gemm(a, b, out_dtype=torch.bfloat16, fast_accumulation=asked)
                assert fake.last["fast"] == (asked and kind_of(name, "fprop") in ("tensor", "row")), name


def test_transposed_views_and_single_rows():
    """A view of codes in the other order is copied into place; so is one row, whose strides lie."""
    with fake_torch():
        for m, n, k in ((1, 16, 16), (16, 1, 16), (1, 1, 1), (32, 48, 16)):
            a, b = operands("fprop", RECIPES["tensorwise"], m, n, k)
            expected = native.gemm(a, b)
            turned = [replace(s, codes=s.codes.t().contiguous().t()) for s in (a, b)]
            assert_same_bytes(native.gemm(*turned), expected)
    row = torch.zeros(16, 1, dtype=torch.uint8).view(torch.float8_e4m3fn).t()
    assert row.stride() == (1, 1) and place_codes(row, 1, 16).stride() == (16, 1)
    codes = torch.zeros(4, 32, dtype=torch.float8_e5m2)
    assert place_codes(codes, 4, 32).data_ptr() == codes.data_ptr(), "nothing is copied that lies right"


def test_empty_operands():
    with fake_torch() as fake:
        for m, n, k in ((0, 5, 7), (5, 0, 7), (5, 7, 0)):
            a, b = operands("fprop", RECIPES["tensorwise"], m, n, k)
            assert native.gemm(a, b).shape == (m, n) and not native.gemm(a, b).any()
            bias = torch.ones(n, dtype=torch.bfloat16)
            assert bool((native.gemm(a, b, out_dtype=torch.bfloat16, bias=bias) == 1).all())
        assert not fake.calls


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_nan_stays_in_its_row(name):
    x, w = randn(33, 140, seed=1), randn(20, 140, seed=2)
    x[5, 7] = torch.nan
    with fake_torch():
        a, b = (quantize(t, RECIPES[name], role).rowwise for t, role in ((x, "input"), (w, "weight")))
        result = native.gemm(a, b, out_dtype=torch.bfloat16)
    assert result.isnan().all(1).nonzero().tolist() == [[5]] and result.isnan().sum() == 20


MIXED = {
    "rows by a tensor": (Granularity(1, 0), Granularity(0, 0), "row"),
    "a tensor by rows": (Granularity(0, 0), Granularity(1, 0), "row"),
    "128x128 by 128x128": (Granularity(128, 128), Granularity(128, 128), "block"),
    "128x128 by 1x128": (Granularity(128, 128), Granularity(1, 128), "block 1d"),
    "rows by 128x128": (Granularity(1, 0), Granularity(128, 128), "block"),
    "1x128 by a tensor": (Granularity(1, 128), Granularity(0, 0), "block 1d"),
}


@pytest.mark.parametrize("case", MIXED)
def test_coarser_scales_are_repeated(case):
    first, second, kind = MIXED[case]
    recipe = CustomRecipe(lambda role: Rule(E4M3, first if role == "input" else second, "pow2"))
    with fake_torch() as fake:
        for m, n, k in ((70, 150, 300), (3, 5, 7)):
            a, b = operands("fprop", recipe, m, n, k)
            exact = emulated.gemm(a, b, out_dtype=torch.float64, exact=True)
            assert_same_bytes(native.gemm(a, b), exact.float(), case)
            assert fake.last["kind"] == kind


@pytest.mark.parametrize("turned", [(False, True), (True, False), (True, True)], ids=str)
def test_codes_that_lie_transposed(turned):
    """They are multiplied as they lie where a product takes them, else copied; and where 16 does not divide a size."""
    for m, n, k in ((48, 32, 64), (48, 32, 72), (40, 32, 64)):
        sides = operands("fprop", RECIPES["tensorwise"], m, n, k)
        exact = emulated.gemm(*sides, out_dtype=torch.float64, exact=True).float()
        lie = [
            replace(s, codes=transpose_in_memory(s.codes)) if t else s
            for s, t in zip(sides, turned, strict=True)
        ]
        for blackwell in (False, True):
            fits = any(Operand.of(side).turned for side in lie)
            with fake_torch(turned=blackwell) as fake:
                assert_same_bytes(native.gemm(*lie), exact, f"{m, n, k}")
            assert fake.last["kind"] == ("tensor turned" if blackwell and fits else "tensor")


def transpose_in_memory(codes):
    return codes.view(torch.uint8).t().contiguous().t().view(codes.dtype)


@pytest.mark.parametrize(
    "fault", [{"turned": False}, {"turned": True, "wrong": "tensor turned"}, {"turned": True}]
)
def test_products_of_transposed_codes_are_tried(fault):
    """A GPU that refuses them, or computes them wrongly, gets codes in both orders."""
    with fake_torch(**fault):
        refusal = refusals(CPU, native.multiply)
        assert (
            reads_transposed(E4M3, refusal) == reads_transposed(E5M2, refusal) == (fault == {"turned": True})
        )


NO_BLOCKS = {"block": "only sm90", "block 1d": "only sm90"}
"""What Blackwell's torch says."""


@pytest.mark.parametrize("which", ["fprop", "dgrad", "wgrad"])
def test_blocks_of_powers_of_two_run_as_mx_where_torch_has_no_blocks(which):
    """The same float64 product: each scale for four blocks of 32; also of the least and the greatest numbers."""
    with fake_torch(refuse=NO_BLOCKS) as fake:
        for shape in [*SHAPES[::3], (3, 650, 5), (5, 3, 1300)]:
            a, b = operands(which, RECIPES["blockwise"], *shape)
            for dtype in (torch.float32, torch.bfloat16):
                result = native.gemm(a, b, out_dtype=dtype)
                exact = emulated.gemm(a, b, out_dtype=torch.float64, exact=True)
                assert_rounded(result, exact, 1, f"{which} {shape} {dtype}")
                assert fake.last["kind"] == "mx"


@pytest.mark.parametrize("recipe", ["1x128", "128x128"])
def test_every_scale_of_a_block_is_an_mx_scale(recipe):
    """The ends of what scale_inv can be, 2^-127 and 2^126, and what E8M0 has beyond."""
    granularity = Granularity(1, 128) if recipe == "1x128" else Granularity(128, 128)
    x = torch.ones(256, 300)
    x[:128] *= torch.finfo(torch.float32).max
    x[128:] *= 2.0**-126
    side = quantize(x, CustomRecipe(lambda role: Rule(E4M3, granularity, "pow2")), "input").rowwise
    assert float(side.scale_inv.max()) == 2.0**120 and float(side.scale_inv.min()) == 2.0**-127
    for scale in (side.scale_inv, torch.full_like(side.scale_inv, 2.0**126)):
        found = tiles_of(replace(side, scale_inv=scale))
        assert torch.equal(
            unswizzle(found, 256, 300), replace(side, scale_inv=scale).expanded_scale_inv().double()
        )


@pytest.mark.parametrize("case", ["128x128 by 1x128", "1x128 by a tensor"])
def test_tiles_where_another_product_reads_scales(case):
    """A cast that expects the MX product leaves tiles; beside other scales they are undone."""
    first, second, kind = MIXED[case]
    recipe = CustomRecipe(lambda role: Rule(E4M3, first if role == "input" else second, "pow2"))
    with fake_torch() as fake:
        a, b = operands("fprop", recipe, 130, 150, 300)
        expected = native.gemm(a, b)
        tiled = replace(a, scale_inv=tiles_of(a), tiled=True)
        assert_same_bytes(native.gemm(tiled, b), expected, case)
        assert fake.last["kind"] == kind


def test_other_blocks_do_not_run_as_mx():
    """float32 scales, and a block beside a row or a tensor."""
    block, square, row = Granularity(1, 128), Granularity(128, 128), Granularity(1, 0)

    def refusal(request):
        return "only sm90" if request.mode in (Mode.BLOCK, Mode.BLOCK_1D) and not request.triton else None

    def request(first, second, pow2=True):
        a, b = (Operand(64, 256, torch.float8_e4m3fn, g, False, pow2) for g in (first, second))
        return plan(a, b, torch.bfloat16, None, False, refusal).request

    assert request(block, square).mode is request(block, block).mode is Mode.MX
    assert request(block, square, pow2=False).by == request(row, square).by == "kernel"


def test_what_nothing_multiplies_is_named():
    mx, rows = (
        operands("fprop", RECIPES["mxfp8"], 4, 4, 32)[0],
        operands("fprop", RECIPES["rowwise"], 4, 4, 32)[1],
    )
    with (
        fake_torch(),
        pytest.raises(ValueError, match=r"no tensor-core GEMM multiplies 1x32 blocks with E8M0.*by row"),
    ):
        native.gemm(mx, rows)
    pow2, plain = (Operand(4, 64, E4M3.dtype, Granularity(1, 64), False, pow2) for pow2 in (True, False))
    with pytest.raises(
        ValueError, match="1x64 blocks with power-of-two scales by 1x64 blocks with float32 scales"
    ):
        mode_of(pow2, plain)
    a, b = operands("fprop", Float8CurrentScaling(), 4, 4, 4)
    with pytest.raises(ValueError, match="contracts the last"):
        native.gemm(a, replace(b, codes=b.codes[:, :3]))
    with pytest.raises(ValueError, match="E5M2 x E5M2"):
        native.gemm(*[replace(s, codes=s.codes.view(torch.float8_e5m2)) for s in (a, b)])


# ------------------------------------------------------------------------------------------ what torch may lack


def test_rowwise_without_a_float32_result_runs_with_unit_scales():
    a, b = operands("wgrad", Float8RowwiseScaling(), 60, 70, 130)
    exact = emulated.gemm(a, b, out_dtype=torch.float64, exact=True).float()
    with fake_torch(refuse={"row float32": "only bf16"}) as fake:
        result = native.gemm(a, b, out_dtype=torch.float32)
        assert fake.last["kind"] == "tensor" and fake.last["out"] == torch.float32
        assert_same_bytes(result, exact)
        slow = native.gemm(a, b, out_dtype=torch.bfloat16)
        assert fake.last["kind"] == "tensor" and fake.last["out"] == torch.float32, "CUTLASS is slow at it"
        assert_same_bytes(slow, exact.bfloat16())
        native.gemm(a, b, out_dtype=torch.bfloat16, fast_accumulation=True)
        assert fake.last["kind"] == "row" and fake.last["fast"]
        bias = randn(b.codes.shape[0], seed=3, dtype=torch.float32)
        for dtype in (torch.float32, torch.bfloat16):
            result = native.gemm(a, b, out_dtype=dtype, bias=bias)
            assert fake.last["kind"] == "tensor"
            assert_same_bytes(result, (exact + bias).to(dtype), "one rounding, after the bias")


@pytest.mark.parametrize(("rows", "whole"), [(64, True), (70, False)])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "mxfp8"])
def test_the_product_writes_to_a_given_tensor(name, rows, whole):
    """Itself, unless it is padded or the tensor is not aligned; with the same bits."""
    a, b = operands("wgrad", RECIPES[name], 64, rows, 128)  # [rows, 64] @ [128, 64]^T
    a, b = b, a  # N = rows
    with fake_torch() as fake:
        expected = native.gemm(a, b)
        for start in (0, 1):
            out = torch.full((start + expected.numel(),), torch.nan)[start:].view(expected.shape)
            assert native.gemm(a, b, out=out) is out
            assert fake.last["into"] == (whole and start == 0)
            assert_same_bytes(out, expected)
        out = torch.full(expected.shape, torch.nan)
        assert native.accumulate(a, b, out, zeros=True)
        assert_same_bytes(out, expected)
    with fake_torch(refuse={"row float32": "only bf16"}):
        assert_same_bytes(native.gemm(a, b, out=out.fill_(torch.nan)), expected)


def test_rows_that_cublas_multiplies_are_not_scaled_afterwards():
    a, b = operands("wgrad", Float8RowwiseScaling(), 60, 70, 130)
    with fake_torch() as fake:
        for dtype in (torch.float32, torch.bfloat16):
            native.gemm(a, b, out_dtype=dtype)
            assert fake.last["kind"] == "row" and not fake.last["fast"]


def test_the_older_product_where_torch_has_no_newer_one(monkeypatch):
    for name in ("tensorwise", "rowwise", "mxfp8"):
        a, b = operands("fprop", RECIPES[name], 64, 48, 128)
        with fake_torch() as fake:
            newer = native.gemm(a, b)
            kind = fake.last["kind"]
        with fake_torch() as fake:
            monkeypatch.delattr(torch, "_scaled_mm_v2")
            assert_same_bytes(native.gemm(a, b), newer)
            assert fake.last["kind"] == f"{kind} v1"
            monkeypatch.undo()


def test_a_product_that_is_refused_at_its_size_is_planned_again(capsys, monkeypatch):
    """Its kind was tried on a small matrix. The step goes on, a line names the request, and it is not asked again."""
    monkeypatch.setattr(terminal, "_printed", set())
    a, b = operands("fprop", RECIPES["mxfp8"], 64, 48, 128)
    with fake_torch() as fake:
        expected = native.gemm(a, b)
        newer, asked, error = (
            torch._scaled_mm_v2,
            [],
            RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nand its stack"),
        )

        def refusing(x, *args, **options):
            if x.shape[0] == 64:
                asked.append(x)
                raise error
            return newer(x, *args, **options)

        monkeypatch.setattr(torch, "_scaled_mm_v2", refusing)
        for _ in range(2):
            assert_same_bytes(native.gemm(a, b), expected)
            assert fake.last["kind"] == "mx v1" and len(asked) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            "64 x 128 by 48 x 128 (1x32 scales, float8_e4m3fn by float8_e4m3fn -> float32) was refused: CUBLAS"
            in line
        )
        monkeypatch.setattr(torch, "_scaled_mm", refusing)
        with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
            native.gemm(a, b)
        error = torch.OutOfMemoryError("CUDA out of memory")
        a, b = operands("fprop", RECIPES["tensorwise"], 64, 48, 128)
        with pytest.raises(torch.OutOfMemoryError):
            native.gemm(a, b)
    assert not capsys.readouterr().err


def test_a_product_that_torch_gets_wrong_is_not_used():
    """As 128x128 scales were before pytorch#166752: no error, wrong numbers."""
    block = Request(Mode.BLOCK, torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16)
    cpu = torch.device("cpu")
    with fake_torch(wrong="block"):
        assert "computed wrongly" in (refusals(cpu, native.multiply)(block) or "")
        assert refusals(cpu, native.multiply)(replace(block, mode=Mode.BLOCK_1D)) is None
    with fake_torch(refuse={"block": "only sm90\nand its stack"}):
        assert refusals(cpu, native.multiply)(block) == "only sm90"
    with fake_torch():
        assert refusals(cpu, native.multiply)(block) is None


def test_each_kind_of_product_is_tried_once():
    with fake_torch() as fake:
        for _ in range(3):
            native.gemm(*operands("fprop", RECIPES["rowwise"], 8, 8, 8), out_dtype=torch.bfloat16)
        assert fake.calls == {"row": 5}  # with a float32 result, too


def test_memory_that_is_full_says_nothing_of_a_product(monkeypatch):
    request = Request(Mode.TENSOR, torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16)
    with fake_torch():
        refusal = refusals(CPU, native.multiply)
        with monkeypatch.context() as full, pytest.raises(torch.OutOfMemoryError):
            full.setattr(
                torch, "_scaled_mm_v2", MagicMock(side_effect=torch.OutOfMemoryError("0 bytes are free"))
            )
            refusal(request)
        assert refusal(request) is None


# ------------------------------------------------------------------------------------------- where operands lie


@pytest.mark.parametrize("ours", [False, True])
def test_a_bias_is_read_wherever_it_lies(ours):
    """The products, torch's and this package's, get its address alone."""
    a, b = operands("fprop", RECIPES["blockwise-fp32" if ours else "tensorwise"], 64, 48, 128)
    numbers = randn(48, 2, seed=5)
    biases = {
        "strided": numbers[:, 1],
        "repeated": numbers[:1, 0].expand(48),
        "begun later": numbers.view(96)[1:49],
    }
    with fake_torch(refuse=NO_BLOCKS if ours else {}) as fake:
        for how, bias in biases.items():
            found = native.gemm(a, b, out_dtype=torch.bfloat16, bias=bias)
            whole = native.gemm(
                a, b, out_dtype=torch.bfloat16, bias=bias.clone(memory_format=torch.contiguous_format)
            )
            assert_same_bytes(found, whole, how)
        assert bool(fake.calls) != ours


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "nvfp4"])
def test_codes_that_begin_between_multiples_of_16_bytes(name):
    a, b = operands("fprop", ALL_RECIPES[name], 64, 48, 128)
    with fake_torch():
        whole = native.gemm(a, b)
        room = torch.empty(8 + a.codes.numel(), dtype=torch.uint8)[8:].view(a.codes.shape)
        codes = room.copy_(a.codes.view(torch.uint8)).view(a.codes.dtype)
        assert_same_bytes(native.gemm(replace(a, codes=codes), b), whole)


def test_transposed_codes_that_begin_between_multiples_of_16_bytes():
    """Blackwell multiplies transposed codes as they lie: not these."""
    a, b = operands("fprop", RECIPES["tensorwise"], 64, 48, 128)
    room = torch.empty(8 + b.codes.numel(), dtype=torch.uint8)[8:].view(b.codes.shape[::-1]).t()
    codes = room.copy_(b.codes.view(torch.uint8)).view(b.codes.dtype)
    with fake_torch(turned=True):
        assert_same_bytes(native.gemm(a, replace(b, codes=codes)), native.gemm(a, b))


def test_scales_of_later_rows():
    """cuBLAS reads scales per row in pieces of 16 bytes: those that begin elsewhere are copied (pytorch#159957)."""
    a, b = operands("fprop", RECIPES["rowwise"], 64, 48, 128)
    with fake_torch() as fake:
        whole = native.gemm(a, b)
        for first in (1, 4):
            later = replace(a, codes=a.codes[first:], scale_inv=a.scale_inv[first:])
            assert_same_bytes(native.gemm(later, b), whole[first:])
        assert fake.last["kind"] == "row"
