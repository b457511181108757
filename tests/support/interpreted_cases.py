"""Checks of the native backend that run Triton kernels in its interpreter, which must be chosen before Triton is loaded.

`python -m tests.support.interpreted_cases` prints a JSON object, check -> traceback or "", for a test.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import traceback
from collections import Counter
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.backends import emulated, reference
from megatron_fp8.backends.base import Region, RunningAmax
from megatron_fp8.backends.native import backend as native
from megatron_fp8.backends.native import placement
from megatron_fp8.kernels import block_matmul, gemm_layouts
from megatron_fp8.linear.function import grouped_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.numerics.cast import RandomKey
from megatron_fp8.plan.site_plan import fp8_site
from megatron_fp8.recipe import Granularity, MXFP8BlockScaling, NVFP4BlockScaling, Rule
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.scaled_mm import fake_torch
from tests.support.sites import RECIPES, data, in_turn, make_site, randn, run
from tests.support.triton_interpreter import lean_interpreter

PRODUCTS = {
    "delayed": "tensor",
    "tensorwise": "tensor",
    "tensorwise-pow2": "tensor",
    "rowwise": "row",
    "mxfp8": "mx",
    "nvfp4": "fp4",
}


def same_bits(name: str) -> None:
    """Codes, scales, amax and health of both directions are the emulated backend's; layouts are the GEMM's."""
    for role, shape, direction in (
        ("input", (70, 200), "both"),
        ("input", (0, 7), "both"),
        ("weight", (130, 200), "both"),
        ("grad_output", (33, 129), "rowwise"),
        ("grad_output", (33, 129), "columnwise"),
    ):
        x, rule = randn(*shape, seed=3), RECIPES[name].rule(role)
        if role == "input" and x.numel():
            x[3, 5], x[7, 8] = torch.nan, -torch.inf
        found, expected = (b.quantize(x, rule, direction) for b in (native, emulated))
        for which in ("rowwise", "columnwise"):
            side, wanted = getattr(found.tensor, which), getattr(expected.tensor, which)
            assert (side is None) == (wanted is None)
            if side is not None:
                what = f"{role} {shape} {direction}: {which}"
                assert_same_bytes(side.codes, wanted.codes, f"{what} codes")
                assert_same_bytes(side.scale_inv, wanted.scale_inv, f"{what} scales")
                assert side.codes.is_contiguous(), "the contraction is last and contiguous"
                assert (side.granularity, side.pow2) == (wanted.granularity, wanted.pow2)
        assert_same_bytes(found.amax, expected.amax, "amax")
        assert float(found.nonfinite) == (2 if role == "input" and x.numel() else 0)


def shared_amaxes() -> None:
    """What is reduced over ranks is the tensor's amax and the columns', and what is recorded is this rank's own."""
    for name in ("tensorwise", "rowwise"):
        x, rule, seen = randn(40, 50, seed=1), RECIPES[name].rule("input"), []

        def reduce(amax, seen=seen):
            seen.append(amax.clone())
            amax.mul_(2)

        found, expected = (b.quantize(x, rule, "both", reduce_amax=reduce) for b in (native, emulated))
        rows = torch.zeros(2)
        running = RunningAmax(rows[0], rows.view(torch.int32)[0], rows[1])
        straight = native.quantize(x, rule, "both", reduce_amax=reduce, running=running)
        assert len(seen) == 3 and all(torch.equal(seen[0].flatten(), each.flatten()) for each in seen)
        assert rows.tolist() == [x.abs().max().item(), 0]
        assert_same_bytes(straight.tensor.rowwise.codes, expected.tensor.rowwise.codes, name)
        for which in ("rowwise", "columnwise"):
            assert_same_bytes(getattr(found.tensor, which).codes, getattr(expected.tensor, which).codes, name)
        assert float(found.amax) == float(expected.amax) == x.abs().max().item()


def rules_without_a_kernel() -> None:
    """The emulated quantization on the same device, and the plan says so."""
    recipe = MXFP8BlockScaling(stochastic_rounding=True)
    x, region = randn(64, 64, seed=1), Region(RandomKey(3))
    found, expected = (
        b.quantize(x, recipe.rule("grad_output"), "both", region=region) for b in (native, emulated)
    )
    assert_same_bytes(found.tensor.columnwise.codes, expected.tensor.columnwise.codes)
    with fake_torch():
        (note,) = native.notes(torch.device("cpu"), recipe)
    assert "grad_output quantized without a kernel" in note and "stochastic" in note
    odd = Rule(recipe.rule("input").fmt, Granularity(64, 64), "pow2")
    assert native.kernel_reason(odd) == "64x64 blocks with pow2 scales"
    found, expected = (b.quantize(x, odd, "both") for b in (native, emulated))
    assert_same_bytes(found.tensor.columnwise.codes, expected.tensor.columnwise.codes)


def blocks_that_torch_lacks() -> None:
    """On a GPU whose torch has no block-scaled product the package's own does all three GEMMs, and the plan says so."""
    refused = dict.fromkeys(("block", "block 1d", "mx"), "not here")
    x, w, dy = data(70, 150, 136)
    bias = randn(136, seed=9, dtype=torch.float32)
    for name in ("blockwise", "blockwise-fp32"):
        site = GemmSite(fp8_site("layers.0.linear", 0, RECIPES[name], "native", "test"), Fp8State(), None)
        expected = run(make_site(name)[0], x, w, dy, bias)
        anywhere = mock.patch.object(native, "device_reason", return_value=None)
        with fake_torch(refuse=refused) as fake, counting_blocks() as calls, anywhere:
            assert native.supports(torch.device("cpu"), RECIPES[name]) is None
            notes = native.notes(torch.device("cpu"), RECIPES[name])
            tried = calls.total()
            outcome = run(site, x, w, dy, bias)
        assert notes == [f"{g} by this package's block-scaled kernel" for g in ("fprop", "dgrad", "wgrad")]
        assert not fake.calls and calls.total() == tried + 3
        for what in ("y", "dx", "dw"):
            found, wanted = getattr(outcome, what).double(), getattr(expected, what).double()
            assert (found - wanted).abs().max() <= 2**-7 * wanted.abs().max(), what


def sites_of_experts(name: str, count: int) -> list[GemmSite]:
    """Sites of the native backend that share a state."""
    state = Fp8State()
    return [GemmSite(fp8_site(f"{e}", 0, RECIPES[name], "native", "test"), state, None) for e in range(count)]


def grouped_blocks() -> None:
    """Experts' block-scaled products: one launch for each GEMM, with the bits of one for each expert."""
    refused = dict.fromkeys(("block", "block 1d", "mx"), "not here")
    tokens, (x, _, dy) = (70, 0, 130), data(200, 150, 136)
    weights = [randn(136, 150, seed=e) for e in range(3)]
    launched: list[int] = []
    original = block_matmul.grouped_block_matmul

    def counting(first, products, **options):
        launched.append(len(products))
        original(first, products, **options)

    found = []
    for grouped in (False, True):
        sites = sites_of_experts("blockwise", 3)
        leaf, parameters = x.clone().requires_grad_(), [torch.nn.Parameter(w) for w in weights]
        for parameter in parameters:
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.ones(136, 150), False
        with fake_torch(refuse=refused), mock.patch.object(block_matmul, "grouped_block_matmul", counting):
            y = (grouped_linear if grouped else in_turn)(leaf, parameters, tokens, sites)
            y.backward(dy)
        found.append([y.detach(), leaf.grad, *(parameter.main_grad for parameter in parameters)])
    assert launched == [2, 2, 2]
    assert_all_same_bytes(*found)


def grouped_sizes_that_do_not_fit(name: str) -> None:
    """Experts whose sizes and tokens tensor cores do not take as they are: padded, with the bits of one after the other,
    also where a dispatch mode is given one operator.

    The stand-in for torch's products refuses what they would.
    """
    tokens, (x, _, dy) = (7, 0, 34), data(41, 150, 40)
    found = []
    for way in ("in turn", "grouped", "as an operator"):
        sites = sites_of_experts(name, 3)
        leaf = x.clone().requires_grad_()
        weights = [torch.nn.Parameter(randn(40, 150, seed=e)) for e in range(3)]
        with fake_torch(), FlopCounterMode(display=False) if way == "as an operator" else nullcontext():
            y = (in_turn if way == "in turn" else grouped_linear)(leaf, weights, tokens, sites)
            y.backward(dy)
        found.append([y.detach(), leaf.grad, *(weight.grad for weight in weights)])
    for one, *others in zip(*found, strict=True):
        for other in others:
            assert_same_bytes(one, other)


def blocks_as_mx() -> None:
    """On a GPU whose torch has MX's product and none for blocks, power-of-two blocks run as MX's; the plan says so."""
    refused = dict.fromkeys(("block", "block 1d"), "only sm90")
    x, w, dy = data(70, 150, 136)
    site = GemmSite(fp8_site("layers.0.linear", 0, RECIPES["blockwise"], "native", "test"), Fp8State(), None)
    expected = run(make_site("blockwise")[0], x, w, dy, None)
    everywhere = mock.patch.object(placement, "has_kernels", return_value=True)
    with fake_torch(refuse=refused) as fake, everywhere:
        notes = native.notes(torch.device("cpu"), RECIPES["blockwise"])
        outcome = run(site, x, w, dy, None)
    each = "by the MX product, each scale for four blocks of 32"
    assert notes == [f"{gemm} {each}" for gemm in ("fprop", "dgrad", "wgrad")]
    assert set(fake.calls) == {"mx"}, fake.calls
    for what in ("y", "dx", "dw"):
        found, wanted = getattr(outcome, what).float(), getattr(expected, what).float()
        size = wanted.abs().max()
        assert ((found - wanted).abs() > 2**-20 * size).float().mean() < 0.01, what
        assert (found - wanted).abs().max() <= 2**-7 * size, what


def one_scale_on_blackwell() -> None:
    """Products read the codes of one order: a linear's casts write no other, and its numbers are another GPU's."""
    x, w, dy = data(80, 96, 144)
    found, written = [], []
    original = native.QuantizedSide.transposed

    def transposed(side):
        written.append(side.shape)
        return original(side)

    for turned in (False, True):
        site = GemmSite(
            fp8_site("layers.0.linear", 0, RECIPES["tensorwise"], "native", "test"), Fp8State(), None
        )
        with (
            fake_torch(turned=turned) as fake,
            mock.patch.object(native.QuantizedSide, "transposed", transposed),
        ):
            written.clear()
            outcome = run(site, x, w, dy, None)
            history = [made["kind"] for made in fake.history[-3:]]
        assert history == (["tensor", "tensor turned", "tensor turned"] if turned else ["tensor"] * 3)
        assert len(written) == 3 * turned
        found.append([outcome.y, outcome.dx, outcome.dw])
    assert_all_same_bytes(*found)


def recorded_straight(name: str) -> None:
    """Two casts in one slot: the largest amax, the sum of counts, the same codes, and scales as the product has them."""
    for role in ("input", "weight"):
        rule, rows = RECIPES[name].rule(role), torch.zeros(2, 3)
        running = RunningAmax(rows[0, 1], rows.view(torch.int32)[0, 1], rows[1, 1])
        scale = torch.tensor(2.0) if rule.delayed else None
        amaxes = []
        for seed in (1, 2):
            x = randn(70, 200, seed=seed)
            x[3, 5], x[7, 8] = torch.nan, torch.nan
            expected = emulated.quantize(x, rule, "both", scale=scale)
            amaxes.append(float(expected.amax))
            found = native.quantize(x, rule, "both", scale=scale, running=running, for_product=True)
            for mine, theirs in zip(found.tensor.sides, expected.tensor.sides, strict=True):
                assert mine.tiled == (name in ("mxfp8", "nvfp4"))
                assert_same_bytes(mine.plain().codes, theirs.codes)
                assert_same_bytes(mine.plain().scale_inv, theirs.scale_inv)
            alone = native.quantize(x, rule, "both", scale=scale)  # recorded nowhere
            assert_same_bytes(alone.tensor.columnwise.codes, expected.tensor.columnwise.codes)
            assert_same_bytes(alone.amax, expected.amax)
        assert rows.tolist() == [[0, max(amaxes), 0], [0, 4, 0]], (role, rows)
        assert found.amax is running.amax and found.nonfinite is running.nonfinite


def linear(name: str) -> None:
    """A whole layer, forward and backward: each GEMM is a tensor-core product of its kind, and the numbers are exact."""
    x, w, dy = data(70, 96, 136)
    bias = randn(136, seed=9)
    plan = fp8_site("layers.0.linear", 0, RECIPES[name], "native", "test")
    site = GemmSite(plan, Fp8State(), None)
    forbidden = AssertionError("quantized without a kernel")
    with fake_torch() as fake, mock.patch.object(reference, "quantize", side_effect=forbidden):
        for _ in range(2):  # with delayed scaling the second iteration has a scale of its own
            outcome = run(site, x, w, dy, bias)
            site.state.finish_iteration()
        kinds = set(fake.calls)
        fast = [made["fast"] for made in fake.history[-3:]]
    product = PRODUCTS.get(name)
    assert fast == [product in ("tensor", "row"), False, False], (
        "fast accumulation is fprop's, and never with blocks"
    )
    blocks = {"block", "block v1", "block 1d v1"} if name == "blockwise-fp32" else {"block", "block 1d"}
    # The older product multiplies MX blocks of E5M2, which mxfp8's gradients have here.
    expected = {product, "mx v1"} if product == "mx" else {product} if product else blocks
    assert kinds == expected, kinds
    emulating, _ = make_site(name)
    for _ in range(2):
        expected = run(emulating, x, w, dy, bias)
        emulating.state.finish_iteration()
    for what in ("y", "dx", "dw", "dbias"):
        found, wanted = getattr(outcome, what).float(), getattr(expected, what).float()
        size = wanted.abs().max()
        assert (found - wanted).abs().max() <= 2**-7 * size, what
        assert ((found - wanted).abs() > 2**-20 * size).float().mean() < 0.01, (
            f"{what}: more than roundings differ"
        )
    assert (site.state.last.fp8_gemms, site.state.last.hp_gemms) == (3, 0)
    for slot, other in zip(site.state.slots(), emulating.state.slots(), strict=True):
        assert slot.arena.last_amax[slot.index] == other.arena.last_amax[other.index], "recorded amaxes"


def gradients_rounded_stochastically() -> None:
    """NVFP4 as it is by default: a linear draws the emulated one's bytes, in both directions."""
    x, w, dy = data(70, 96, 144)
    found = []
    for backend in ("native", "emulated"):
        plan = fp8_site("layers.0.linear", 0, NVFP4BlockScaling(), backend, "test")
        site = GemmSite(plan, Fp8State(), None)
        with fake_torch():
            made = run(site, x, w, dy, None)
        found.append(made)
    for what in ("y", "dx", "dw"):
        mine, theirs = (getattr(made, what).double() for made in found)
        size = theirs.abs().max()
        assert ((mine - theirs).abs() > 2**-20 * size).double().mean() < 0.01, what
        assert (mine - theirs).abs().max() <= 2**-7 * size, what


def transposed_views() -> None:
    """Codes that lie in the other order (gathered shards, FP8 parameters) are turned by the kernel, where kernels run."""
    codes = torch.arange(48 * 160).to(torch.uint8).view(48, 160).view(torch.float8_e4m3fn)
    calls: Counter[str] = Counter()
    original = gemm_layouts.transpose

    def counting(turned):
        calls["transpose"] += 1
        return original(turned)

    everywhere = mock.patch.object(placement, "has_kernels", return_value=True)
    with mock.patch.object(gemm_layouts, "transpose", counting), everywhere:
        for view, shape, count in (
            (codes.t(), (160, 48), 1),
            (codes, (48, 160), 0),
            (codes[:1].t(), (160, 1), 1),
        ):
            calls.clear()
            found = placement.place_codes(view, *shape)
            assert found.stride() == (shape[1], 1) and calls["transpose"] == count, (shape, found.stride())
            assert_same_bytes(found, view)


@contextmanager
def counting_blocks():
    calls: Counter[str] = Counter()
    original = block_matmul.block_matmul

    def counting(*args, **kwargs):
        calls["block_matmul"] += 1
        return original(*args, **kwargs)

    with mock.patch.object(block_matmul, "block_matmul", counting):
        yield calls


BY_BLOCKS = ("delayed", "rowwise", "blockwise", "mxfp8", "nvfp4")
"""A recipe of each granularity."""
CHECKS = {
    **{f"same bits: {name}": (same_bits, name) for name in RECIPES},
    **{f"linear: {name}": (linear, name) for name in BY_BLOCKS},
    **{f"recorded straight: {name}": (recorded_straight, name) for name in RECIPES},
    "shared amaxes": (shared_amaxes,),
    "rules without a kernel": (rules_without_a_kernel,),
    "blocks that torch lacks": (blocks_that_torch_lacks,),
    "grouped blocks": (grouped_blocks,),
    **{
        f"grouped sizes: {name}": (grouped_sizes_that_do_not_fit, name)
        for name in ("rowwise", "mxfp8", "nvfp4")
    },
    "blocks as mx": (blocks_as_mx,),
    "one scale on Blackwell": (one_scale_on_blackwell,),
    "gradients rounded stochastically": (gradients_rounded_stochastically,),
    "transposed views": (transposed_views,),
}


def main() -> None:
    torch.set_num_threads(1)
    lean_interpreter()
    found = {}
    for name, (check, *arguments) in CHECKS.items():
        try:
            check(*arguments)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
