"""Overrides of GEMMs and roles: what is multiplied, to the bit; how often it is cast; and that compiled code agrees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8 import quantize
from megatron_fp8.linear.amax_recorder import observe
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.plan.site_plan import bf16_site
from megatron_fp8.recipe import GEMM_OPERANDS, CustomRecipe, DelayedScaling
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.sites import RECIPES, data, make_site, run

# Overrides of a site in hybrid mxfp8 -> the operands of fprop, dgrad and wgrad, and the casts that they take. '-' is an
# operand that is not quantized, 'm4' and 'm5' are mxfp8 in E4M3 and E5M2, 'r4' rowwise, 'b4' blockwise, 't' tensorwise.
CASES: list[tuple[dict[str, str], str, int]] = [
    ({}, "m4 m4 | m5 m4 | m5 m4", 3),
    ({"*:wgrad": "bf16"}, "m4 m4 | m5 m4 | - -", 3),
    ({"*:fprop": "bf16"}, "- - | m5 m4 | m5 m4", 3),
    ({"*:dgrad": "bf16"}, "m4 m4 | - - | m5 m4", 3),
    ({"*:input": "bf16"}, "- m4 | m5 m4 | m5 -", 2),
    ({"*:weight": "bf16"}, "m4 - | m5 - | m5 m4", 2),
    ({"*:grad_output": "bf16"}, "m4 m4 | - m4 | - m4", 2),
    ({"*:fprop": "rowwise"}, "r4 r4 | m5 m4 | m5 m4", 5),
    ({"*:wgrad": "rowwise"}, "m4 m4 | m5 m4 | r5 r4", 5),
    ({"*:weight": "blockwise"}, "m4 b4 | m5 b4 | m5 m4", 3),
    ({"*:grad_output": "e4m3"}, "m4 m4 | m4 m4 | m4 m4", 3),
    ({"*:dgrad": "e4m3"}, "m4 m4 | m4 m4 | m5 m4", 4),
    ({"*:input": "e5m2", "*:grad_output": "e4m3"}, "m5 m4 | m4 m4 | m4 m5", 3),
    ({"*": "bf16", "*:fprop": "tensorwise"}, "t4 t4 | - - | - -", 2),
    ({"*:wgrad": "bf16", "*": "rowwise"}, "r4 r4 | r5 r4 | r5 r4", 3),
    ({"*": "rowwise", "*:wgrad": "bf16", "linear:wgrad": "fp8"}, "r4 r4 | r5 r4 | m5 m4", 5),
    ({"*:input": "bf16", "*:fprop": "e4m3"}, "m4 m4 | m5 m4 | m5 -", 3),
    ({"*:wgrad": "bf16", "*:input": "blockwise"}, "b4 m4 | m5 m4 | - -", 3),
    ({"*:grad_output": "delayed"}, "m4 m4 | t5 m4 | t5 m4", 3),
]
IDS = [" ".join(f"{key[2:] or 'all'}={value}" for key, value in case[0].items()) or "none" for case in CASES]
KINDS = {"m": "mxfp8", "r": "rowwise", "b": "blockwise", "t": "tensorwise"}
READ = {
    ("fprop", "input"): "rowwise",
    ("fprop", "weight"): "rowwise",
    ("dgrad", "grad_output"): "rowwise",
    ("dgrad", "weight"): "columnwise",
    ("wgrad", "grad_output"): "columnwise",
    ("wgrad", "input"): "columnwise",
}


pytestmark = pytest.mark.usefixtures("one_thread")


def operand(word: str, gemm: str, role: str, matrices: dict[str, torch.Tensor]) -> Any:
    """A side, or the matrix as it is, that a GEMM has to read."""
    matrix, direction = matrices[role], READ[gemm, role]
    if word == "-":
        return matrix if direction == "rowwise" else matrix.t()
    rule = replace(RECIPES[KINDS[word[0]]].rule(role), fmt=E5M2 if word[1] == "5" else E4M3)
    recipe = CustomRecipe(lambda asked: rule if asked == role else None)
    return getattr(quantize(matrix, recipe, role, direction), direction)


def wanted(words: str, matrices: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {
        gemm: [operand(word, gemm, role, matrices) for word, role in zip(part.split(), roles, strict=True)]
        for (gemm, roles), part in zip(GEMM_OPERANDS.items(), words.split(" | "), strict=True)
    }


def float64(side: Any) -> torch.Tensor:
    return side.double() if isinstance(side, torch.Tensor) else side.dequantize(torch.float32).double()


@pytest.mark.parametrize("overrides, words, casts", CASES, ids=IDS)
def test_what_is_multiplied_and_how_often_it_is_cast(overrides, words, casts):
    x, w, dy = data(70, 160, 136)
    site, backend = make_site("mxfp8", overrides=overrides, name="layers.0.linear")
    outcome = run(site, x, w, dy)
    operands = wanted(words, {"input": x, "weight": w, "grad_output": dy})
    products, in_fp8 = list(backend.products), 0
    for (gemm, (a, b)), result in zip(operands.items(), (outcome.y, outcome.dx, outcome.dw), strict=True):
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            product, in_fp8 = products.pop(0), in_fp8 + 1
            for expected, found in ((a, product.a), (b, product.b)):
                assert found.codes.dtype == expected.codes.dtype and found.granularity == expected.granularity
                assert_same_bytes(found.codes, expected.codes, f"{gemm} codes")
                assert_same_bytes(found.scale_inv, expected.scale_inv, f"{gemm} scales")
        exact = float64(a) @ float64(b).t()
        assert (result.double() - exact).abs().max() <= 2**-8 * exact.abs().max(), gemm
    assert not products
    counts = site.state.counts
    assert (counts.casts, counts.fp8_gemms, counts.hp_gemms) == (casts, in_fp8, 3 - in_fp8)
    assert [gemm for gemm, precision in site.plan.gemms.items() if precision == "fp8"] == [
        gemm for gemm, pair in operands.items() if not any(isinstance(side, torch.Tensor) for side in pair)
    ]


@pytest.mark.parametrize("gemm", GEMM_OPERANDS)
def test_a_gemm_in_bf16_is_a_bf16_layers_to_the_bit(gemm):
    x, w, dy = data(70, 160, 136)
    part, _ = make_site("tensorwise", overrides={f"*:{gemm}": "bf16"})
    plain = GemmSite(bf16_site("layers.0.linear", 0, "test"), Fp8State(), None)
    mine, theirs = run(part, x, w, dy), run(plain, x, w, dy)
    result = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}
    for other, what in result.items():
        same = torch.equal(getattr(mine, what), getattr(theirs, what))
        assert same == (other == gemm), what


SOME = (4, 8, 18)


@pytest.mark.parametrize("overrides", [CASES[i][0] for i in SOME], ids=[IDS[i] for i in SOME])
def test_compiled_code_computes_and_counts_the_same(overrides):
    torch._dynamo.reset()
    x, w, dy = data(40, 64, 48)
    compiled = torch.compile(fp8_linear, backend="aot_eager_decomp_partition", fullgraph=True)
    sites = [make_site("mxfp8", overrides=overrides)[0] for _ in range(2)]
    for _ in range(2):  # delayed scaling has a scale the second time
        outcomes = []
        for linear, site in zip((fp8_linear, compiled), sites, strict=True):
            mine = [t.clone().requires_grad_() for t in (x, w)]
            y = linear(*mine, None, site)
            y.backward(dy)
            outcomes.append((y, *(t.grad for t in mine)))
        assert_all_same_bytes(*outcomes)
        assert sites[0].state.finish_iteration() == sites[1].state.finish_iteration()
        assert_same_bytes(sites[1].state.arenas[0].last_amax, sites[0].state.arenas[0].last_amax)


def test_two_casts_of_a_role_have_two_histories():
    site, _ = make_site("delayed", overrides={"*:dgrad": "e4m3"}, name="layers.0.linear")
    names = [slot.name for slot in site.state.slots()]
    assert names == [
        f"layers.0.linear.{role}" for role in ("input", "weight", "grad_output", "grad_output.wgrad")
    ]
    assert list(site.quantizers) == ["input", "weight", "grad_output", "grad_output.wgrad"]
    formats = [site.quantizers[role].slot.fmt for role in ("grad_output", "grad_output.wgrad")]
    assert formats == [E4M3, E5M2]
    x, w, dy = data(40, 64, 48)
    run(site, x, w, dy)
    site.state.finish_iteration()
    first, second = (site.quantizers[role].delayed_scale() for role in ("grad_output", "grad_output.wgrad"))
    amax = dy.float().abs().max()
    assert (first * amax).item() == pytest.approx(448) and (second * amax).item() == pytest.approx(57344)


def test_warm_up_fills_the_histories_of_every_cast_and_no_others():
    site, _ = make_site("delayed", overrides={"*:weight": "tensorwise", "*:wgrad": "bf16"})
    assert site.has_histories and not make_site("tensorwise", overrides={"*:wgrad": "mxfp8"})[0].has_histories
    x, w, dy = data(40, 64, 48)
    y = (x.requires_grad_() @ w.t()).requires_grad_()
    observe(site, x, w, y, training=True)
    y.backward(dy)
    site.state.finish_iteration()
    roles = [slot.name.rpartition(".")[2] for slot in site.state.slots()]
    seen = dict(zip(roles, site.state.arenas[0].last_amax, strict=True))
    assert seen["weight"] == 0 and seen["input"] == x.abs().max() and seen["grad_output"] == dy.abs().max()


def test_random_bits_are_drawn_once_a_backward_however_often_it_is_cast():
    recipe = replace(RECIPES["mxfp8"], stochastic_rounding=True)
    site, backend = make_site(recipe, overrides={"*:dgrad": "e4m3"})
    x, w, dy = data(40, 64, 48)
    run(site, x, w, dy)
    key = make_site(recipe)[0].next_region(0, 0, 0).key
    _, dgrad, wgrad = backend.products
    assert_same_bytes(
        wgrad.a.codes, quantize(dy, recipe, "grad_output", "columnwise", key=key).columnwise.codes
    )
    e4m3 = replace(recipe, fp8_format="e4m3")
    assert_same_bytes(dgrad.a.codes, quantize(dy, e4m3, "grad_output", key=key).rowwise.codes)


def test_delayed_scaling_of_one_role_alone_has_its_recipes_history():
    site, _ = make_site("mxfp8", overrides={"*:weight": "delayed"})
    kinds = [slot.delayed for slot in site.state.slots()]
    assert kinds == [None, RECIPES["delayed"], None] and isinstance(kinds[1], DelayedScaling)


def test_a_weight_of_two_kinds_is_kept_in_both():
    """One cast of each kind an iteration, however many calls."""
    site, _ = make_site("mxfp8", overrides={"*:fprop": "rowwise", "*:grad_output": "bf16"})
    x, w, dy = data(40, 64, 48)
    leaf = w.clone().requires_grad_()
    for _ in range(2):
        y = fp8_linear(x, leaf, None, site)
        y.backward(dy)
    assert site.state.counts.casts == 2 + 2 * 2  # weight twice, input twice a call


@pytest.mark.parametrize(
    ("overrides", "reentrant"),
    [
        ({"*:fprop": "rowwise"}, True),
        ({"*:fprop": "rowwise"}, False),
        ({"*:fprop": "bf16"}, True),
        ({"*:wgrad": "e5m2", "*:grad_output": "e4m3"}, False),
    ],
    ids=str,
)
def test_a_second_cast_is_recorded_once_however_the_layer_is_recomputed(overrides, reentrant):
    """Without a gradient there is no wgrad, hence no cast for it: its amax is recorded all the same, in the forward."""
    x, w, dy = data(40, 64, 48)
    sites = [make_site("delayed", overrides=overrides)[0] for _ in range(3)]
    for _ in range(2):
        found = []
        for site, how in zip(sites, ("plain", "checkpoint", "saved input"), strict=True):
            mine = [t.clone().requires_grad_() for t in (x, w)]
            if how == "checkpoint":
                y = checkpoint(fp8_linear, *mine, None, site, use_reentrant=reentrant)
            else:
                y = fp8_linear(*mine, None, site, save_original_input=how == "saved input")
            y.backward(dy)
            found.append(
                (y, *(t.grad for t in mine), site.state.arenas[0].rows[:, : len(site.state.slots())])
            )
            site.state.finish_iteration()
        for other in found[1:]:
            assert_all_same_bytes(other, found[0])
