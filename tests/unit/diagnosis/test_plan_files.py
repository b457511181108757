"""A plan by GEMM as other programs read it: each reader gives the precisions that this package plans."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from megatron.core.extensions.transformer_engine import TEQuantizationParams
from megatron.core.quantization.utils import get_quant_config_or_none, load_quantization_recipe

from megatron_fp8.diagnosis.format_costs import FormatPlan, overrides_of
from megatron_fp8.diagnosis.plan_files import megatron_yaml, overrides_yaml, te_factories, te_refusal
from megatron_fp8.plan.cast_spec import READERS
from megatron_fp8.plan.resolve import SiteRequest, named_recipes, resolve
from megatron_fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from tests.support.te.quantizers import Rules, modules, rules_of

VERSION = "2.20.2"
LAYER = "decoder.layers.{}.mlp.linear_fc1"
GEMMS = ("fprop", "dgrad", "wgrad")
RECIPES: dict[str, Recipe] = {
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "tensorwise": Float8CurrentScaling(use_power_2_scales=True),
    "blockwise": Float8BlockScaling(fp8_format="hybrid"),
}
TRIPLES = (
    "nvfp4 nvfp4 nvfp4", "mxfp8 mxfp8 mxfp8", "bf16 bf16 bf16", "nvfp4 bf16 mxfp8", "bf16 nvfp4 bf16",
    "mxfp8 mxfp8 nvfp4", "tensorwise tensorwise tensorwise", "blockwise blockwise blockwise",
    "bf16 tensorwise blockwise",
)  # fmt: skip
PLAN = {
    LAYER.format(layer): dict(zip(GEMMS, triple.split(), strict=True)) for layer, triple in enumerate(TRIPLES)
}
OTHER = "decoder.layers.99.mlp.linear_fc2"


def planned(site: str) -> Rules:
    """The rules of this package's own plan with the overrides, as ``rules_of`` gives a factory's."""
    overrides = overrides_of(PLAN)
    request = SiteRequest(
        DelayedScaling(), named_recipes(overrides, RECIPES.__getitem__), overrides=overrides
    )
    plan = resolve(request, site, None, torch.device("cpu"))
    found: Rules = {gemm: {} for gemm in GEMMS}
    for role, readers in READERS.items():
        for gemm, columnwise in zip(readers, (False, True), strict=True):
            cast = plan.operands[gemm][role]
            rule = None if cast is None else cast.rule
            rowwise = rule is not None and not columnwise
            found[gemm][role] = replace(rule, hadamard=False) if rule is not None and rowwise else rule
    return found


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The Python file, imported beside Transformer Engine's recorded quantizers."""
    for name, module in modules(VERSION).items():
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "planned_te.py").write_text(te_factories(PLAN, RECIPES))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("planned_te")
    sys.modules.pop("planned_te")


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


def test_the_whole_model_s_factory_makes_the_planned_quantizers(factories: Any) -> None:
    for site in PLAN:
        assert rules_of(factories.qfactory, site, VERSION) == planned(site), site
    nothing = dict.fromkeys(("fprop", "dgrad", "wgrad"))
    for name in (OTHER, ""):
        found = rules_of(factories.qfactory, name, VERSION)
        assert {gemm: next(iter(set(rules.values()))) for gemm, rules in found.items()} == nothing
    made = {
        site: type(factories.qfactory(SimpleNamespace(name=site, tensor_type="weight"))).__name__
        for site in list(PLAN)[:3]
    }
    assert list(made.values()) == ["NVFP4Quantizer", "MXFP8Quantizer", "IdentityQuantizer"], (
        "one where one is enough"
    )
    assert type(factories.qfactory(None)).__name__ == "IdentityQuantizer", "an output's role"


def test_linears_are_named_as_the_plan_names_them(factories: Any) -> None:
    class Linear(torch.nn.Module):
        name = None

        def get_quantizer_roles(self) -> None: ...

    model = torch.nn.ModuleDict({"fc1": Linear(), "norm": torch.nn.LayerNorm(2)})
    factories.name_linears(model)
    assert model["fc1"].name == "fc1" and not hasattr(model["norm"], "name")


def test_megatron_core_reads_the_same_precisions(factories: Any, tmp_path: Path) -> None:
    """By its own loader and parser; a factory that it would import is this file's."""
    path = tmp_path / "planned.yaml"
    path.write_text(megatron_yaml(PLAN, RECIPES, "planned_te"))
    recipe = load_quantization_recipe(str(path))

    def read(site: str) -> Any:
        return TEQuantizationParams.parse_from_config(get_quant_config_or_none(site, recipe)).training_recipe

    builtin = {"nvfp4": RECIPES["nvfp4"], "mxfp8": RECIPES["mxfp8"], "blockwise": RECIPES["blockwise"]}
    for site, gemms in PLAN.items():
        found, formats = read(site), set(gemms.values())
        name = found.fp8_quantization_recipe or found.fp4_quantization_recipe
        if formats == {"bf16"}:
            assert name is None
            continue
        assert found.override_nonquantized_autocast and found.override_quantized_autocast
        if len(formats) == 1 and (fmt := next(iter(formats))) in builtin:
            assert name == fmt
            assert fmt == "nvfp4" or found.fp8_format == builtin[fmt].fp8_format.value  # type: ignore[attr-defined]
            continue
        module, _, function = found.custom_recipe_factory.rpartition(".")
        assert (name, module) == ("custom", "planned_te")
        assert rules_of(getattr(factories, function), OTHER, VERSION) == planned(site), site
    assert read(OTHER).fp8_quantization_recipe is read(OTHER).fp4_quantization_recipe is None


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
