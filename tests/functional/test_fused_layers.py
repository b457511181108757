"""Norm and SwiGLU fused with quantisation in Megatron's layer: which kernels are launched, and the same bits as apart."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.fp8_gpt import RECIPES
from tests.native_gpt import HOW, Seen, native_trainings
from tests.ranks import Layout, RankPool

ONE = Layout()
# What casts one operand, for each recipe that has its scale: amaxes first where the scale needs them.
PASSES = {
    "delayed": ("cast_tensor",),
    "tensorwise": ("find_amaxes", "cast_tensor"),
    "rowwise": ("find_amaxes", "cast_rows"),
    "blockwise": ("quantize_tiles",),
    "mxfp8": ("quantize_tiles",),
}
QUANTISING = {"find_amaxes", "cast_tensor", "cast_rows", "quantize_tiles"}
# Of a layer's 4 x (x, w, dy): linear_qkv's and linear_fc1's x, linear_fc2's x, linear_fc1's dy; and all others.
OPERANDS = {"norm": 2, "swiglu": 1, "swiglu_grad": 1, "plain": 8}


def trained(ranks: RankPool, layout: Layout, *cases: tuple[Any, ...]) -> list[list[Seen]]:
    """For each rank, what each case saw."""
    return ranks(layout.model_ranks).run(native_trainings, layout, list(cases), timeout=300)


def named(kernel: str, source: str) -> str:
    return kernel if source == "plain" else f"{kernel} of {source}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_kernel_is_launched_and_nothing_is_written(ranks: RankPool, recipe: str) -> None:
    """The second step of a layer: each operand by its passes, each statistic once, no BF16 in between."""
    (found,) = trained(ranks, ONE, *((recipe, how, {}, {}) for how in HOW))
    fused, written, apart = found
    expected = Counter(
        {named(kernel, source): n for source, n in OPERANDS.items() for kernel in PASSES[recipe]}
    )
    expected["_row_rstd"] = 3  # the final norm too
    if recipe == "delayed":
        expected["_update"] = 2
    assert fused.calls[1] == expected
    # Written first: as many passes, all of them over what four more wrote.
    assert sum(written.calls[1][kernel] for kernel in QUANTISING) == 12 * len(PASSES[recipe])
    assert {k: n for k, n in written.calls[1].items() if "written" in k or k.startswith("write")} == {
        f"write_values of {source}": n for source, n in OPERANDS.items() if source != "plain"
    }
    assert not [k for k in apart.calls[1] if " of " in k]
    assert fused.digests == written.digests and fused.losses == written.losses
    assert fused.digests[0] != fused.digests[1]
    assert fused.counts == written.counts == apart.counts
    assert fused.counts[1]["fp8_gemms"] == 12
    # Producers that do not know run Megatron's SwiGLU, which rounds silu to BF16 too.
    for a, b in zip(fused.losses, apart.losses, strict=True):
        assert abs(a - b) < 2e-3 * b
