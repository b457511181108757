"""A plan by GEMM as other programs read it: each reader gives the precisions that this package plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from megatron_fp8.diagnosis.format_costs import FormatPlan
from megatron_fp8.diagnosis.plan_files import overrides_yaml, te_factories, te_refusal
from megatron_fp8.recipe import Float8RowwiseScaling, NVFP4BlockScaling
from tests.support.plans import GEMMS, PLAN, RECIPES, planned


def test_overrides_give_each_gemm_its_format() -> None:
    for site, gemms in PLAN.items():
        rules = planned(site)
        for gemm, fmt in gemms.items():
            if fmt == "bf16":
                assert set(rules[gemm].values()) == {None}, (site, gemm)
                continue
            for role, rule in rules[gemm].items():
                wanted = RECIPES[fmt].rule(role)
                assert wanted is not None and rule is not None
                assert replace(rule, hadamard=False) == replace(wanted, hadamard=False), (site, gemm, role)


def test_the_run_s_own_overrides_come_first() -> None:
    found = FormatPlan(
        ("nvfp4",), 0.01, [], {}, 1.0, {"a.b": dict(zip(GEMMS, ("bf16", "nvfp4", "bf16"), strict=True))}
    )
    text = overrides_yaml(found, {"*.b": "mxfp8", "a.b": "mxfp8"})
    assert list(yaml.safe_load(text).items()) == [("*.b", "mxfp8"), ("a.b", "bf16"), ("a.b:dgrad", "nvfp4")]


def test_formats_that_transformer_engine_lacks_are_named() -> None:
    assert te_refusal(RECIPES) is None
    reason = te_refusal({"nvfp4": NVFP4BlockScaling(), "rowwise": Float8RowwiseScaling()})
    assert reason is not None and "rowwise" in reason
    with pytest.raises(ValueError, match="Transformer Engine has no rowwise recipe"):
        te_factories(PLAN, {"rowwise": Float8RowwiseScaling()})
