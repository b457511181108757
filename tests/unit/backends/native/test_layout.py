"""Layouts of the native GEMM: swizzled scales, arguments as planned, operands that lie right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.backends.native import backend as native
from megatron_fp8.backends.native.layout import Mode, Operand, Request, plan
from megatron_fp8.backends.native.placement import arguments, swizzle
from megatron_fp8.backends.native.probe import refusals
from megatron_fp8.numerics.formats import E2M1
from megatron_fp8.recipe import Granularity
from tests.support.native_casts import as_cast
from tests.support.products import operands
from tests.support.scaled_mm import fake_torch, unswizzle
from tests.support.sites import NATIVE_RECIPES as RECIPES


def test_swizzle_follows_the_index_formula():
    for rows, blocks in ((1, 1), (128, 4), (129, 5), (300, 17), (5, 9)):
        scale = torch.randint(
            0, 255, (rows, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
        )
        found = unswizzle(swizzle(scale.view(torch.float8_e8m0fnu)), rows, 32 * blocks)[:, ::32]
        assert torch.equal(found, (scale.double() - 127).exp2())


def test_arguments_are_as_planned_for_every_size():
    """Plans against the rules of the operator's own shape function (meta tensors), and tensors against plans."""
    e4 = torch.float8_e4m3fn
    no = {
        "torch": lambda request: None,
        "torch v1": lambda request: None if request.by == "torch v1" else "no",
    }
    grids = {
        Mode.TENSOR: (Granularity(0, 0),) * 2,
        Mode.ROW: (Granularity(1, 0),) * 2,
        Mode.MX: (Granularity(1, 32),) * 2,
        Mode.BLOCK_1D: (Granularity(1, 128),) * 2,
        Mode.BLOCK: (Granularity(1, 128), Granularity(128, 128)),
        Mode.FP4: (Granularity(1, 16), Granularity(16, 16)),
    }
    wanted = [(mode, by) for mode in grids for by in ("torch", "torch v1")]
    wanted.remove((Mode.FP4, "torch v1"))  # it takes no factor
    for mode, by in wanted:
        first, second = grids[mode]
        dtype = E2M1.dtype if mode is Mode.FP4 else e4
        for m, n, k in [(m, n, k) for m in (1, 5, 130) for n in (1, 16, 300) for k in (1, 40, 128, 700)]:
            a, b = (Operand(r, k, dtype, g, mode is Mode.MX) for r, g in ((m, first), (n, second)))
            product = plan(a, b, torch.bfloat16, None, True, no[by])
            assert product.request == Request(mode, dtype, dtype, torch.bfloat16, by=by)
            meta = [
                torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta")
                for x in (product.a, product.b, product.scale_a, product.scale_b)
            ]
            if by == "torch v1":
                out = torch._scaled_mm(*meta, out_dtype=torch.bfloat16, use_fast_accum=product.fast)
            elif mode is Mode.BLOCK and product.b.shape[1] % 128:
                continue  # the shape function takes N / 128 rounded down there, the operator itself rounds up
            else:
                factors = [torch.empty((), device="meta")] * (len(mode.recipes[0]) - 1)
                out = torch._scaled_mm_v2(
                    meta[0],
                    meta[1],
                    [meta[2], *factors],
                    mode.recipes[0],
                    mode.swizzles,
                    [meta[3], *factors],
                    mode.recipes[1],
                    mode.swizzles,
                    None,
                    torch.bfloat16,
                    [],
                    product.fast,
                )
            assert out.shape[0] >= m and out.shape[1] >= n


def test_what_triton_cannot_launch_is_refused_in_words():
    """Where neither of torch's products nor the device's shared memory is enough: a reason, not a traceback."""
    from triton.runtime.errors import OutOfResources

    def run(*_):
        raise OutOfResources(131072, 101376, "shared memory")

    block = Request(Mode.BLOCK, torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16, by="kernel")
    refusals.cache_clear()
    assert "shared memory, Required: 131072" in (refusals(torch.device("cpu"), run)(block) or "")
    refusals.cache_clear()


@pytest.mark.parametrize("which", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", RECIPES)
def test_what_lies_right_is_multiplied_in_place(name: str, which: str) -> None:
    """Codes are not copied; the result has the bytes of operands that are copied first."""
    with fake_torch() as fake:
        a, b = (as_cast(side) for side in operands(which, RECIPES[name], 256, 512, 256))
        bias = torch.randn(len(b.codes), dtype=torch.bfloat16)
        refusal = refusals(torch.device("cpu"), native.multiply)
        turned = [replace(side, codes=side.codes.t().contiguous().t()) for side in (a, b)]
        for added in (None, bias):
            made = plan(
                Operand.of(a),
                Operand.of(b),
                torch.bfloat16,
                None if added is None else added.dtype,
                True,
                refusal,
            )
            codes_a, codes_b, *_ = arguments(made, a, b)
            assert (codes_a.data_ptr(), codes_b.data_ptr()) == (a.codes.data_ptr(), b.codes.data_ptr())
            options = {"out_dtype": torch.bfloat16, "bias": added, "fast_accumulation": True}
            in_place = native.gemm(a, b, **options)
            assert fake.last["fast"] == made.fast
            assert_same_bytes(in_place, native.gemm(*turned, **options))
