"""The factories that `diagnose --formats` writes, run on Transformer Engine's real quantizers, roles and recipe."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe

from megatron_fp8.diagnosis.plan_files import megatron_yaml, te_factories
from megatron_fp8.numerics.formats import ROLES
from megatron_fp8.plan.cast_spec import READERS
from tests.support.plans import GEMMS, OTHER, PLAN, RECIPES, Rules, planned
from tests.support.te.products import rule_of


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The Python file, imported."""
    (tmp_path / "planned_te.py").write_text(te_factories(PLAN, RECIPES))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("planned_te")
    sys.modules.pop("planned_te")


def rules_of(qfactory: Callable[[Any], Any], linear: str) -> Rules:
    """GEMM -> role -> the rule by which a linear of that name reads the operand."""
    found: Rules = {gemm: {} for gemm in GEMMS}
    for role in ROLES:
        quantizer = qfactory(te.QuantizerRole(module_type="linear", tensor_type=role, name=linear))
        sides = (quantizer, quantizer)
        if isinstance(quantizer, te.HybridQuantizer):
            sides = quantizer.rowwise_quantizer, quantizer.columnwise_quantizer
        for gemm, side, columnwise in zip(READERS[role], sides, (False, True), strict=True):
            found[gemm][role] = rule_of(side, columnwise=columnwise)
    return found


def test_the_whole_model_s_factory_makes_the_planned_quantizers(factories: Any) -> None:
    for site in PLAN:
        assert rules_of(factories.qfactory, site) == planned(site), site
    nothing = dict.fromkeys(GEMMS)
    for name in (OTHER, ""):
        found = rules_of(factories.qfactory, name)
        assert {gemm: next(iter(set(rules.values()))) for gemm, rules in found.items()} == nothing
    assert type(factories.qfactory(None)).__name__ == "IdentityQuantizer", "an output's role"


def test_linears_make_the_planned_quantizers(factories: Any) -> None:
    """By their names; one quantizer where one is enough for both sides."""
    made = []
    for site in list(PLAN)[:4]:
        linear = te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device="cpu")
        model = torch.nn.ModuleDict({"fc1": linear, "norm": torch.nn.LayerNorm(2)})
        factories.name_linears(model)
        assert linear.name == "fc1" and not hasattr(model["norm"], "name")
        linear.name = site
        with te.autocast(enabled=True, recipe=CustomRecipe(qfactory=factories.qfactory)):
            linear.init_fp8_metadata()
        made.append(type(linear.quantizers["scaling_fwd"][1]).__name__)
    assert made == ["NVFP4Quantizer", "MXFP8Quantizer", "IdentityQuantizer", "HybridQuantizer"]


def test_megatron_core_reads_the_same_precisions(factories: Any, tmp_path: Path) -> None:
    """By its own loader and parser; a factory that it would import is this file's."""
    from megatron.core.extensions.transformer_engine import TEQuantizationParams
    from megatron.core.quantization.utils import get_quant_config_or_none, load_quantization_recipe

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
        assert rules_of(getattr(factories, function), OTHER) == planned(site), site
    assert read(OTHER).fp8_quantization_recipe is read(OTHER).fp4_quantization_recipe is None
