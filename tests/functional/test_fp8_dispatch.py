"""A layer of experts with tokens in FP8 (moe_fp8_dispatch): bytes on the wire, casts, and that ranks agree to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from benchmarks.support.ranks import Layout, RankPool
from tests.support.fp8_dispatch import HIDDEN, SEQUENCE, layer_case

BY_TOKEN = ("rowwise", "blockwise", "mxfp8")


@pytest.mark.parametrize("recipe", BY_TOKEN)
def test_two_expert_parallel_ranks_are_one_to_the_bit(ranks: RankPool, recipe: str) -> None:
    """Codes are a token's own, and so are those of its gradient: no layout changes a bit of them, nor of derived codes,
    since both ranks' tokens reach an expert in the sequence's order."""
    (whole,) = ranks(1).run(layer_case, Layout(), recipe, {})
    for dispatcher in ("alltoall", "allgather"):
        parts = ranks(2).run(layer_case, Layout(ep=2), recipe, {"moe_token_dispatcher_type": dispatcher})
        for what in ("y", "dx"):
            assert_same_bytes(torch.cat([part[what] for part in parts]), whole[what], f"{dispatcher} {what}")
        found = {name: grad for part in parts for name, grad in part["dw"].items()}
        assert found.keys() == whole["dw"].keys()
        for name, grad in whole["dw"].items():
            assert_same_bytes(found[name], grad, f"{dispatcher} {name}")


def _all_to_alls(sent: list[tuple[str, Any, int]], dtype: Any) -> list[int]:
    """Bytes of the all-to-alls of whole tokens in this dtype that a rank sent, in order; not of the router's weights."""
    return [
        size for name, kind, size in sent if (name, kind) == ("all_to_all_single", dtype) and size >= HIDDEN
    ]


@pytest.mark.parametrize("recipe", BY_TOKEN)
def test_bytes_on_the_wire(ranks: RankPool, recipe: str) -> None:
    """Tokens, and the gradient of their sum: at most 0.52 of BF16's; the way back stays BF16, forward and backward."""
    rows = SEQUENCE // 2 * 2  # of each rank, whose tokens go to two experts each
    scales = {"rowwise": 4, "blockwise": 4 * HIDDEN // 128, "mxfp8": HIDDEN // 32}[recipe]
    assert (HIDDEN + scales) / (2 * HIDDEN) <= 0.52
    fp8, bf16 = (
        ranks(2).run(layer_case, Layout(ep=2), recipe, {"moe_fp8_dispatch": on}) for on in (True, False)
    )
    for codes, plain in zip(fp8, bf16, strict=True):
        tokens, outputs, gradient, gradient_of_tokens = _all_to_alls(plain["sent"], torch.bfloat16)
        assert tokens == gradient == 2 * rows * HIDDEN and outputs == gradient_of_tokens
        assert _all_to_alls(codes["sent"], torch.uint8) == [rows * (HIDDEN + scales)] * 2
        assert _all_to_alls(codes["sent"], torch.bfloat16) == [outputs, gradient_of_tokens]
        assert not _all_to_alls(plain["sent"], torch.uint8)


def test_bytes_of_the_all_gather_dispatcher(ranks: RankPool) -> None:
    """What it gathers, of each rank's tokens, and of the gradient of their sum."""
    fields = {"moe_token_dispatcher_type": "allgather"}
    found = {}
    for on in (True, False):
        first, _ = ranks(2).run(layer_case, Layout(ep=2), "blockwise", {**fields, "moe_fp8_dispatch": on})
        gathers = [(kind, size) for name, kind, size in first["sent"] if name == "all_gather_into_tensor"]
        found[on] = [(kind, size) for kind, size in gathers if size >= HIDDEN * SEQUENCE // 2]
        sums = [size for name, _, size in first["sent"] if name == "reduce_scatter_tensor"]
        assert sums.count(2 * SEQUENCE * HIDDEN) == 2  # combine, and the gradient of the tokens
    own = SEQUENCE // 2
    assert found == {
        True: [(torch.uint8, own * (HIDDEN + 8))] * 2,
        False: [(torch.bfloat16, own * 2 * HIDDEN)] * 2,
    }


def _rows_cast(casts: list[tuple[str, int, str]], role: str, linear: str) -> dict[str, int]:
    """Direction -> how many tokens were cast for this operand: by the experts' linears, or before they were sent."""
    found: dict[str, int] = {}
    for slot, rows, direction in casts:
        if slot in (f"{linear}.{role}", f"Dispatch.{role}"):
            for one in ("rowwise", "columnwise") if direction == "both" else (direction,):
                found[one] = found.get(one, 0) + rows
    return found


@pytest.mark.parametrize("recipe", BY_TOKEN)
def test_casts_of_a_layer_before_and_after(ranks: RankPool, recipe: str) -> None:
    """A token is cast rowwise once, not once for each of its experts; columnwise codes are each expert's own as ever."""
    routed = 2 * SEQUENCE
    plain, codes = (
        ranks(1).run(layer_case, Layout(), recipe, {"moe_fp8_dispatch": on})[0] for on in (False, True)
    )
    operands = (("input", "Fp8ColumnParallelLinear"), ("grad_output", "Fp8RowParallelLinear"))
    for role, linear in operands:
        assert _rows_cast(plain["casts"], role, linear) == {"rowwise": routed, "columnwise": routed}
        assert _rows_cast(codes["casts"], role, linear) == {"rowwise": SEQUENCE, "columnwise": routed}
    # Calls: of four experts each of two weights and four operands; two more, of one pass over a token each.
    assert (plain["counted"], codes["counted"]) == (24, 26)
    assert len([cast for cast in codes["casts"] if cast[0].startswith("Dispatch.")]) == 2
    kind = {"rowwise": "row pow2", "blockwise": "1x128 pow2", "mxfp8": "1x32 e8m0"}[recipe]
    assert codes["notes"] == [f"moe_fp8_dispatch: tokens arrive as e4m3 {kind} codes"]
