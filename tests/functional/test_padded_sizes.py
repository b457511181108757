"""Sizes that a GPU's products do not take as they are: said before training, dense linears and grouped experts alike."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.support.native_gpt import native_on_cpu, sizes_noted

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
    assert "docs/no_speed_up.md" in line
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


def converted(widths: tuple[int, ...]) -> tuple[str, dict[str, str]]:
    """A rank case: what convert_to_fp8 says of linears between these widths, and the reasons in its report."""
    import io
    from contextlib import redirect_stderr, redirect_stdout

    import torch

    from megatron_fp8 import Fp8Config, convert_to_fp8
    from megatron_fp8.files import terminal

    terminal._printed.clear()
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(widths)]
    with native_on_cpu(), redirect_stderr(io.StringIO()) as said, redirect_stdout(io.StringIO()):
        config = Fp8Config("rowwise", backend="native", skip=())
        model = convert_to_fp8(torch.nn.Sequential(*layers), config=config)
    return said.getvalue(), {row.name: row.reason for row in model.fp8_report.rows}


def test_a_converted_model_says_the_same(ranks):
    ((said, reasons),) = ranks(1).run(converted, (64, 64, 36, 64))
    note = "K 64 x N 36 is not what the GPU's product takes: fprop, dgrad copy codes, to pad them"
    assert said.startswith(
        f"megatron_fp8: 2 of this rank's 3 GEMM sites have sizes that are padded (1: {note})"
    ), said
    assert [name for name, reason in reasons.items() if "pad them" in reason] == ["1", "2"]
    assert note in reasons["1"]
    ((said, reasons),) = ranks(1).run(converted, (64, 64, 48, 64))
    assert "padded" not in said and not any("pad them" in reason for reason in reasons.values())
