"""fp8_size_filter under Megatron-Core: small GEMMs in BF16, each said; nothing left or a foreign table: an error."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.fp8_gpt import MOE, OPTIONS, SITES, Watched, fp8_config, watched_gemms
from benchmarks.support.gpt import build_chunks, train
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.mcore.gemm_size_filter import expert_tokens, gemm_shapes
from megatron_fp8.mcore.report import site_report
from megatron_fp8.mcore.sites import prepare
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
from megatron_fp8.plan.timing import processor_name
from megatron_fp8.recipe import DelayedScaling
from tests.support.size_table import make_table

ONE, PP = Layout(), Layout(pp=2)
TOKENS = 256  # OPTIONS: micro batch 2, sequence 128
SMALL, FC1 = 1.4, 0.6


def trained(layout: Layout, path: str, fields: dict[str, Any]) -> tuple[Watched, str]:
    seen, said = Watched(), io.StringIO()
    with model_parallel(layout), watched_gemms(seen), contextlib.redirect_stderr(said):
        config = fp8_config(
            layout, "mxfp8", fp8_size_filter=path, **{"fp8_size_filter_tokens": TOKENS, **fields}
        )
        chunks = train(config, spec=get_gpt_layer_fp8_spec, **OPTIONS).chunks
        seen.report = site_report(chunks)
    return seen, said.getvalue()


def test_small_gemms_run_in_bf16_and_say_so(ranks: RankPool, tmp_path: Path) -> None:
    """qkv 256 x 512 was measured as slow; proj and fc2 lie above nothing that pays; fc1 256 x 1024 pays."""
    rows = {(256, 256, TOKENS): SMALL, (256, 512, TOKENS): 1.2, (256, 1024, TOKENS): FC1}
    path = make_table(tmp_path / "table.json", rows)
    overrides = {"*.layers.1.mlp.linear_fc2": "mxfp8", "*.layers.1.mlp.linear_fc1": "bf16"}
    seen, said = ranks(1).run(trained, ONE, path, {"fp8_overrides": overrides})[0]
    entries = {entry["name"]: entry for entry in seen.report if entry["layer"] is not None}
    # fc2 by name: there the filter keeps out.
    fp8 = {"decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"}
    assert {name for name, entry in entries.items() if entry["precision"] == "fp8"} == fp8
    assert {name for name, _, precision in seen.gemms if precision == "fp8"} == fp8
    when = f"on {processor_name()}, 2026-11-21"
    for layer in (0, 1):
        reasons = {site: entries[f"decoder.layers.{layer}.{site}"]["reason"] for site in SITES}
        assert reasons[SITES[0]] == (
            f"fp8_size_filter: K 256 x N 512 at 256 tokens takes 1.20 x BF16's time (spread 0%), measured {when}"
        )
        assert reasons[SITES[1]].endswith(f"takes {SMALL:.2f} x BF16's time (spread 0%), measured {when}")
    fc1 = entries["decoder.layers.0.mlp.linear_fc1"]["reason"]
    assert fc1.startswith("fp8 recipe of the config; ") and f"takes {FC1:.2f} x BF16's time" in fc1
    fc2 = entries["decoder.layers.0.mlp.linear_fc2"]["reason"]
    assert (
        f"K 512 x N 256 at 256 tokens was not measured; the nearest below, K 256 x N 256 at 256 tokens, takes {SMALL:.2f}"
        in fc2
    )
    assert "fp8_size_filter" not in entries["decoder.layers.1.mlp.linear_fc2"]["reason"]
    assert (
        said.count("leaves 5 of this rank's 8 GEMM sites in BF16") == 1 and "layers.0.self_attention" in said
    )


def test_nothing_left_over_all_stages_is_an_error(ranks: RankPool, tmp_path: Path) -> None:
    path = make_table(tmp_path / "table.json", {(256, 256, TOKENS): SMALL, (4096, 4096, TOKENS): FC1})
    with pytest.raises(Exception, match=r"leave none of 8 GEMM sites in FP8 \(fp8_size_filter: K 256 x N"):
        ranks(2).run(trained, PP, path, {})
    # A stage may be left without FP8 as long as another has some.
    overrides = {"*.layers.1.mlp.linear_fc1": "mxfp8"}
    first, second = (seen for seen, _ in ranks(2).run(trained, PP, path, {"fp8_overrides": overrides}))
    assert {p for _, _, p in first.gemms} == {"bf16"} or not first.gemms
    assert {n for n, _, p in second.gemms if p == "fp8"} == {"decoder.layers.1.mlp.linear_fc1"}


def refused(path: str, fields: dict[str, Any]) -> str:
    with model_parallel(), pytest.raises(ValueError) as caught:
        config = fp8_config(ONE, "mxfp8", fp8_size_filter=path, **fields)
        prepare(build_chunks(config, spec=get_gpt_layer_fp8_spec))
    return str(caught.value)


def test_foreign_tables_and_settings_that_do_not_fit_are_errors(ranks: RankPool, tmp_path: Path) -> None:
    rows = {(256, 256, TOKENS): FC1}
    good = make_table(tmp_path / "good.json", rows)
    other = make_table(tmp_path / "other.json", rows, recipe=DelayedScaling())
    cases = (
        (other, {}, "recipe 'delayed', and this is 'mxfp8'"),
        (
            good,
            {"fp8_size_filter_tokens": 0},
            "fp8_size_filter_tokens=0 must be a whole number of at least 1",
        ),
        (good, {"fp8_wgrad": False}, "fp8_wgrad=False: its times are of three GEMMs"),
        ("", {}, "fp8_size_filter='' must be the path"),
    )
    for path, fields, words in cases:
        assert words in (said := ranks(1).run(refused, path, fields)[0]), said


def shapes(fields: dict[str, Any], layout: Layout) -> tuple[dict[str, tuple[int, int]], Any]:
    """Of each linear of a model, [K, N] by name; and what the config's shapes are said to be."""
    with model_parallel(layout):
        config = fp8_config(layout, "mxfp8", num_layers=1, **fields)
        (chunk,) = build_chunks(config, spec=get_gpt_layer_fp8_spec)
        found = {
            ("experts." if "experts" in name else "") + name.rpartition(".")[2]: (
                module.weight.shape[1],
                module.weight.shape[0],
            )
            for name, module in chunk.named_modules()
            if hasattr(module, "bind_fp8_site")
        }
        return found, gemm_shapes(config, 128)


@pytest.mark.parametrize(
    "fields, world", [({}, 2), ({"llama": False}, 1), (MOE, 1)], ids=["llama", "gpt", "moe"]
)
def test_the_shapes_of_a_config_are_the_models(ranks: RankPool, fields: dict[str, Any], world: int) -> None:
    """What `bench --tune --config` measures is what the model multiplies."""
    found, derived = ranks(world).run(shapes, fields, Layout(tp=world))[0]
    assert {name: (gemm.k, gemm.n) for name, gemm in derived.items()} == found
    tokens = {name: gemm.tokens for name, gemm in derived.items()}
    assert tokens["linear_qkv"] == 128 and tokens.get("experts.linear_fc1", 64) == 64  # top 2 of 4


def test_an_experts_share_of_the_tokens() -> None:
    from types import SimpleNamespace

    config = SimpleNamespace(
        expert_model_parallel_size=1, expert_tensor_parallel_size=None, moe_router_topk=2,
        tensor_model_parallel_size=1, num_moe_experts=8,
    )  # fmt: skip
    assert expert_tokens(config, 1024) == 256
    config.expert_model_parallel_size = 4  # the tokens of four ranks meet at an expert
    assert expert_tokens(config, 1024) == 1024
    config.tensor_model_parallel_size = 4  # of which each had a quarter of the sequence
    assert expert_tokens(config, 1024) == 256
    config.num_moe_experts = 10**6
    assert expert_tokens(config, 1024) == 1
