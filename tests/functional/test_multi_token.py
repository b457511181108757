"""Multi-token prediction in FP8: its linears are sites by name, on the last stage, dense, and with latent attention and
grouped experts; the output layer that it shares may be one too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.fp8_gpt import MOE, NARROW, training
from benchmarks.support.gpt import build_chunks, build_optimizer, gpt_config, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from tests.support.resume import Training

ONE, PP = Layout(), Layout(pp=2)
MTP = {"mtp_num_layers": 1, "fp8_output_layer": True}
SHARDED = {"use_distributed_optimizer": True}
SHORT: dict[str, Any] = {"sequence": 32, "micro_batch": 1, "global_batch": 2}
LATENT = {
    "q_lora_rank": 64, "kv_lora_rank": 96, "qk_head_dim": 32, "qk_pos_emb_head_dim": 32, "v_head_dim": 64,
    "num_query_groups": None, "qk_layernorm": True, "rope_type": "rope",
}  # fmt: skip
LAYER = "mtp.layers.0.transformer_layer."


def test_its_linears_are_sites_of_the_last_stage(ranks: RankPool) -> None:
    """Each multiplies once a microbatch and GEMM, the shared output layer once for each token that is predicted."""
    fields = {**NARROW, **MTP}
    first, last = training(ranks, 2, PP, "blockwise", fields, steps=2)
    counted = {name: n for (name, gemm, runs), n in last.gemms.items() if (gemm, runs) == ("fprop", "fp8")}
    sites = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    mtp = {"mtp.layers.0.eh_proj": 2} | {f"{LAYER}{site}": 2 for site in sites}
    assert counted == {f"decoder.layers.1.{site}": 2 for site in sites} | mtp | {"output_layer": 4}
    assert not any(name.startswith(("mtp", "output_layer")) for name, _, _ in first.gemms)
    assert (last.counts[-1]["fp8_gemms"], last.counts[-1]["hp_gemms"]) == (3 * (4 * 2 + 5 * 2 + 4), 0)
    assert {entry["name"] for entry in last.report} >= set(mtp)
    one = training(ranks, 1, ONE, "blockwise", fields, steps=2)[0]
    assert last.losses[0] == pytest.approx(one.losses[0], rel=1e-6)
    # The step before took gradients of shared weights, which two stages add in another order: a hundredth of its gain.
    assert last.losses[1] == pytest.approx(one.losses[1], rel=1e-4)
    assert last.losses[1] < 0.995 * last.losses[0]


def deepseek(fields: dict[str, Any]) -> dict[str, Any]:
    """A rank case: latent attention, grouped experts and multi-token prediction on two stages: two steps."""
    from megatron_fp8.mcore.config.transformer_config import MLATransformerConfig
    from megatron_fp8.mcore.report import site_report
    from megatron_fp8.mcore.spec import get_gpt_decoder_block_fp8_spec
    from megatron_fp8.telemetry import Telemetry

    with model_parallel(PP):
        fp8 = {"fp8": "hybrid", "fp8_format": "blockwise", "moe_grouped_gemm": True}
        merged = {**NARROW, **LATENT, **MOE, **MTP, **fp8, **fields}
        config = gpt_config(PP, cls=MLATransformerConfig, **merged)
        chunks = build_chunks(config, spec=get_gpt_decoder_block_fp8_spec)
        optimizer = build_optimizer(config, chunks)
        with Telemetry(chunks) as telemetry:
            losses = [train_step(config, chunks, optimizer, step)[0] for step in range(2)]
        return {
            "losses": losses,
            "runs": {s["name"]: s["precision"] for s in site_report(chunks) if s["name"].startswith("mtp")},
            "measured": {r["site"] for r in telemetry.records if r["site"].startswith("mtp")},
        }


def test_with_latent_attention_and_grouped_experts(ranks: RankPool) -> None:
    overrides = {"mtp.*.eh_proj": "bf16", "mtp.*.linear_kv_up_proj": "mxfp8"}
    found = ranks(2).run(deepseek, {"fp8_overrides": overrides})[0]
    downs = ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj")
    wanted = {f"{LAYER}self_attention.linear_{part}" for part in downs}
    wanted |= {f"{LAYER}mlp.experts.local_experts.{i}.linear_fc{j}" for i in range(4) for j in (1, 2)}
    assert {name for name, runs in found["runs"].items() if runs == "fp8"} == wanted
    assert found["runs"]["mtp.layers.0.eh_proj"] == "bf16"
    assert wanted <= found["measured"]
    assert found["losses"][1] < found["losses"][0]


def test_recomputed_it_is_trained_as_it_is_otherwise(ranks: RankPool) -> None:
    """Its tensors come to the checkpoint by keyword: without them its weights would get no gradient, and say nothing."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    found = [training(ranks, 1, ONE, "blockwise", {**NARROW, **MTP, **more})[0] for more in ({}, full)]
    assert found[0].digests == found[1].digests and found[0].norms == found[1].norms


def tied_over_stages(folder: str) -> tuple[list[Any], list[Any], list[str]]:
    """A rank case: what iterations after a save are, what they are after loading it, and this stage's own tables."""
    with model_parallel(PP):
        options = {**SHORT, "tied": True}
        fields = {**NARROW, **MTP}
        training = Training(PP, "tensorwise", fields, SHARDED, seed=7, **options)
        training.steps(2)
        saved = training.save(folder)
        then = training.steps(2)
    with model_parallel(PP, seed=99):
        again = Training(PP, "tensorwise", fields, SHARDED, seed=8, **options)
        assert again.load(saved) == []
        tables = [name for name, _ in again.chunks[0].named_parameters() if "decoder" not in name]
        return then, again.steps(2), tables


def test_tied_over_stages_it_is_saved_and_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    """The last stage has the embedding's table, which its output layer is given: that has none of its own."""
    for then, again, tables in ranks(2).run(tied_over_stages, str(tmp_path)):
        assert then == again
        assert any("embedding.word_embeddings.weight" in name for name in tables)
        assert not any("output_layer" in name for name in tables)
