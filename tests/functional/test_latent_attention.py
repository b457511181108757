"""Multi-latent attention: every layout trains the model of one rank, in FP8 too; recomputed, decoded, refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.compare import assert_same_bytes
from benchmarks.support.fp8_gpt import RECIPES
from benchmarks.support.gpt import build_chunks, gpt_config, train
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.mcore.config.transformer_config import MLATransformerConfig
from megatron_fp8.mcore.generation import Decoder
from megatron_fp8.mcore.report import site_report
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
from tests.support.decoding import exact_attention, forward, unwrap
from tests.support.long_cases import some

LATENT = {
    "q_lora_rank": 64, "kv_lora_rank": 96, "qk_head_dim": 32, "qk_pos_emb_head_dim": 32, "v_head_dim": 64,
    "num_query_groups": None, "qk_layernorm": True, "rotary_scaling_factor": 4.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32, "hidden_size": 128, "ffn_hidden_size": 256,
}  # fmt: skip
FP32 = {"bf16": False, "params_dtype": torch.float32}
SITES = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")


def make(layout: Layout, fields: dict[str, Any]) -> Any:
    if not fields.get("bf16", True) and layout.pp > 1:
        fields = {**fields, "pipeline_dtype": torch.float32}
    return gpt_config(layout, cls=MLATransformerConfig, **{**LATENT, **fields})


def trained(layout: Layout, fields: dict[str, Any]) -> dict[str, Any]:
    """A rank case: losses and gradient norms of two steps, the gradient norm of the last
    layer's norm of queries' latents, and which of attention's linears ran in FP8."""
    with model_parallel(layout):
        config = make(layout, fields)
        replicas = dist.get_world_size() // layout.model_ranks
        run = train(config, spec=get_gpt_layer_fp8_spec, steps=2, micro_batch=4 // replicas, global_batch=4)
        report = site_report(run.chunks) if config.fp8 else []
        fp8 = {site["name"].rpartition(".")[2] for site in report if site["precision"] == "fp8"}
        queries = [
            parameter.main_grad.norm().item()
            for name, parameter in run.chunks[-1].named_parameters()
            if "q_layernorm" in name
        ]
        return {"losses": run.losses, "norms": run.grad_norms, "queries": queries[-1:], "fp8": fp8}


@pytest.fixture(scope="module")
def one(ranks: RankPool) -> dict[str, Any]:
    return ranks(1).run(trained, Layout(), FP32)[0]


LAYOUTS = {
    "tp2": Layout(tp=2), "tp2-sp": Layout(tp=2, sp=True), "pp2": Layout(pp=2), "cp2": Layout(cp=2), "dp2": Layout(),
}  # fmt: skip


@pytest.mark.parametrize("name", some(LAYOUTS, "tp2-sp", "pp2", "cp2"))
def test_layout_trains_as_one_rank_does(ranks: RankPool, one: Any, name: str) -> None:
    """In float32, where only the order of sums is left: a gradient that lacks another rank's part shows in the norm."""
    found = ranks(2).run(trained, LAYOUTS[name], FP32)[-1]
    assert found["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert found["norms"][0] == pytest.approx(one["norms"][0], rel=1e-5)
    assert found["queries"] == pytest.approx(one["queries"], rel=1e-3)  # too small to show in the norm of all
    assert found["losses"][1] < found["losses"][0]


@pytest.mark.parametrize("recipe", some(RECIPES, "delayed", "rowwise"))
def test_recipe(ranks: RankPool, one: Any, recipe: str) -> None:
    found = ranks(2).run(trained, Layout(tp=2, sp=True), {"fp8": "hybrid", "fp8_recipe": recipe})[-1]
    assert found["losses"] == pytest.approx(one["losses"], rel=5e-3) and found["losses"] != one["losses"]
    assert set(SITES) < found["fp8"]


def test_queries_without_a_latent(ranks: RankPool) -> None:
    fields = {"q_lora_rank": None, "rope_type": "rope", "fp8": "hybrid", "fp8_recipe": "mxfp8"}
    found = ranks(1).run(trained, Layout(), fields)[0]
    assert "linear_q_proj" in found["fp8"] and "linear_q_down_proj" not in found["fp8"]
    assert found["losses"][1] < found["losses"][0]


def test_recompute_changes_no_bit(ranks: RankPool) -> None:
    pool, layout = ranks(2), Layout(tp=2, sp=True)
    fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    want = pool.run(trained, layout, fp8)
    for modules in (["core_attn"], ["mla_up_proj", "layernorm", "mlp"]):
        fields = {**fp8, "recompute_granularity": "selective", "recompute_modules": modules}
        assert pool.run(trained, layout, fields) == want, modules


# --------------------------------------------------------------------------------------------------------------- decoding


def decoded(layout: Layout, recipe: str | None, fields: dict[str, Any]) -> dict[str, Any]:
    """A rank case: logits of all tokens at once, and of the same tokens in parts, with a cache, and the cache's bytes;
    'exact' with attention that does not depend on the order of its sums."""
    with model_parallel(layout):
        fp8 = {"fp8": "hybrid", "fp8_recipe": recipe} if recipe else {}
        model = build_chunks(make(layout, {**fp8, **fields}), spec=get_gpt_layer_fp8_spec)[0].module.eval()
        tokens = torch.randint(512, (2, 24), generator=torch.Generator().manual_seed(3))
        found: dict[str, Any] = {}
        with torch.no_grad():
            for name, patch in (("", None), ("exact ", exact_attention)):
                with (
                    mock.patch("megatron_fp8.mcore.layers.attention._sdpa", patch) if patch else nullcontext()
                ):
                    with without_heads_ahead(model):
                        found[f"{name}whole"] = forward(model, tokens).float()
                    if recipe and not patch:
                        prepare_for_inference(model)
                    decoder = Decoder(model, 2, 32, every_token=True)
                    parts = torch.cat([decoder(part) for part in tokens.split([16, 1, 1, 4, 2], 1)], 1)
                    found[f"{name}parts"] = parts.float()
        found["bytes"] = decoder.cache_bytes
        found["predicts ahead"] = (unwrap(model).mtp_process, unwrap(model).config.mtp_num_layers)
        return found


@contextmanager
def without_heads_ahead(model: Any) -> Iterator[None]:
    """Megatron-Core's forward without labels cannot run layers of multi-token prediction."""
    inner = unwrap(model)
    with (
        mock.patch.object(inner, "mtp_process", False),
        mock.patch.object(inner.config, "mtp_num_layers", None),
    ):
        yield


DECODED = {
    "bf16": (Layout(), None, {}),
    "rope, one step of queries": (Layout(), "mxfp8", {"q_lora_rank": None, "rope_type": "rope"}),
    "tp2": (Layout(tp=2), "blockwise", {}),
    "predicting two tokens": (Layout(), "rowwise", {"mtp_num_layers": 1}),
}


@pytest.mark.parametrize("name", some(DECODED, *(name for name in DECODED if name != "bf16")))
def test_decoding_gives_the_logits_of_the_whole(ranks: RankPool, name: str) -> None:
    """Byte for byte where attention's order of sums is hidden."""
    layout, recipe, fields = DECODED[name]
    for found in ranks(layout.tp).run(decoded, layout, recipe, fields):
        whole, parts = found["whole"], found["parts"]
        assert (parts - whole).pow(2).mean().sqrt() < 0.01 * whole.pow(2).mean().sqrt()
        same = (parts.argmax(-1) == whole.argmax(-1)).float().mean()
        assert same >= 0.95, "but for tokens whose logits are as good as equal in BF16"
        assert_same_bytes(found["exact parts"], found["exact whole"])
        # Two layers, room for 2 x 32 tokens, BF16: keys and values of this rank's heads.
        of_head = LATENT["qk_head_dim"] + LATENT["qk_pos_emb_head_dim"] + LATENT["v_head_dim"]
        assert found["bytes"] == 2 * (2 * 32) * (4 // layout.tp) * of_head * 2
        ahead = fields.get("mtp_num_layers")
        assert found["predicts ahead"] == (ahead is not None, ahead), "the model is as it was"


def test_one_dynamic_scale_costs_less_than_fp8_does(ranks: RankPool) -> None:
    """Tensorwise, a token's codes depend on its company."""
    pool = ranks(1)
    fp8, bf16 = (pool.run(decoded, Layout(), recipe, {})[0] for recipe in ("tensorwise", None))
    cost = (fp8["exact whole"] - bf16["exact whole"]).pow(2).mean().sqrt()
    assert 0 < (fp8["exact parts"] - fp8["exact whole"]).pow(2).mean().sqrt() < cost
