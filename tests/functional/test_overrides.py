"""Overrides by name in real training: whole linears, GEMMs and operands; what matches nothing is an error."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.support.fp8_gpt import OPTIONS, SITES, Watched, fp8_config, training, watched_gemms
from benchmarks.support.gpt import build_chunks, train
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.mcore.checkpoint.state_dict import sharded_slots, take_slots
from megatron_fp8.mcore.iteration import iteration_counts
from megatron_fp8.mcore.report import site_report
from megatron_fp8.mcore.sites import check_plan, fp8_linears
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

ONE, TP, TP_SP, PP = Layout(), Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2)
TINY = {"hidden_size": 64, "ffn_hidden_size": 128}
SHORT = {"sequence": 32, "micro_batch": 1, "global_batch": 2, "vocab": 128}


PARTS = {
    "*:wgrad": "bf16",
    "linear_fc1:wgrad": "fp8",
    "linear_fc1:dgrad": "e4m3",
    "*.layers.0.*.linear_qkv": "bf16",
    "*.layers.1.*.linear_proj:dgrad": "tensorwise",
    "linear_fc2:input": "bf16",
}


def parted() -> tuple[Watched, list[str], list[bool]]:
    """(what was seen, names of the histories in a checkpoint, whether they came back)."""
    seen = Watched()
    with model_parallel(), watched_gemms(seen):
        config = fp8_config(ONE, "delayed", fp8_overrides=PARTS)
        run = train(config, spec=get_gpt_layer_fp8_spec, **OPTIONS)
        seen.report, seen.losses, seen.counts = site_report(run.chunks), run.losses, [iteration_counts()]
        fc1 = next(m for m in fp8_linears(run.chunks) if m.fp8_site.plan.name.endswith("0.mlp.linear_fc1"))
        saved = {key: part.data for key, part in sharded_slots(fc1, "fc1.").items()}
        slots = [quantizer.slot for quantizer in fc1.fp8_site.quantizers.values()]
        before = [slot.scale.item() for slot in slots]
        fc1.fp8_site.state.arenas[0].scale.fill_(1.0)
        take_slots(fc1, dict(saved), "fc1.")
        return (
            seen,
            sorted(saved),
            [slot.scale.item() == scale for slot, scale in zip(slots, before, strict=True)],
        )


def test_overrides_of_gemms_and_roles(ranks: RankPool) -> None:
    seen, saved, back = ranks(1).run(parted)[0]
    entries = {
        entry["name"].removeprefix("decoder."): entry for entry in seen.report if entry["layer"] is not None
    }
    common = {"fprop": "fp8", "dgrad": "fp8", "wgrad": "bf16"}
    kinds = {"linear_fc1": {**common, "wgrad": "fp8"}, "linear_fc2": {**common, "fprop": "bf16"}}
    for name, entry in entries.items():
        wanted = kinds.get(name.rpartition(".")[2], common)
        wanted = dict.fromkeys(wanted, "bf16") if name == "layers.0.self_attention.linear_qkv" else wanted
        assert entry["gemms"] == wanted, name
        ran = {gemm: kind for site, gemm, kind in seen.gemms if site == f"decoder.{name}"}
        assert ran == (wanted if entry["precision"] == "fp8" else {}), name
    fc1 = entries["layers.0.mlp.linear_fc1"]
    assert (
        fc1["roles"]["grad_output"] == "e4m3 tensor delayed fp32 in dgrad, e5m2 tensor delayed fp32 in wgrad"
    )
    assert "fp8_overrides '*:wgrad': bf16; fp8_overrides 'linear_fc1:wgrad': fp8" in fc1["reason"]
    assert entries["layers.1.self_attention.linear_proj"]["roles"] == {
        "input": "e4m3 tensor delayed fp32",
        "weight": "e4m3 tensor delayed fp32 in fprop, e4m3 tensor fp32 in dgrad",
        "grad_output": "e5m2 tensor fp32",
    }
    # Two microbatches; seven sites in FP8: all dgrads, the fprops of five, the wgrads of two.
    assert seen.counts[0]["fp8_gemms"] == 2 * (7 + 5 + 2)
    # Weights once an iteration, one of them in two kinds; grad_output, of fc1 in two formats; input but for fc2's.
    assert seen.counts[0]["casts"] == 7 + 1 + 2 * (7 + 2 + 5)
    assert seen.losses and all(back)
    assert saved == [
        f"fc1.fp8_state.{role}.{part}"
        for role in ("grad_output", "grad_output.wgrad", "input", "weight")
        for part in ("amax_history", "scale", "warm")
    ]


MIXED = {
    "mxfp8 backward": ("nvfp4", {"*:dgrad": "mxfp8", "*:wgrad": "mxfp8"}),
    "nvfp4 forward": ("mxfp8", {"*:fprop": "nvfp4"}),
}


@pytest.mark.parametrize("name", MIXED)
def test_fp4_and_fp8_in_one_model(ranks: RankPool, name: str) -> None:
    """Forward in NVFP4, backward in MXFP8, written either way: E4M3 gradients in an FP4 model, hybrid's in an FP8 one."""
    recipe, overrides = MIXED[name]
    for layout in (ONE, TP_SP):
        seen = training(
            ranks, layout.tp, layout, recipe, {**TINY, "fp8_overrides": overrides}, SHORT, steps=2
        )[-1]
        gradient = "e4m3" if recipe == "nvfp4" else "e5m2"
        for entry in seen.report:
            if entry["layer"] is not None:
                assert entry["roles"] == {
                    "input": "e2m1 1x16 e4m3 in fprop, e4m3 1x32 e8m0 in wgrad",
                    "weight": "e2m1 16x16 e4m3 in fprop, e4m3 1x32 e8m0 in dgrad",
                    "grad_output": f"{gradient} 1x32 e8m0",
                }
        assert seen.counts[-1]["fp8_gemms"] == 2 * 8 * 3 and seen.losses[1] < seen.losses[0]
        assert seen.layers_in_fp8() == {0: set(SITES), 1: set(SITES)}


def refused_by_a_stage(fields: dict[str, Any]) -> str:
    with model_parallel(PP):
        chunks = build_chunks(fp8_config(PP, "delayed", **fields), spec=get_gpt_layer_fp8_spec)
        try:
            check_plan(chunks)
        except ValueError as error:
            return str(error)
        return ""


def test_what_one_stage_refuses_every_rank_says(ranks: RankPool) -> None:
    for message in ranks(2).run(
        refused_by_a_stage, {"fp8_overrides": {"*.layers.1.*:fprop": "e5m2"}}, timeout=60
    ):
        assert "layers.1.self_attention.linear_" in message and "fprop would multiply E5M2" in message


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed"])
def test_an_override_puts_a_bf16_layer_back(ranks: RankPool, recipe: str) -> None:
    """It wins over first_last_layers_bf16, in the report and in what runs."""
    fields = {
        "num_layers": 3,
        "first_last_layers_bf16": True,
        "fp8_overrides": {"*.layers.0.mlp.*": "blockwise"},
    }
    seen = training(ranks, 1, ONE, recipe, fields)[0]
    assert seen.layers_in_fp8() == {0: {"mlp.linear_fc1", "mlp.linear_fc2"}, 1: set(SITES)}
    assert {e["name"] for e in seen.report if e["precision"] == "fp8"} == {name for name, _, _ in seen.gemms}
