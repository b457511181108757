"""The linear over two tensor-parallel ranks against one rank that holds all tokens: codes, bytes, order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.compare import assert_same_bytes
from benchmarks.support.ranks import RankPool
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.linear.tensor_parallel import TensorParallel
from megatron_fp8.recipe import MXFP8BlockScaling, NVFP4BlockScaling
from tests.support.shards import BATCH, M, Shards, communication
from tests.support.sites import ALL_RECIPES, RECIPES, RecordingBackend, make_site

LAYOUTS = ("column", "column+SP", "row+SP")


@dataclass
class Outcome:
    y: torch.Tensor
    dx: torch.Tensor | None
    dw: torch.Tensor | None
    products: list[Any]


def run(
    site: tuple[GemmSite, RecordingBackend],
    x: torch.Tensor,
    w: Any,
    dy: torch.Tensor,
    *args: Any,
    needs=(1, 1),
    **kw,
) -> Outcome:
    x, w = x.clone().requires_grad_(bool(needs[0])), w.clone().requires_grad_(bool(needs[1]))
    site[1].products.clear()
    y = fp8_linear(x, w, None, site[0], *args, **kw)
    if any(needs):
        y.backward(dy.contiguous())
    return Outcome(y.detach(), x.grad, w.grad, list(site[1].products))


def parallel(site: Any, shards: Shards, **kw: Any) -> Outcome:
    """This rank's part of the layer over both ranks."""
    rank = dist.get_rank()
    x, w, dy = shards.of(rank)
    x, dy = shards.tokens(x, rank, "x"), shards.tokens(dy, rank, "dy")
    return run(site, x, w, dy, communication(shards.layout), **kw)


def check_against_one_rank(outcome: Outcome, sites: list[Any], shards: Shards, **kw: Any) -> None:
    """Bits: of this rank's codes and results against layers with the same weight shards, and all tokens, here."""
    rank = dist.get_rank()
    alone = [run(site, *shards.of(r), **kw) for r, site in enumerate(sites)]
    mine = alone[rank]
    for i, (product, expected) in enumerate(zip(outcome.products, mine.products, strict=True)):
        for which in ("a", "b"):
            side, alone_side = getattr(product, which), getattr(expected, which)
            assert_same_bytes(side.codes, alone_side.codes, f"codes of operand {which} of FP8 GEMM {i}")
            assert_same_bytes(
                side.scale_inv, alone_side.scale_inv, f"scales of operand {which} of FP8 GEMM {i}"
            )
            assert side.tensor_amax == alone_side.tensor_amax and side.shape == alone_side.shape
    assert mine.dx is not None and mine.dw is not None and outcome.dx is not None and outcome.dw is not None
    both = [a.y if shards.layout == "row+SP" else a.dx for a in alone]
    summed = both[0] + both[1]  # type: ignore[operator]
    y, dx = (summed, mine.dx) if shards.layout == "row+SP" else (mine.y, summed)
    assert_same_bytes(outcome.dw, mine.dw, "dw")
    for what, result, expected, side in (("y", outcome.y, y, "dy"), ("dx", outcome.dx, dx, "x")):
        assert_same_bytes(result, shards.tokens(expected, rank, side), what)


# ---------------------------------------------------------------------------------------------- numbers


def equals_one_rank(
    layout: str, names: list[str], m: int, sizes: dict[str, int] | None = None, **kw: Any
) -> dict[str, tuple[set[str], int]]:
    """name -> (the site's notes, small collectives for scales). ``sizes``: others than Shards.make's."""
    found = {}
    for name in names:
        shards = Shards.make(layout, m=m, **(sizes or {}))
        site = make_site(name, group=dist.group.WORLD, **kw)
        alone = [make_site(name, **kw) for _ in range(2)]
        check_against_one_rank(parallel(site, shards), alone, shards)
        found[name] = (site[0].notes, site[0].state.counts.scaling_collectives)
        site[0].state.finish_iteration()
        # Once a delayed scale is warm all ranks share it; the lone layers are given the same.
        for lone in alone:
            arena, whole = lone[0].state.arenas[0], site[0].state.arenas[0]
            lone[0].state.finish_iteration()
            arena.scale.copy_(whole.scale)
        check_against_one_rank(parallel(site, shards), alone, shards)
        if name == "delayed":
            assert site[0].state.counts.scaling_collectives == 0, "a warm scale is shared already"
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_rank_with_all_tokens(ranks: RankPool, layout: str):
    for found in ranks(2).run(equals_one_rank, layout, list(ALL_RECIPES), M):
        assert not any(notes for notes, _ in found.values())
        shared = {name: collectives for name, (_, collectives) in found.items()}
        expected = dict.fromkeys(ALL_RECIPES, 0)
        if layout != "column":
            expected |= {"delayed": 1, "tensorwise": 1, "tensorwise-pow2": 1, "rowwise": 1, "nvfp4": 1}
        if layout == "row+SP":  # these quantize grad_output by rows
            expected |= {"no-input": 1, "no-weight": 1}
        assert shared == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_wgrad_off_equals_one_rank(ranks: RankPool, layout: str):
    names = ["delayed", "tensorwise", "rowwise", "mxfp8", "blockwise"]
    ranks(2).run(equals_one_rank, layout, names, M, fp8_wgrad=False)


@pytest.mark.parametrize("m", [M, 4 * BATCH])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nvfp4_equals_one_rank(ranks: RankPool, layout: str, m: int):
    """Codes two a byte, from whole blocks of 16 tokens; features that fill no whole block."""
    for found in ranks(2).run(equals_one_rank, layout, ["nvfp4"], m, {"k": 72, "n": 104}):
        ((notes, collectives),) = found.values()
        shared = layout != "column" and m == M
        assert collectives == shared, "both directions' amaxes in one collective, where shards are cast"
        assert bool(notes) == (layout != "column" and m != M)


def nvfp4_shares_its_scale() -> None:
    """The largest value is on one rank."""
    shards = Shards.make("column+SP")
    shards.x[3, 5] = 1e4
    check_against_one_rank(
        parallel(make_site("nvfp4", group=dist.group.WORLD), shards),
        [make_site("nvfp4") for _ in range(2)],
        shards,
    )


def test_nvfp4_shares_the_tensors_scale(ranks: RankPool):
    ranks(2).run(nvfp4_shares_its_scale)


PARTS: list[dict[str, str]] = [
    {"*:wgrad": "bf16"},
    {"*:input": "bf16", "*:wgrad": "fp8"},
    {"*:fprop": "bf16"},
    {"*:dgrad": "bf16"},
    {"*:dgrad": "tensorwise", "*:fprop": "rowwise"},
    {"*:grad_output": "bf16", "*:weight": "rowwise"},
]


def parts_equal_one_rank(layout: str, m: int) -> list[set[str]]:
    return [
        set().union(
            *(notes for notes, _ in equals_one_rank(layout, ["mxfp8"], m, overrides=overrides).values())
        )
        for overrides in PARTS
    ]


@pytest.mark.parametrize(
    "layout, m", [*((layout, M) for layout in LAYOUTS), ("column+SP", 60), ("row+SP", 60)]
)
def test_parts_in_other_recipes_equal_one_rank(ranks: RankPool, layout: str, m: int):
    """Each direction of an operand is gathered as its own rule has it: as codes, or in high precision."""
    for found in ranks(2).run(parts_equal_one_rank, layout, m):
        assert any(found) == (m == 60)


@pytest.mark.parametrize("tokens", [7, 64])
@pytest.mark.parametrize("layout", ["column+SP", "row+SP"])
def test_shards_that_are_no_whole_blocks(ranks: RankPool, layout: str, tokens: int):
    """Codes are then made after a gather in high precision, and the site says so."""
    tokens *= BATCH
    for found in ranks(2).run(equals_one_rank, layout, list(RECIPES), 2 * tokens):
        for name, (notes, _) in found.items():
            block = {"blockwise": 128, "blockwise-fp32": 128, "mxfp8": 32, "nvfp4": 16}.get(name, 1)
            role = "input" if layout == "column+SP" else "grad_output"
            expected = (
                f"sequence-parallel {role} gathered in high precision: shards of {tokens} tokens are not whole"
                f" 1x{block} blocks"
            )
            assert notes == ({expected} if tokens % block else set()), name


def shards_match_in_amax(name: str) -> tuple[list[float], list[float]]:
    """(amaxes over both ranks after an iteration, those of the whole tensors)."""
    shards = Shards.make("column+SP")
    site = make_site(name, group=dist.group.WORLD)
    parallel(site, shards)
    counts = site[0].state.finish_iteration()
    assert counts.amax_collectives == 1
    whole = [t.float().abs().max().item() for t in (shards.x, shards.w, shards.dy)]
    return site[0].state.arenas[0].last_amax.tolist(), whole


def test_each_rank_records_its_own_shard_and_the_iteration_shares_it(ranks: RankPool):
    for name in ("delayed", "mxfp8"):
        for reduced, whole in ranks(2).run(shards_match_in_amax, name):
            assert reduced == whole


def nan_on_one_rank(layout: str, names: list[str]) -> None:
    """Rank 1's token 5 holds one NaN; the shards of rank 0 are finite."""
    rank = dist.get_rank()
    for name in names:
        shards = Shards.make(layout)
        (shards.x if layout == "column+SP" else shards.dy)[M // 2 + 5, 7] = torch.nan
        site = make_site(name, group=dist.group.WORLD)
        outcome = parallel(site, shards)
        assert outcome.dx is not None and outcome.dw is not None
        through = outcome.y if layout == "column+SP" else outcome.dx
        assert site[0].state.finish_iteration().nonfinite == 1, f"{name}: rank {rank} does not know"
        if name == "nvfp4":  # which has no code for NaN
            continue
        assert through.flatten(0, 1).isnan().all(1).nonzero().tolist() == [[M // 2 + 5]], name
        assert outcome.dw.isnan().all(0 if layout == "column+SP" else 1).nonzero().tolist() == [[7]], name


@pytest.mark.parametrize("layout", ["column+SP", "row+SP"])
def test_nan_on_one_rank_is_seen_by_all(ranks: RankPool, layout: str):
    ranks(2).run(nan_on_one_rank, layout, list(RECIPES))


def saves_original_input(names: list[str]) -> None:
    for name in names:
        for m in (M, 14 * BATCH):
            shards = Shards.make("column+SP", m=m)
            first, second = (make_site(name, group=dist.group.WORLD) for _ in range(2))
            base, original = parallel(first, shards), parallel(second, shards, save_original_input=True)
            for field in ("y", "dx", "dw"):
                assert_same_bytes(getattr(original, field), getattr(base, field), f"{name} {field}")


def test_save_original_input_with_sequence_parallelism(ranks: RankPool):
    ranks(2).run(saves_original_input, list(ALL_RECIPES))


def stochastic(layout: str, recipe: Any, nearest_recipe: Any) -> None:
    """The random bits belong to an element of the whole matrix, whichever rank casts it."""
    shards = Shards.make(layout, n=128)
    shards.dy[:, [0, 64]] = 100 * shards.dy[:, :1]  # both halves have the whole matrix's amaxes
    rank = dist.get_rank()
    outcome = parallel(make_site(recipe, group=dist.group.WORLD), shards)
    alone = run(make_site(recipe), shards.x, shards.w, shards.dy)
    nearest = run(make_site(nearest_recipe), shards.x, shards.w, shards.dy)
    by_rows, by_columns = (p.a.codes for p in alone.products[1:])  # dy for dgrad [M, N], for wgrad [N, M]
    assert not torch.equal(by_rows.view(torch.uint8), nearest.products[1].a.codes.view(torch.uint8))
    if layout.startswith("column"):
        by_rows, by_columns = by_rows.chunk(2, 1)[rank], by_columns.chunk(2)[rank]
    assert_same_bytes(outcome.products[1].a.codes, by_rows, "dy rowwise")
    assert_same_bytes(outcome.products[2].a.codes, by_columns, "dy columnwise")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "recipes",
    [(MXFP8BlockScaling(stochastic_rounding=True), MXFP8BlockScaling()), (NVFP4BlockScaling(), "nvfp4")],
    ids=["mxfp8", "nvfp4"],
)
def test_stochastic_rounding_does_not_depend_on_the_layout(ranks: RankPool, layout: str, recipes: Any):
    ranks(2).run(stochastic, layout, *recipes)


# --------------------------------------------------------------------------------------------- the pieces


def pieces() -> tuple[Any, ...]:
    rank = dist.get_rank()
    tp = communication("row+SP")
    matrix = torch.arange(6.0).view(2, 3) + 10 * rank
    gathered = tp.all_gather(matrix.to(torch.float8_e5m2), async_op=True).wait()
    strided = tp.all_gather((torch.arange(6.0).view(3, 2) + 10 * rank).t()).wait()
    scattered = tp.reduce_scatter(torch.arange(12.0).view(4, 3) * (rank + 1)).wait()
    alone = TensorParallel.of("column", [dist.new_group([r]) for r in range(2)][rank], sequence_parallel=True)
    reduced = tp.all_reduce(torch.full((2,), 1.0 + rank), async_op=True).wait()
    return gathered.dtype, gathered.float(), strided, scattered, reduced, alone, (tp.rank, tp.size)


def test_gather_scatter_and_reduce(ranks: RankPool):
    for rank, (dtype, gathered, strided, scattered, reduced, alone, place) in enumerate(ranks(2).run(pieces)):
        assert dtype == torch.float8_e5m2
        expected = torch.arange(6.0).view(2, 3)
        both = torch.cat([expected, expected + 10])
        assert torch.equal(gathered, both.to(torch.float8_e5m2).float()), "rows in rank order"
        assert strided.tolist() == [[0, 2, 4], [1, 3, 5], [10, 12, 14], [11, 13, 15]]
        assert torch.equal(scattered, 3 * torch.arange(12.0).view(4, 3).chunk(2)[rank])
        assert reduced.tolist() == [3, 3]
        assert alone == TensorParallel() and alone.kind == "none"
        assert place == (rank, 2)


def test_row_parallel_bias_is_not_the_linears():
    x, w = torch.ones(4, 3), torch.ones(2, 3)
    with pytest.raises(AssertionError, match="row-parallel bias"):
        fp8_linear(x, w, torch.ones(2), make_site("mxfp8")[0], TensorParallel("row", None, True, False, 0, 2))
