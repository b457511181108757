"""Bytes of FP8 parameters, of their all-gather and of the optimizer's state: counted, and held to their exact values."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest

from benchmarks import param_bytes
from benchmarks.param_bytes import Counts, cases, count_bytes
from benchmarks.support.fp8_gpt import TWO_WAY
from benchmarks.support.ranks import RankPool, Ranks

SMALL = {**param_bytes.MODEL, "hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 512}
VALUES = 1_179_648  # of 8 weights: two layers, GQA with 2 of 4 heads
OTHERS = 66_816  # values of embedding, output layer and norms
# Bytes of scales: one float32 a weight; a 128x128 block; a row and a column; and one byte for 32 values, both ways.
SCALES = {
    "delayed": 8 * 4,
    "tensorwise": 8 * 4,
    "blockwise": VALUES // 128**2 * 4,
    "rowwise": 2 * (2048 + 1280) * 4,
    "mxfp8": VALUES // 32 * 2,
}
ROWWISE_SCALES = {"rowwise": 2 * 2048 * 4, "mxfp8": VALUES // 32}


def count_small(*case: Any) -> Counts:
    """A rank case."""
    with mock.patch.object(param_bytes, "MODEL", SMALL):
        return count_bytes(*case)


@pytest.fixture(scope="module")
def counted(ranks: RankPool) -> dict[tuple[Any, ...], list[Counts]]:
    """What the benchmark counts in each case, on both ranks."""
    found: dict[tuple[Any, ...], list[Counts]] = {}

    class Recorded(Ranks):
        def run(self, case: Any, *args: Any, **kwargs: Any) -> list[Any]:
            found[args] = super().run(count_small, *args, **kwargs)
            return found[args]

    with (
        mock.patch.object(
            param_bytes, "RankPool", return_value=mock.Mock(side_effect=lambda n: Recorded(ranks, n))
        ),
        mock.patch.object(sys, "argv", ["param_bytes"]),
    ):
        assert param_bytes.main() == 0
    return found


@pytest.mark.parametrize("name", cases())
def test_bytes(counted: dict[tuple[Any, ...], list[Counts]], name: str) -> None:
    recipe, fp8_param, _, shared, columnwise = cases()[name]
    for found in counted[cases()[name]]:
        assert found["values"] == VALUES
        codes = 0 if recipe is None else (2 if recipe in TWO_WAY else 1) * VALUES + SCALES[recipe]
        if not columnwise:
            assert recipe is not None
            codes = VALUES + ROWWISE_SCALES[recipe]
        as_fp8 = fp8_param and (shared or recipe not in TWO_WAY)
        assert found["weights"] == codes + (0 if as_fp8 else 2 * VALUES)
        # With the shared buffer Megatron gathers what stays in BF16 through a buffer apart from the parameters.
        others = (4 if shared else 2) * OTHERS
        assert 0 <= found["parameters"] - found["weights"] - others <= 128 * shared
        travels = 1 if as_fp8 and recipe not in TWO_WAY else 2
        assert found["gathered"] == travels * VALUES + 2 * OTHERS
        assert found["optimizer"] == 12 * (VALUES + OTHERS) // 2


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_without_the_distributed_optimizer_no_bf16_is_kept(ranks: RankPool, recipe: str) -> None:
    (found,) = ranks(1).run(count_small, recipe, True, False, False)
    assert found["weights"] == (2 if recipe in TWO_WAY else 1) * VALUES + SCALES[recipe]
    assert found["gathered"] == 0 and found["optimizer"] == 12 * (VALUES + OTHERS)
