"""Products of experts in one launch that native does not use here: whether they are right, and what they would gain.

Native multiplies experts one after the other where torch multiplies one linear (rowwise, MXFP8), and keeps each expert's
codes where its weight's cast put them. torch's product of all experts wants all codes in one tensor, gives BF16 alone and
is another kernel, with other last bits (docs/decisions/gpu_products.md). Here it is tried on the forward product:

    y_e [T_e, N] = x_e [T_e, K] @ w_e [N, K]^T        for every expert e, of codes that were made before

Of blocks this package has a grouped kernel, which native takes where torch has no product of them, not where it has
one (H100 with CUDA 12.9, B200). Here it is timed anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_common import RECIPES, Machine, NotRun, relative_error, supported
from benchmarks.gpu_experts import BASELINES, CASES, DRY, bf16_in_turn, tokens_of
from benchmarks.gpu_kernels import Bench, random, teraflops
from megatron_fp8.backends.base import gemm_in_turn
from megatron_fp8.backends.native.layout import BLOCK, round_up
from megatron_fp8.backends.native.placement import block_scales, tiles_of
from megatron_fp8.tensor import QuantizedSide

NAMES = ("rowwise", "mxfp8")
"""Recipes that have scales as torch's grouped product takes them."""
BLOCKS = "blockwise"
"""The recipe that this package's grouped kernel is tried on."""
Sides = list[QuantizedSide]


def checks() -> dict[str, Callable[[Machine], str]]:
    """Every check by name."""
    return {f"grouped product {name}": partial(grouped_product, name=name) for name in NAMES}


def grouped_product(machine: Machine, name: str) -> str:
    """torch's grouped product against the single ones: as near to float64 as they are; how many last bits are others."""
    recipe = supported(machine, name)
    tokens, n, k = ((70, 0, 33), 48, 128) if machine.dry else ((500, 0, 1300, 1, 129), 2752, 1024)
    x, w = random(machine, sum(tokens), k, seed=1), random(machine, len(tokens) * n, k, seed=2)
    a, b = sides(machine, recipe, x, w, tokens)
    single = in_turn(machine, a, b)
    try:
        found = together(a, b)
    except (RuntimeError, ValueError) as error:
        raise NotRun(f"torch has none: {error}".partition("\n")[0]) from error
    values = zip(*([side.dequantize().double() for side in of] for of in (a, b)), strict=True)
    exact = torch.cat([left @ right.t() for left, right in values])
    mine, theirs = relative_error(single, exact), relative_error(found, exact)
    assert theirs <= 1.5 * mine, f"off by {theirs:.1e}, the single products by {mine:.1e}"
    others = int((found != single).sum())
    return f"off by {theirs:.1e}, the single ones by {mine:.1e}; {others} of {found.numel()} numbers differ"


def products(bench: Bench) -> None:
    """The section: all experts' forward products one after the other; by torch's grouped product, with codes that lie as
    it wants them, and put together before; and those of blocks by this package's grouped kernel."""
    machine = bench.machine
    for case, (count, k, n, average) in (DRY if machine.dry else CASES).items():
        tokens = tokens_of(count, average)
        x, w = random(machine, sum(tokens), k, seed=1), random(machine, count * n, k, seed=2)
        weights = w.view(count, n, k)
        plain = bf16_in_turn(x, list(weights), tokens)
        ends = offsets(tokens, machine.device)
        runs: dict[str, Callable[[], Any]] = {
            "bf16, in turn": partial(bf16_in_turn, x, list(weights), tokens),
            "bf16, grouped": partial(torch.nn.functional.grouped_mm, x, weights.transpose(1, 2), offs=ends),
        }
        for name in (*NAMES, BLOCKS):
            for label, run in _contenders(bench, name, x, w, tokens).items():
                try:
                    found = run()
                except (RuntimeError, ValueError) as error:
                    bench.skip("expert products", case, label, str(error).partition("\n")[0][:160])
                    continue
                if bench.gate(f"expert products {case} {label}", relative_error(found, plain), 0.06):
                    runs[label] = run
        rate = partial(teraflops, 2 * sum(tokens) * n * k)
        bench.time("expert products", case, runs, rate=rate, baseline=BASELINES)
        machine.empty()


def _contenders(
    bench: Bench, name: str, x: torch.Tensor, w: torch.Tensor, tokens: list[int]
) -> dict[str, Callable[[], torch.Tensor]]:
    machine, recipe = bench.machine, RECIPES[name]
    reason = machine.backend.supports(machine.device, recipe)
    if reason is not None:
        return {f"{name}, in turn": partial(_refuse, reason)}
    a, b = sides(machine, recipe, x, w, tokens)
    alone: dict[str, Callable[[], torch.Tensor]] = {f"{name}, in turn": partial(in_turn, machine, a, b)}
    if name == BLOCKS:
        return alone | {f"{name}, own grouped kernel": partial(by_kernel, machine, a, b)}
    ready = arguments(a, b)
    return alone | {
        f"{name}, torch grouped": partial(call, ready),
        f"{name}, torch grouped, codes put together": partial(together, a, b),
    }


def _refuse(reason: str) -> torch.Tensor:
    raise RuntimeError(reason)


def sides(
    machine: Machine, recipe: Any, x: torch.Tensor, w: torch.Tensor, tokens: tuple[int, ...] | list[int]
) -> tuple[Sides, Sides]:
    """Codes of each expert's tokens and of its weight, as casts leave them: x [T, K], w [experts * N, K]."""

    def made(part: torch.Tensor, role: str) -> QuantizedSide:
        side: QuantizedSide = machine.backend.quantize(part, recipe.rule(role), "rowwise").tensor.rowwise
        return side

    weights = w.view(len(tokens), -1, w.shape[1])
    return [made(part, "input") for part in x.split(list(tokens))], [made(part, "weight") for part in weights]


def in_turn(machine: Machine, a: Sides, b: Sides) -> torch.Tensor:
    """bfloat16 [T, N], by the backend's product of each expert."""
    y, outs = _results(a, b)
    gemm_in_turn(machine.backend.gemm, a, b, outs, fast_accumulation=True)
    return y


def by_kernel(machine: Machine, a: Sides, b: Sides) -> torch.Tensor:
    """bfloat16 [T, N], of blocks [1, 128] by [128, 128], by this package's grouped kernel; RuntimeError where Triton
    neither compiles nor interprets."""
    if machine.dry and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("dry run: needs a GPU")
    from megatron_fp8.kernels.block_matmul import Product, grouped_block_matmul  # loads Triton

    y, outs = _results(a, b)
    products = [
        Product(left.codes, block_scales(left)[0], right.codes, block_scales(right)[0], out)
        for left, right, out in zip(a, b, outs, strict=True)
        if len(out)
    ]
    grouped_block_matmul(products[0].a, products, a_height=1, b_height=BLOCK)
    return y


def _results(a: Sides, b: Sides) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """bfloat16 [T, N], not yet made, and each expert's rows of it."""
    tokens = [len(side.codes) for side in a]
    y = torch.empty(sum(tokens), len(b[0].codes), dtype=torch.bfloat16, device=a[0].codes.device)
    return y, y.split(tokens)


def together(a: Sides, b: Sides) -> torch.Tensor:
    """bfloat16 [T, N], by torch's grouped product of codes that are put into one tensor first."""
    return call(arguments(a, b))


class Given(NamedTuple):
    """What torch._scaled_grouped_mm is given.

    Attributes:
        a, b: tokens' codes [T, K], weights' [experts, K, N]; K is contiguous in both.
        scale_a, scale_b: of rows, float32 [T] and [experts, N]; MX scales in tiles of 128 rows and 4 blocks, each
            expert's from the start of a tile, [rows of all tiles, blocks] and [experts, bytes of an expert].
        offs: int32 [experts], where each expert's rows end.
        fast: fast accumulation.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    offs: torch.Tensor
    fast: bool


def arguments(a: Sides, b: Sides) -> Given:
    """All sides' codes and scales in one tensor each."""
    mx = a[0].scale_inv.dtype == torch.float8_e8m0fnu
    if mx:
        wide = round_up(-(-a[0].codes.shape[1] // 32), 4)
        tiles = [tiles_of(side).view(torch.uint8) for side in a if len(side.codes)]
        scale_a = torch.cat(tiles).view(-1, wide).view(torch.float8_e8m0fnu)
        scale_b = torch.stack([tiles_of(side).view(torch.uint8) for side in b]).view(torch.float8_e8m0fnu)
    else:
        scale_a = torch.cat([side.scale_inv[:, 0] for side in a])
        scale_b = torch.stack([side.scale_inv[:, 0] for side in b])
    codes_a = torch.cat([side.codes.view(torch.uint8) for side in a]).view(a[0].codes.dtype)
    codes_b = torch.stack([side.codes.view(torch.uint8) for side in b]).view(b[0].codes.dtype)
    ends = offsets([len(side.codes) for side in a], codes_a.device)
    return Given(codes_a, codes_b.transpose(1, 2), scale_a, scale_b, ends, not mx)


def call(given: Given) -> torch.Tensor:
    """torch's product."""
    return torch._scaled_grouped_mm(
        given.a,
        given.b,
        given.scale_a,
        given.scale_b,
        offs=given.offs,
        out_dtype=torch.bfloat16,
        use_fast_accum=given.fast,
    )


def offsets(tokens: tuple[int, ...] | list[int], device: torch.device) -> torch.Tensor:
    """int32 [experts]: where each expert's rows end."""
    return torch.tensor(list(accumulate(tokens)), dtype=torch.int32, device=device)
