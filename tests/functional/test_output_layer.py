"""fp8_output_layer: the output projection as an FP8 site, tied and untied, in every layout; off, nothing is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.support.fp8_gpt import FP32, NARROW, RECIPES, Watched, fp8_config, training
from benchmarks.support.gpt import VOCAB, build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.inference.calibration import calibrate
from megatron_fp8.mcore.checkpoint.state_dict import warm_from_weights
from megatron_fp8.mcore.generation import Decoder
from megatron_fp8.mcore.layers.linear import Fp8ColumnParallelLinear
from megatron_fp8.mcore.report import site_report
from megatron_fp8.mcore.sites import fp8_linears
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
from megatron_fp8.params.fp8_parameter import Fp8Parameter
from megatron_fp8.telemetry import Telemetry
from tests.support.long_cases import some

ONE, TP, TP_SP, PP = Layout(), Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2)
ON = {**NARROW, "fp8_output_layer": True}
TIED = {"tied": True}
LAYERS = 2 * 4 * 3 * 2  # two layers' four linears, three GEMMs, two microbatches


def gemms_of_the_output(seen: Watched) -> dict[str, int]:
    """GEMM -> how often the output layer's site multiplied in FP8, in the last step."""
    return {
        gemm: n for (name, gemm, runs), n in seen.gemms.items() if (name, runs) == ("output_layer", "fp8")
    }


def entry_of(seen: Watched) -> dict[str, Any]:
    (entry,) = (site for site in seen.report if site["name"] == "output_layer")
    return entry


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool) -> Any:
    """one_rank(recipe, fields, tied, steps): what one rank's training is, trained once."""
    known: dict[str, Watched] = {}

    def trained(recipe: str | None, fields: dict[str, Any], tied: bool, steps: int) -> Watched:
        key = repr((recipe, fields, tied))
        if key not in known:
            known[key] = training(ranks, 1, ONE, recipe, fields, {"tied": tied}, steps=steps)[0]
        return known[key]

    return trained


@pytest.mark.parametrize("recipe", some(RECIPES, "delayed", "tensorwise"))
def test_every_recipe_on_one_rank(one_rank: Any, recipe: str) -> None:
    """Sites and counts exact; losses and the first gradient's norm near BF16's."""
    tied = recipe in ("delayed", "mxfp8")
    seen, bf16 = one_rank(recipe, ON, tied, 3), one_rank(None, NARROW, tied, 3)
    assert gemms_of_the_output(seen) == {"fprop": 2, "dgrad": 2, "wgrad": 2}
    assert (seen.counts[-1]["fp8_gemms"], seen.counts[-1]["hp_gemms"]) == (LAYERS + 6, 0)
    assert entry_of(seen)["precision"] == "fp8" and entry_of(seen)["layer"] is None
    assert seen.losses == pytest.approx(bf16.losses, rel=5e-3)
    assert seen.norms[0] == pytest.approx(bf16.norms[0], rel=0.02)
    assert seen.losses[2] < seen.losses[0]


SHARDED = {
    "ddp": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tp2": (TP, {}), "tp2-sp": (TP_SP, {}), "tp2-sp-tied": (TP_SP, TIED), "pp2": (PP, {}), "pp2-tied": (PP, TIED),
    "dp2-tied": (ONE, {**TIED, **SHARDED}),
}  # fmt: skip


@pytest.mark.parametrize("name", some(LAYOUTS, "tp2-sp-tied", "pp2-tied", "dp2-tied"))
def test_layout_agrees_with_one_rank(ranks: RankPool, one_rank: Any, name: str) -> None:
    """Float32 activations around FP8 products: what is left is the order of sums."""
    layout, options = LAYOUTS[name]
    fields = {"fp8_output_layer": True, **FP32}
    one = one_rank("blockwise", fields, bool(options.get("tied")), 2)
    two = training(ranks, 2, layout, "blockwise", fields, options, steps=2)[-1]
    assert set(gemms_of_the_output(two).values()) == {1 if name.startswith("dp2") else 2}
    assert two.losses[0] == pytest.approx(one.losses[0], rel=2e-5)
    assert two.norms[0] == pytest.approx(one.norms[0], rel=2e-4)
    assert two.losses[1] == pytest.approx(one.losses[1], rel=2e-3)


def test_overrides_and_first_and_last_layers(ranks: RankPool) -> None:
    """By name it leaves FP8, bit for bit as without the option; first_last_layers_bf16 does not concern it."""

    def trained(**fields: Any) -> Watched:
        return training(ranks, 1, ONE, "mxfp8", {**NARROW, **fields}, steps=2)[0]

    off = trained()
    back = trained(fp8_output_layer=True, fp8_overrides={"output_layer": "bf16"})
    assert back.losses == off.losses and back.digests == off.digests and not gemms_of_the_output(back)
    assert entry_of(back)["reason"].startswith("fp8_overrides")
    part = trained(fp8_output_layer=True, fp8_overrides={"output_layer:wgrad": "bf16"})
    assert gemms_of_the_output(part) == {"fprop": 2, "dgrad": 2} and part.losses != off.losses
    ends = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 1}
    kept = trained(fp8_output_layer=True, **ends)
    assert gemms_of_the_output(kept) == {"fprop": 2, "dgrad": 2, "wgrad": 2}
    assert {name.split(".")[2] for name, _, runs in kept.gemms if runs == "fp8" and "layers" in name} == {"0"}


def around(tied: bool) -> dict[str, Any]:
    """A rank case, one step of delayed scaling with FP8 weights, sharded: whether a cold weight is warmed; what
    telemetry, state dicts and the report know of the output layer; the FP8 weights."""
    with model_parallel(ONE):
        config = fp8_config(ONE, "delayed", **ON, fp8_param=True)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, tied=tied, **SHARDED)
        warmed = warm_from_weights(fp8_linears(chunks), {"output_layer.weight"})
        optimizer = build_optimizer(config, chunks, **SHARDED)
        with Telemetry(chunks) as telemetry:
            train_step(config, chunks, optimizer, 0)
        names = [name for name, p in chunks[0].named_parameters() if isinstance(p, Fp8Parameter)]
        saved = [key for key in chunks[0].sharded_state_dict() if "output_layer.fp8_state" in key]
        return {
            "warmed": warmed,
            "measured": {r["tensor"] for r in telemetry.records if r["site"] == "output_layer"},
            "sharded": len(saved),
            "fp8": [name.rpartition("module.")[2] for name in names],
            "notes": next(s["notes"] for s in site_report(chunks) if s["name"] == "output_layer"),
        }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weights_checkpoints_and_telemetry(ranks: RankPool, tied: bool) -> None:
    """fp8_param leaves its weight in BF16 and says so; its histories are saved; a cold one is warmed from the weight."""
    found = ranks(1).run(around, tied)[0]
    assert found["warmed"] == 1 and found["sharded"] == 3 * 3  # three tensors, three parts of each
    assert {"input", "weight", "grad_output"} <= found["measured"]
    assert len(found["fp8"]) == 2 * 4 and not any("output_layer" in name for name in found["fp8"])
    assert found["notes"] == ["fp8_param: the output layer's weight stays BF16 and is cast every iteration"]


def prepared(tied: bool) -> tuple[bool, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """A rank case: whether the site is FP8 once prepared for inference; logits before and after; the report."""
    with model_parallel(ONE):
        config = fp8_config(ONE, "mxfp8", **ON)
        model = build_chunks(config, spec=get_gpt_layer_fp8_spec, tied=tied)[0].module.eval()
        ids = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))

        def logits() -> torch.Tensor:
            return Decoder(model, 2, 24, every_token=True)(ids).float()

        before = logits()
        ranges = calibrate(model, [ids], lambda ids: model(ids, torch.arange(24).expand(2, -1), None)).ranges
        assert ranges["output_layer.weight"].shape == (VOCAB, 128)
        report = prepare_for_inference(model).fp8_inference
        site = model.module.output_layer.fp8_site
        return site.is_fp8, before, logits(), {"high_precision": report.high_precision}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_inference(ranks: RankPool, tied: bool) -> None:
    """A weight of its own becomes codes, with training's logits; an embedding's stays BF16, and so does the product."""
    fp8, before, after, report = ranks(1).run(prepared, tied)[0]
    assert fp8 is not tied and report["high_precision"] == (["output_layer"] if tied else [])
    assert torch.equal(before, after) is not tied
    assert (after - before).square().mean().sqrt() < 0.05 * before.square().mean().sqrt()


def refused_models() -> dict[str, str]:
    """A rank case: what an output layer of another class is refused with."""
    from unittest import mock

    from megatron.core import tensor_parallel

    with (
        model_parallel(ONE),
        mock.patch.object(tensor_parallel, "ColumnParallelLinear", Fp8ColumnParallelLinear),
    ):
        try:
            build_chunks(fp8_config(ONE, "mxfp8", **ON), spec=get_gpt_layer_fp8_spec)
        except ValueError as error:
            return {"class": str(error)}
    return {}


def test_another_class_is_refused(ranks: RankPool) -> None:
    assert "output_layer is a Fp8ColumnParallelLinear" in ranks(1).run(refused_models)[0]["class"]
