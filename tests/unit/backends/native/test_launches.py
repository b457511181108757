"""What a linear's forward and backward launch on a GPU, one by one: whoever adds a launch finds its name here.

No bias, one rank, a weight that is cast in the first microbatch. Everything is counted that is neither a view nor an
allocation. ``;`` stands between forward and backward.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fp8.backends.native import backend as native
from megatron_fp8.backends.native.layout import Refusal
from megatron_fp8.kernels import quantize as quantize_module
from megatron_fp8.kernels.gemms import cpu_multiplies
from megatron_fp8.linear.function import fp8_linear, grouped_linear
from megatron_fp8.linear.gemm_site import GemmSite, mark_zeros
from megatron_fp8.linear.quantized_tokens import QuantizedTokens
from megatron_fp8.linear.tensor_parallel import TensorParallel
from megatron_fp8.params.fp8_parameter import fp8_parameter
from megatron_fp8.plan.site_plan import fp8_site
from megatron_fp8.state.cuda_graph import CapturedStep
from megatron_fp8.state.fp8_state import Fp8State
from megatron_fp8.study.support_matrix import torch_refusal
from tests.support.launch_counts import launches_by_name
from tests.support.sites import NATIVE_RECIPES as RECIPES
from tests.support.sites import RECIPES as ALL
from tests.support.valueless_tensors import in_order, warm

MOST = 12
TENSORWISE, ROWWISE = "find_amaxes cast_tensor", "zeros find_amaxes cast_rows"
MM = "_scaled_mm_v2"

# Recipe: its forward and backward.
FIRST = {
    "delayed": f"cast_tensor cast_tensor clone {MM} ; cast_tensor {MM} {MM}",
    "tensorwise": f"{TENSORWISE} {TENSORWISE} {MM} ; {TENSORWISE} {MM} {MM}",
    "rowwise": f"{ROWWISE} {ROWWISE} {MM} ; {ROWWISE} {MM} {MM}",
    "blockwise": f"quantize_tiles quantize_tiles {MM} ; quantize_tiles {MM} {MM}",
    "mxfp8": f"quantize_tiles quantize_tiles {MM} ; quantize_tiles {MM} {MM}",
}
SECOND = {
    "delayed": f"cast_tensor {MM} ; cast_tensor {MM} {MM}",
    "tensorwise": f"{TENSORWISE} {MM} ; {TENSORWISE} {MM} {MM}",
    "rowwise": f"{ROWWISE} {MM} ; {ROWWISE} {MM} {MM}",
    "blockwise": f"quantize_tiles {MM} ; quantize_tiles {MM} {MM}",
    "mxfp8": f"quantize_tiles {MM} ; quantize_tiles {MM} {MM}",
}
# The weight lives as FP8: its record is of the optimizer's cast, its codes lie in one order.
FP8_PARAM = {
    "delayed": f"maximum add_ cast_tensor {MM} ; cast_tensor transpose {MM} {MM}",
    "tensorwise": f"maximum add_ {TENSORWISE} {MM} ; {TENSORWISE} transpose {MM} {MM}",
    "rowwise": f"maximum add_ {ROWWISE} {MM} ; {ROWWISE} transpose {MM} {MM}",
    "blockwise": f"maximum add_ quantize_tiles {MM} ; quantize_tiles transpose new_ones copy_ {MM} {MM}",
    "mxfp8": f"maximum add_ quantize_tiles tile_scales {MM} ; quantize_tiles transpose tile_scales {MM} {MM}",
}
# Sequence parallel, two ranks: codes and scales are gathered and laid side by side.
GATHER, SCATTER, SHARED = "all_gather_into_tensor", "reduce_scatter_tensor", "find_amaxes all_reduce"
"""Zeros of a tensor's amax are a pool's; those of rows' a fill."""
COLUMN = {
    "delayed": f"cast_tensor cast_tensor {GATHER} clone {MM} ; cast_tensor {GATHER} {MM} clone {SCATTER} {MM}",
    "tensorwise": f"{SHARED} cast_tensor {TENSORWISE} {GATHER} {MM} ;"
    f" {TENSORWISE} {GATHER} {MM} clone {SCATTER} {MM}",
    "rowwise": f"zeros {SHARED} cast_rows {ROWWISE} {GATHER} {GATHER} {MM} ;"
    f" {ROWWISE} {GATHER} {MM} clone {SCATTER} {MM}",
    "blockwise": f"quantize_tiles quantize_tiles {GATHER} clone {GATHER} new_ones copy_ {MM} ;"
    f" quantize_tiles {GATHER} {GATHER} {MM} clone {SCATTER} {MM}",
    "mxfp8": f"quantize_tiles quantize_tiles {GATHER} {GATHER} tile_scales {MM} ;"
    f" quantize_tiles {GATHER} clone {GATHER} {MM} clone {SCATTER} tile_scales {MM}",
}
ROW = {
    "delayed": f"cast_tensor cast_tensor clone {MM} {SCATTER} ; cast_tensor {GATHER} {MM} transpose {MM}",
    "tensorwise": f"{TENSORWISE} {TENSORWISE} {MM} {SCATTER} ;"
    f" {SHARED} cast_tensor {GATHER} {MM} transpose {MM}",
    "rowwise": f"{ROWWISE} {ROWWISE} {MM} {SCATTER} ;"
    f" zeros {SHARED} cast_rows {GATHER} {GATHER} {GATHER} {MM} clone {MM}",
    "blockwise": f"quantize_tiles quantize_tiles {MM} {SCATTER} ; quantize_tiles"
    f" {GATHER} clone {GATHER} {GATHER} {GATHER} new_ones copy_ {MM} clone {MM}",
    "mxfp8": f"quantize_tiles quantize_tiles {MM} {SCATTER} ; quantize_tiles"
    f" {GATHER} {GATHER} {GATHER} clone {GATHER} tile_scales {MM} clone tile_scales {MM}",
}


def leaf(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)


def launched(
    recipe: Any,
    *,
    main_grad: bool = False,
    zeroed: bool = False,
    microbatches: int = 1,
    fp8_param: bool = False,
    tp: TensorParallel | None = None,
    bias: torch.dtype | None = None,
    refusal: Refusal = in_order,
) -> str:
    """The launches of the last microbatch of an iteration whose scales are there."""
    with launches_by_name(refusal) as names:
        state = Fp8State()
        site = GemmSite(fp8_site("a", 0, recipe, "native", "test"), state, None)
        warm(state)
        w: Any = leaf(384, 512)
        if fp8_param:
            w = fp8_parameter(w, site.casts["weight"].shared)
        if main_grad:
            w.main_grad, w.grad_added_to_main_grad = torch.empty(384, 512), False
        x, tp = leaf(256, 512), tp or TensorParallel()
        tokens = 256 * tp.size if tp.kind == "column" else 256 // tp.size
        dy = torch.empty(tokens, 384, dtype=torch.bfloat16)
        with CapturedStep(state):
            if zeroed:
                mark_zeros([w], captured=True)
            for microbatch in range(microbatches):
                names.clear()
                b = None if bias is None else torch.empty(384, dtype=bias, requires_grad=True)
                y = fp8_linear(x, w, b, site, tp, fresh_weight=microbatch == 0)
                names.append(";")
                y.backward(dy)
                w.grad = x.grad = None
                found = " ".join(names)
    return found


def count(found: str) -> int:
    return len(found.replace(";", "").split())


@pytest.mark.parametrize("name", FIRST)
def test_first_microbatch(name: str) -> None:
    found = launched(RECIPES[name])
    assert found == FIRST[name]
    assert count(found) <= MOST


@pytest.mark.parametrize("name", SECOND)
def test_second_microbatch(name: str) -> None:
    """The weight's codes are kept."""
    assert launched(RECIPES[name], microbatches=2) == SECOND[name]


@pytest.mark.parametrize("name", FIRST)
def test_main_grad(name: str) -> None:
    """One pass more, which adds: torch's scaled product has no beta. Not the first one of an iteration, which overwrites
    the zeros."""
    assert launched(RECIPES[name], main_grad=True) == f"{FIRST[name]} add_"
    assert launched(RECIPES[name], main_grad=True, zeroed=True) == FIRST[name]
    second = launched(RECIPES[name], main_grad=True, zeroed=True, microbatches=2)
    assert second == f"{SECOND[name]} add_"


def test_main_grad_of_this_packages_product() -> None:
    """Where torch multiplies no blocks, the kernel that does adds what it has summed: no pass, no float32 of its own."""
    expected = "quantize_tiles quantize_tiles block_matmul ; quantize_tiles block_matmul block_matmul"
    none = lambda request: None if request.triton else "refused"  # noqa: E731
    for main_grad in (False, True):
        assert launched(RECIPES["blockwise"], main_grad=main_grad, refusal=none) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FIRST)
def test_bias(name: str, dtype: torch.dtype) -> None:
    """Its gradient is one launch, whichever dtype it has; torch's product adds the bias of the result's dtype."""
    forward, backward = launched(RECIPES[name], bias=dtype).split(" ; ")
    assert f"{forward.removesuffix(' add _to_copy')} ; {backward}" == FIRST[name].replace("; ", "; sum ")


@pytest.mark.parametrize("name", FP8_PARAM)
def test_fp8_parameters(name: str) -> None:
    """In the second microbatch nothing is recorded."""
    found = [launched(RECIPES[name], fp8_param=True, microbatches=n) for n in (1, 2)]
    assert found == [FP8_PARAM[name], FP8_PARAM[name].replace("maximum add_ ", "")]
    assert count(found[0]) <= MOST


@pytest.mark.parametrize(("kind", "expected"), [("column", COLUMN), ("row", ROW)])
@pytest.mark.parametrize("name", FIRST)
def test_sequence_parallel(name: str, kind: Any, expected: dict[str, str]) -> None:
    tp = TensorParallel(kind, None, sequence_parallel=True, size=2)
    assert launched(RECIPES[name], tp=tp) == expected[name]


def test_nvfp4_on_blackwell() -> None:
    """Without stochastic rounding, which has one launch more."""
    cast, product = "find_fp4_amaxes cast_fp4", f"find_factor {MM}"
    refusal = torch_refusal((10, 0))
    backward = f"{cast} {product} {product}"
    first = launched(ALL["nvfp4"], refusal=refusal)
    assert first == f"{cast} find_amaxes cast_fp4 {product} ; {backward}" and count(first) == MOST
    assert launched(ALL["nvfp4"], microbatches=2, refusal=refusal) == f"{cast} {product} ; {backward}"


@pytest.mark.parametrize("weights", ["cast", "parameter"])
def test_blocks_on_blackwell(weights: str) -> None:
    """As MX: the cast of an operand writes its scales into the product's tiles. Those of a parameter in FP8 are put there
    by a launch a product."""
    found = [
        launched(
            RECIPES["blockwise"],
            refusal=torch_refusal((10, 0)),
            fp8_param=weights == "parameter",
            microbatches=n,
        )
        for n in (1, 2)
    ]
    if weights == "cast":
        assert found == [FIRST["blockwise"], SECOND["blockwise"]]
    else:
        assert found == [FP8_PARAM["mxfp8"], FP8_PARAM["mxfp8"].replace("maximum add_ ", "")]


@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
def test_one_scale_on_blackwell(name: str) -> None:
    """Products read codes that lie transposed: casts write one order, and nothing is turned where codes are stored or
    gathered in one."""
    refusal = torch_refusal((10, 0))
    with mock.patch.object(quantize_module, "_Outputs", wraps=quantize_module._Outputs) as made:
        assert launched(RECIPES[name], refusal=refusal) == FIRST[name]
        assert {call.args[2] for call in made.call_args_list} == {"rowwise"}
        assert launched(RECIPES[name]) == FIRST[name]
        assert "both" in {call.args[2] for call in made.call_args_list}, "elsewhere"
    stored = launched(RECIPES[name], fp8_param=True, refusal=refusal)
    assert stored == FP8_PARAM[name].replace("transpose ", "")
    tp = TensorParallel("row", None, sequence_parallel=True, size=2)
    assert launched(RECIPES[name], tp=tp, refusal=refusal) == ROW[name].replace("transpose ", "")


WHOLE = {"delayed": 16, "tensorwise": 16, "rowwise": 16, "blockwise": 128, "mxfp8": 32}
"""Tokens of which torch's products sum over whole ones in wgrad."""


def launched_by_experts(name: str, tokens: tuple[int, ...], *, zeroed: bool = False) -> list[str]:
    """The launches of a microbatch's forward and backward, whose weights are kept."""
    with launches_by_name() as names:
        state = Fp8State()
        sites = [
            GemmSite(fp8_site(f"{e}", 0, RECIPES[name], "native", "test"), state, None)
            for e in range(len(tokens))
        ]
        warm(state)
        weights: list[Any] = [leaf(384, 512) for _ in tokens]
        for weight in weights:
            weight.main_grad, weight.grad_added_to_main_grad = torch.empty(384, 512), False
        found = []
        with CapturedStep(state):
            for _ in range(2):
                names.clear()
                if zeroed:
                    for weight in weights:
                        weight.grad_added_to_main_grad = False
                    mark_zeros(weights, captured=True)
                y = grouped_linear(leaf(sum(tokens), 512), weights, tokens, sites)
                found = [" ".join(names)]
                names.clear()
                y.backward(torch.empty(sum(tokens), 384, dtype=torch.bfloat16))
                found.append(" ".join(names))
                for weight in weights:
                    weight.grad = None
    return found


@pytest.mark.parametrize("name", WHOLE)
def test_experts_of_any_number_of_tokens(name: str) -> None:
    """Casts and products and nothing else: what products want behind the last token, the casts have left there."""
    every = WHOLE[name]
    tokens = (0, 1, every - 1, every, every + 1)
    casts, mm = SECOND[name].split(" ; ")[0].rsplit(" ", 1)
    # Of the expert without tokens nothing. Products with blocks want a multiple of 4 rows, and are cut.
    rows = [count for count in tokens if count]
    copies = [" copy_" if name == "blockwise" and count % 4 else "" for count in rows]
    forward = [casts] * 4 + [f"{mm}{copy}" for copy in copies]
    backward = [*forward, *[f"{mm} add_"] * 4]
    assert launched_by_experts(name, tokens) == [" ".join(forward), " ".join(backward)]
    overwriting = [*forward, *[mm] * 4]
    assert launched_by_experts(name, tokens, zeroed=True) == [" ".join(forward), " ".join(overwriting)]


@pytest.mark.parametrize("name", ["rowwise", "blockwise", "mxfp8"])
def test_tokens_that_came_as_codes(name: str) -> None:
    """Codes and scales are taken apart once, and wgrad's codes are derived by a cast, which fills them up. Products take
    codes as they lie; scales of blocks come otherwise than they read them."""
    with launches_by_name() as names:
        state = Fp8State()
        site = GemmSite(fp8_site("a", 0, RECIPES[name], "native", "test"), state, None)
        warm(state)
        rule, w, found = site.casts["input"].rowwise.rule, leaf(384, 512), []
        side = native.quantize(torch.empty(131, 512, dtype=torch.bfloat16), rule, "rowwise").tensor.rowwise
        with CapturedStep(state):
            for _ in range(2):
                coded = QuantizedTokens.of_side(side, rule, (131, 512), torch.bfloat16)
                names.clear()
                fp8_linear(coded, w, None, site)
                found = [
                    n for n in names if n not in ("_to_copy", "mul_", "isnan", "masked_fill_")
                ]  # decoding
    cast, mm = SECOND[name].split(" ; ")[0].rsplit(" ", 1)
    placed = {"rowwise": "", "blockwise": "new_ones copy_ ", "mxfp8": "tile_scales "}[name]
    exponents = "__lshift__ clamp_ eq " if name == "mxfp8" else ""
    assert " ".join(found) == f"copy_ clone {exponents}{cast} {placed}{mm}"


def test_wgrad_in_high_precision_is_summed_in_float32() -> None:
    """Of 16-bit GEMMs torch may round partial sums on a GPU: the product is asked for float32, and rounded after."""
    cpu_multiplies(torch.bfloat16)  # asked once a process; not counted here
    with launches_by_name() as names:
        state = Fp8State()
        plan = fp8_site("a", 0, RECIPES["mxfp8"], "native", "test", fp8_wgrad=False)
        x, w = leaf(256, 512), leaf(384, 512)
        with CapturedStep(state):
            y = fp8_linear(x, w, None, GemmSite(plan, state, None))
            names.clear()
            y.backward(torch.empty(256, 384, dtype=torch.bfloat16))
            assert " ".join(names) == f"quantize_tiles {MM} _to_copy _to_copy mm _to_copy", (
                "on a GPU: mm, _to_copy"
            )
