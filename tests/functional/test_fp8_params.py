"""Training with fp8_param: losses, gradient norms and masters of casting BF16 weights every iteration, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.support.fp8_gpt import CLIP, DISTRIBUTED, NARROW, RECIPES
from benchmarks.support.ranks import Layout, RankPool
from tests.support.fp8_params import OVERLAP, param_training, whole_masters
from tests.support.long_cases import some


def same(
    ranks: RankPool, world: int, layout: Layout, recipe: str, *, fp8: bool = True, **options: Any
) -> None:
    """Both trainings give the same; ``fp8``: there are FP8 weights at all."""
    if layout.tp == 1:
        options["fields"] = {**NARROW, **options.get("fields", {})}
    plain = param_training(ranks, world, layout, recipe, fp8_param=False, **options)
    param = param_training(ranks, world, layout, recipe, fp8_param=True, **options)
    for before, after in zip(plain, param, strict=True):
        assert before.fp8_weights == [] and bool(after.fp8_weights) == fp8
        assert after.stepped == before.stepped
        assert repr(after.losses) == repr(before.losses)
        # An Inf under MX's largest scale is decoded beyond bfloat16: that loss is NaN, with FP8 parameters or without.
        assert recipe == "mxfp8" or all(map(math.isfinite, after.losses))
        assert repr(after.norms) == repr(before.norms)
        assert all(
            not stepped or norm > CLIP for stepped, norm in zip(after.stepped, after.norms, strict=True)
        )
        assert after.evaluated == before.evaluated
        assert after.nonfinite == before.nonfinite
    weights, expected = whole_masters(param), whole_masters(plain)
    assert list(weights) and weights.keys() == expected.keys()
    assert [key for key in weights if weights[key] != expected[key]] == []


@pytest.mark.parametrize(
    "recipe", some(["delayed", "blockwise", "rowwise", "nvfp4"], "delayed", "rowwise", "nvfp4")
)
def test_one_rank(ranks: RankPool, recipe: str) -> None:
    same(ranks, 1, Layout(), recipe, sick=(1,), steps=3)


@pytest.mark.parametrize("recipe", [*RECIPES, "nvfp4"])
def test_distributed_optimizer(ranks: RankPool, recipe: str) -> None:
    """Two ranks, a skipped step, and validations between steps, which gather in forward hooks too.

    Of codes that are gathered and of codes that are cast after it, with both overlaps and with none.
    """
    ddp = DISTRIBUTED if recipe in ("tensorwise", "rowwise") else OVERLAP
    same(ranks, 2, Layout(), recipe, ddp=ddp, sick=(1,), steps=3, evaluate=True)


MOE = {"num_moe_experts": 2, "moe_ffn_hidden_size": 256, "moe_router_load_balancing_type": "none"}
BF16_LAYERS = {"first_last_layers_bf16": True, "num_layers": 4, "fp8_overrides": {"*.linear_proj": "bf16"}}
TP_ONLY = {
    "tp_only_amax_red": True,
    "fp8_interval": 2,
    "fp8_amax_history_len": 4,
    "fp8_amax_compute_algo": "max",
}
CASES = {
    "dp1-distributed": (1, Layout(), "tensorwise", {}, DISTRIBUTED),
    "dp2-replicated": (2, Layout(), "delayed", {}, {}),
    "dp2-two-way-unshared": (2, Layout(), "mxfp8", {}, {**DISTRIBUTED, "unshared": True}),
    "dp2-buckets": (2, Layout(), "delayed", {}, {**OVERLAP, "bucket_size": 10_000}),
    "tp2-sp": (2, Layout(tp=2, sp=True), "delayed", {}, DISTRIBUTED),
    "pp2": (2, Layout(pp=2), "delayed", {}, OVERLAP),
    "nvfp4-two-way-unshared": (2, Layout(), "nvfp4", {}, {**DISTRIBUTED, "unshared": True}),
    "nvfp4-tp2-sp": (2, Layout(tp=2, sp=True), "nvfp4", {}, OVERLAP),
    "nvfp4-vpp": (2, Layout(pp=2, vpp=2), "nvfp4", {"num_layers": 4}, OVERLAP),
    "nvfp4-ep2-one-wide": (
        2,
        Layout(ep=2),
        "nvfp4",
        {**MOE, "fp4_disable_2d_quantization": True},
        DISTRIBUTED,
    ),
    "mxfp8-ep2": (2, Layout(ep=2), "mxfp8", MOE, DISTRIBUTED),
    "nvfp4-replicated": (2, Layout(), "nvfp4", {}, {}),
    "nvfp4-mixed": (2, Layout(), "nvfp4", {"fp8_overrides": {"*.linear_fc1": "blockwise"}}, DISTRIBUTED),
    "vpp-mxfp8": (2, Layout(pp=2, vpp=2), "mxfp8", {"num_layers": 4}, OVERLAP),
    "ep2": (2, Layout(ep=2), "blockwise", MOE, DISTRIBUTED),
    "cp2": (2, Layout(cp=2), "delayed", {}, OVERLAP),
    "tp-only-amax": (2, Layout(), "delayed", TP_ONLY, DISTRIBUTED),
    "custom": (
        2,
        Layout(),
        "custom",
        {"fp8_quantizer_factory": "tests.support.fp8_params.mixed_factory"},
        DISTRIBUTED,
    ),
    "bf16-layers": (2, Layout(), "delayed", BF16_LAYERS, DISTRIBUTED),
}


HERE = (
    "nvfp4-tp2-sp",
    "nvfp4-ep2-one-wide",
    "dp2-replicated",
    "dp2-two-way-unshared",
    "tp2-sp",
    "vpp-mxfp8",
    "ep2",
    "tp-only-amax",
    "bf16-layers",
)


@pytest.mark.parametrize("case", some(CASES, *HERE))
def test_layouts(ranks: RankPool, case: str) -> None:
    world, layout, recipe, fields, ddp = CASES[case]
    steps = 3 if "fp8_interval" in fields else 2  # what was cast after the first step is read in the second
    same(ranks, world, layout, recipe, fields=fields, ddp=ddp, steps=steps, fp8="unshared" not in case)
