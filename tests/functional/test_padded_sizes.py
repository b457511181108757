"""Sizes that a GPU's products do not take as they are: said before training, dense linears and grouped experts alike."""

from __future__ import annotations

import pytest

from tests.support.native_gpt import sizes_noted

EXPERTS = {
    "num_moe_experts": 2, "moe_router_topk": 1, "moe_grouped_gemm": True, "moe_router_pre_softmax": True,
    "add_bias_linear": False, "bias_activation_fusion": False, "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_experts_that_do_not_fit_are_said_before_training(ranks, recipe):
    ((said, notes),) = ranks(1).run(sizes_noted, recipe, {**EXPERTS, "moe_ffn_hidden_size": 36})
    (line,) = (line for line in said.splitlines() if "padded" in line)
    first = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1"
    assert line.startswith(
        f"megatron_fp8: 4 of this rank's 6 GEMM sites have sizes that are padded ({first}: K 64 x N 72 "
    )
    assert "docs/shapes.md" in line
    note = "K 36 x N 64 is not what the GPU's product takes: fprop, dgrad, wgrad copy codes, to pad them"
    noted = {name: each for name, each in notes.items() if each}
    assert set(noted) == {name for name in notes if ".experts." in name} and len(noted) == 4
    if recipe == "rowwise":
        assert notes["decoder.layers.0.mlp.experts.local_experts.1.linear_fc2"] == [note]


def test_nothing_is_said_where_all_fits(ranks):
    ((said, notes),) = ranks(1).run(sizes_noted, "rowwise", {**EXPERTS, "moe_ffn_hidden_size": 48})
    assert "padded" not in said and not any(notes.values())
    ((said, notes),) = ranks(1).run(sizes_noted, "rowwise", {"ffn_hidden_size": 36})
    assert "2 of this rank's 4 GEMM sites" in said
