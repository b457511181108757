"""What the tensor-parallel linear sends, in bytes, and when: the network works while the cores do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.ranks import RankPool
from megatron_fp8.linear.function import fp8_linear
from tests.support.collectives import Log, recorded
from tests.support.shards import M, Shards, communication
from tests.support.sites import make_site


def traffic(layout: str, name: str, m: int, needs: tuple[int, int]) -> tuple[list[Any], list[Any], list[str]]:
    """(sent in forward, sent in backward, order of events in backward)."""
    shards = Shards.make(layout, m=m, k=256, n=384)
    site, _ = make_site(name, group=dist.group.WORLD)
    multiply, forward = site.multiply, Log()
    with recorded() as log:

        def logged(gemm: str, *args: Any, **options: Any) -> torch.Tensor:
            log.events.append(gemm)
            return multiply(gemm, *args, **options)

        site.multiply = logged  # type: ignore[method-assign]
        rank = dist.get_rank()
        x, w, dy = shards.of(rank)
        x, dy = shards.tokens(x, rank, "x").clone(), shards.tokens(dy, rank, "dy").contiguous()
        y = fp8_linear(
            x.requires_grad_(bool(needs[0])),
            w.clone().requires_grad_(bool(needs[1])),
            None,
            site,
            communication(layout),
        )
        forward.sent, log.sent = log.sent, []
        log.events.clear()
        if any(needs):
            y.backward(dy)
    return sizes(forward), sizes(log), log.events


def sizes(log: Log) -> list[tuple[str, str, int]]:
    return [(s.name, str(s.dtype).removeprefix("torch."), s.bytes) for s in log.sent]


GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
TOKENS = M // 2  # of a rank


def row_scales(name: str, features: int) -> list[tuple[str, str, int]]:
    """What travels besides the codes of a shard's rowwise side."""
    return {
        "rowwise": [(GATHER, "float32", 4 * TOKENS)],
        "blockwise-fp32": [(GATHER, "float32", 4 * TOKENS * (features // 128))],
        "mxfp8": [(GATHER, "uint8", TOKENS * (features // 32))],
        "nvfp4": [(GATHER, "uint8", TOKENS * (features // 16))],
    }.get(name, [])


def column_scales(name: str, features: int) -> list[tuple[str, str, int]]:
    """The same for the columnwise side; per-row scales were shared before the cast."""
    return {
        "blockwise-fp32": [(GATHER, "float32", 4 * (TOKENS // 128) * features)],
        "mxfp8": [(GATHER, "uint8", (TOKENS // 32) * features)],
        "nvfp4": [(GATHER, "uint8", (TOKENS // 16) * features)],
    }.get(name, [])


def shared_amax(name: str, features: int) -> list[tuple[str, str, int]]:
    """The small reduction before a cast; NVFP4's amaxes of both directions are reduced together."""
    sizes = {"tensorwise": 4, "rowwise": 4 * features, "nvfp4": 8}
    return [(REDUCE, "float32", sizes[name])] if name in sizes else []


def codes(name: str, features: int) -> list[tuple[str, str, int]]:
    """One byte a value: half of what BF16 sends; half a byte in FP4."""
    return [(GATHER, "uint8", TOKENS * features // (2 if name == "nvfp4" else 1))]


NAMES = ("tensorwise", "rowwise", "blockwise-fp32", "mxfp8", "nvfp4")


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_column_parallel_with_sequence_parallelism(ranks: RankPool, name: str):
    for forward, backward, _ in ranks(2).run(traffic, "column+SP", name, M, (1, 1)):
        assert forward == shared_amax(name, 256) + codes(name, 256) + row_scales(name, 256)
        assert backward == codes(name, 256) + column_scales(name, 256) + [(SCATTER, "bfloat16", 2 * M * 256)]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_row_parallel_with_sequence_parallelism(ranks: RankPool, name: str):
    for forward, backward, _ in ranks(2).run(traffic, "row+SP", name, M, (1, 1)):
        assert forward == [(SCATTER, "bfloat16", 2 * M * 384)]
        expected = shared_amax(name, 384) + codes(name, 384) + row_scales(name, 384)
        if name != "tensorwise":
            expected += codes(name, 384) + column_scales(name, 384)
        assert backward == expected


def test_bytes_of_misaligned_shards_and_without_sequence_parallelism(ranks: RankPool):
    for forward, backward, _ in ranks(2).run(traffic, "column+SP", "mxfp8", 28, (1, 1)):
        assert forward == [(GATHER, "bfloat16", 2 * 14 * 256)]
        assert backward == [(GATHER, "bfloat16", 2 * 14 * 256), (SCATTER, "bfloat16", 2 * 28 * 256)]
    for forward, backward, _ in ranks(2).run(traffic, "row+SP", "mxfp8", 28, (1, 1)):
        assert forward == [(SCATTER, "bfloat16", 2 * 28 * 384)] and backward == [
            (GATHER, "bfloat16", 2 * 14 * 384)
        ]
    for forward, backward, _ in ranks(2).run(traffic, "column", "tensorwise", M, (1, 1)):
        assert forward == [] and backward == [(REDUCE, "bfloat16", 2 * M * 256)]


ONLY: list[tuple[str, str, tuple[int, int], list[str]]] = [
    ("column", "mxfp8", (1, 0), ["dgrad", f"issue {REDUCE}", f"wait {REDUCE}"]),
    ("column", "mxfp8", (0, 1), ["wgrad"]),
    ("column+SP", "tensorwise", (1, 0), ["dgrad", f"issue {SCATTER}", f"wait {SCATTER}"]),
    ("column+SP", "tensorwise", (0, 1), [f"issue {GATHER}", f"wait {GATHER}", "wgrad"]),
    ("row+SP", "mxfp8", (1, 0), [f"do {GATHER}"] * 2 + ["dgrad"]),
    ("row+SP", "mxfp8", (0, 1), [f"issue {GATHER}"] * 2 + [f"wait {GATHER}"] * 2 + ["wgrad"]),
]


@pytest.mark.parametrize("layout, name, needs, expected", ONLY)
def test_only_what_is_needed_is_sent(
    ranks: RankPool, layout: str, name: str, needs: Any, expected: list[str]
):
    for _, _, events in ranks(2).run(traffic, layout, name, M, needs):
        assert events == expected


def test_order_column(ranks: RankPool):
    for _, _, events in ranks(2).run(traffic, "column", "tensorwise", M, (1, 1)):
        assert events == ["dgrad", f"issue {REDUCE}", "wgrad", f"wait {REDUCE}"]


@pytest.mark.parametrize("name", ["tensorwise", "mxfp8"])
def test_order_column_with_sequence_parallelism(ranks: RankPool, name: str):
    """x travels while dgrad runs, dx while wgrad does."""
    gathers = 2 if name == "mxfp8" else 1
    for _, _, events in ranks(2).run(traffic, "column+SP", name, M, (1, 1)):
        before, after = [f"issue {GATHER}"] * gathers, [f"wait {GATHER}"] * gathers
        assert events == [*before, "dgrad", *after, f"issue {SCATTER}", "wgrad", f"wait {SCATTER}"]


def test_order_row_with_sequence_parallelism(ranks: RankPool):
    """dgrad needs the rowwise codes; the columnwise ones travel while it runs. One set serves both where it can."""
    for _, _, events in ranks(2).run(traffic, "row+SP", "mxfp8", M, (1, 1)):
        first, issued, waited = ([f"{what} {GATHER}"] * 2 for what in ("do", "issue", "wait"))
        assert events == [*first, *issued, "dgrad", *waited, "wgrad"]
    for _, _, events in ranks(2).run(traffic, "row+SP", "tensorwise", M, (1, 1)):
        assert events == [f"do {REDUCE}", f"do {GATHER}", "dgrad", "wgrad"]
