"""Sharded masters: the pieces' codes and scales are those of casting the whole BF16 weight, wherever the cuts are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.ranks import RankPool
from megatron_fp8.fp8_utils import quantize_param_shard
from megatron_fp8.params.fp8_parameter import Fp8Parameter, fp8_parameter
from megatron_fp8.quantizer import quantize
from megatron_fp8.recipe import CustomRecipe, Float8BlockScaling, Float8CurrentScaling
from tests.support.fp8_weights import RECIPES, bytes_of, quantizer_of, weight

# Rows and blocks cut in the middle; tensors smaller than a block; a piece inside one row; an empty tensor of rows.
SHAPES = [(256, 384), (130, 200), (5, 700), (63, 7), (1, 300), (300, 1)]
MORE: dict[str, Any] = {
    **RECIPES,
    "tensorwise-pow2": Float8CurrentScaling(use_power_2_scales=True, margin=1, amax_epsilon=0.25),
    "blockwise-fp32": Float8BlockScaling(use_f32_scales=True),
    "custom": CustomRecipe(lambda role: RECIPES["rowwise" if role == "weight" else "tensorwise"]),
}


def masters(seed: int) -> list[torch.Tensor]:
    """float32 matrices whose blocks of 128 and of 32 differ in size by powers of two: a wrong block is a wrong scale."""
    found = []
    for index, (rows, cols) in enumerate(SHAPES):
        generator = torch.Generator().manual_seed(100 * seed + index)
        whole = torch.randn(rows, cols, generator=generator)
        for block in (128, 32):
            exponents = torch.randint(-5, 5, (-(-rows // block), -(-cols // block)), generator=generator)
            size = torch.exp2(exponents.float())
            whole *= size.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :cols]
        found.append(whole)
    return found


def cuts(rank: int, world: int) -> list[tuple[int, int] | None]:
    """This rank's range of the concatenated, flattened tensors, as (start, end) in each; None where it has nothing."""
    sizes = [rows * cols for rows, cols in SHAPES]
    total = sum(sizes)
    low, high = total * rank // world, total * (rank + 1) // world
    found: list[tuple[int, int] | None] = []
    start = 0
    for size in sizes:
        a, b = max(low - start, 0), min(high - start, size)
        found.append((a, b) if a < b else None)
        start += size
    return found


def cast_shards(recipe: str, warm: bool) -> tuple[list[dict[str, Any]], int]:
    """A rank case: what this rank's parameters hold after the cast, and how many collectives that took."""
    params: list[Fp8Parameter] = []
    for index, shape in enumerate(SHAPES):
        parameter = fp8_parameter(weight(shape, index), quantizer_of(MORE[recipe]))
        if warm:
            parameter.record()
            parameter.quantizer.slot.arena.update(0)
        for codes in parameter.codes:
            codes.fill_(0xAA)
        params.append(parameter)
    ranges = cuts(dist.get_rank(), dist.get_world_size())
    pieces = [
        None if r is None else m.view(-1)[slice(*r)].clone() for m, r in zip(masters(1), ranges, strict=True)
    ]
    calls = []
    original = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    dist.all_reduce = counted
    try:
        quantize_param_shard(params, pieces, [None if r is None else r[0] for r in ranges], dist.group.WORLD)
    finally:
        dist.all_reduce = original
    found = [
        {
            "range": r,
            "codes": [bytes_of(codes) for codes in p.codes],
            "scales": [bytes_of(s) for s in p._stored.scale_invs],
            "amax": float(p._stored.amax),
            "delayed": p.quantizer.delayed_scale() is not None,
        }
        for p, r in zip(params, ranges, strict=True)
    ]
    return found, len(calls)


@pytest.mark.parametrize(
    ("recipe", "world"),
    [
        *((recipe, 3) for recipe in (*MORE, "delayed-warm")),
        ("delayed-warm", 1),
        ("rowwise", 1),
        ("blockwise", 2),
    ],
)
def test_pieces_together_are_the_whole(ranks: RankPool, recipe: str, world: int) -> None:
    name, warm = recipe.removesuffix("-warm"), recipe.endswith("-warm")
    everyone = ranks(world).run(cast_shards, name, warm)
    assert [collectives for _, collectives in everyone] == [0 if world == 1 else 1] * world
    for index, (shape, master) in enumerate(zip(SHAPES, masters(1), strict=True)):
        whole = fp8_parameter(weight(shape, index), quantizer_of(MORE[name]))
        if warm:
            whole.record()
            whole.quantizer.slot.arena.update(0)
        whole.data.copy_(master)  # tests/unit/params/test_fp8_parameter.py: the cast of the BF16 weight
        if not warm:
            expected = quantize(master.bfloat16(), MORE[name], "weight", "both")
            assert bytes_of(whole.quantized.columnwise.codes) == bytes_of(expected.columnwise.codes)  # type: ignore[union-attr]
        for found, _ in everyone:
            mine = found[index]
            assert mine["scales"] == [bytes_of(s) for s in whole._stored.scale_invs], (recipe, shape)
            assert mine["amax"] == float(whole._stored.amax) and mine["delayed"] == warm
            start, end = mine["range"] or (0, 0)
            for codes, right in zip(mine["codes"], whole.codes, strict=True):
                assert codes[start:end] == bytes_of(right)[start:end], (recipe, shape)
                rest = codes[:start] + codes[end:]
                assert rest == b"\xaa" * len(rest), "another rank's part was written"


def cast_sick() -> list[tuple[float, bool]]:
    """A rank case: NaN and Inf in the last rank's piece; (what is recorded as not finite, whether scales are finite)."""
    found = []
    for recipe in RECIPES:
        parameter = fp8_parameter(weight((64, 64)), quantizer_of(RECIPES[recipe]))
        rank, world = dist.get_rank(), dist.get_world_size()
        size = 64 * 64 // world
        piece = weight((64, 64), 1).float().view(-1)[rank * size : (rank + 1) * size].clone()
        if rank == world - 1:
            piece[:2] = torch.tensor([torch.nan, torch.inf])
        quantize_param_shard([parameter], [piece], [rank * size], dist.group.WORLD)
        parameter.record()
        count = float(parameter.quantizer.slot.arena.rows[1, 0])
        finite = all(bool(s.float().isfinite().all()) for s in parameter._stored.scale_invs)
        found.append((count, finite))
    return found


def test_nan_and_inf_are_counted_on_every_rank(ranks: RankPool) -> None:
    for found in ranks(2).run(cast_sick):
        assert found == [(2.0, True)] * len(RECIPES)


def test_nothing_to_cast_is_no_collective() -> None:
    quantize_param_shard([], [], [], None)


def test_megatron_fsdp_is_refused() -> None:
    with pytest.raises(ValueError, match="FSDP"):
        quantize_param_shard([], [], [], None, [None])
