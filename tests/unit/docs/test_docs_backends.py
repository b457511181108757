"""docs/backends.md says what the code does: every row of its tables is tried."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_fp8 import TransformerConfig
from megatron_fp8.backends import LAYER_BACKENDS, emulated
from megatron_fp8.backends import transformer_engine as engine
from megatron_fp8.backends.native import backend as native
from megatron_fp8.mcore import environment
from megatron_fp8.recipe import RECIPES, CustomRecipe
from tests.support.size_table import make_table
from tests.support.te.engine import NEWEST, OLDEST

PAGE = (Path(__file__).parents[3] / "docs" / "backends.md").read_text()
CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "bias_activation_fusion": True,
    "add_bias_linear": False,
    "fp8": "hybrid",
}


def rows(heading: str) -> list[list[str]]:
    """The cells of the one table under a heading, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


SETTINGS = {row[0]: row[1:] for row in rows("Settings")}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings(what, tmp_path, monkeypatch):
    setting, ours, theirs = SETTINGS[what]
    fields = {"fp8_recipe": "tensorwise"} | eval(f"dict({setting.strip('`')})")
    monkeypatch.chdir(tmp_path)
    make_table(Path("table.json"), {(64, 64, 1): 1.0}, RECIPES[fields["fp8_recipe"]]())
    for cell, backend in ((ours, "emulated"), (ours, "native"), (theirs, engine.name)):
        verdict, _, why = cell.partition(": ")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                TransformerConfig(**BASE, **fields, fp8_backend=backend)
                found = None
            except ValueError as error:
                found = str(error)
        assert (verdict == "yes") == (found is None), f"{what}, {backend}: {found}"
        assert verdict in ("yes", "no") and why in (found or ""), f"{what}, {backend}: {found}"


# The docs' words for the kinds of product that a recipe's GEMMs are planned as where torch has all of them.
KINDS = {
    "one scale each": {"TENSOR"},
    "scales per row": {"ROW"},
    "128-wide blocks; else 32-wide ones; else this package's block-scaled kernel": {"BLOCK", "BLOCK_1D"},
    "32-wide blocks": {"MX"},
    "16-wide blocks of 4-bit codes": {"FP4"},
}


def planned(recipe: Any, refusal: Any) -> list[Any]:
    """What native makes of a recipe's three GEMMs on a device that refuses what ``refusal`` gives a reason for."""
    pairs = native.gemms_of(recipe).values()
    return [native.plan_for(a, b, torch.bfloat16, None, refusal).request for a, b in pairs]


def test_recipes():
    table = rows("Recipes")
    assert [row[0] for row in table] == list(RECIPES)
    for name, ours, needs, theirs in table:
        recipe = RECIPES[name]() if name != "custom" else CustomRecipe(lambda role: None)
        assert ours == "yes" and emulated.supports(CPU, recipe) is None
        verdict, _, why = theirs.partition(": ")
        reason = engine.unsupported_part(recipe)
        assert (verdict == "yes") == (reason is None) and why in (reason or ""), name
        if name != "custom":
            assert {request.mode.name for request in planned(recipe, lambda request: None)} == KINDS[needs], (
                name
            )


def test_blocks_need_no_product_of_torchs():
    requests = planned(RECIPES["blockwise"](), lambda request: None if request.triton else "not here")
    assert all(request.triton for request in requests)
    requests = planned(
        RECIPES["blockwise"](), lambda request: None if request.mode.name == "MX" else "not here"
    )
    assert {request.mode.name for request in requests} == {"MX"}


def test_versions_and_names():
    assert all(version in PAGE for version in (OLDEST, NEWEST))
    assert f"Transformer Engine {engine.MINIMUM} or newer" in PAGE and engine.INSTALL in PAGE
    table = PAGE.split("\n## Recipes")[0]
    for name in ("emulated", "native", *LAYER_BACKENDS):
        assert f"| `{name}` |" in table
    extensions = re.findall(r"`(\w*(?:_C|_cuda))`", PAGE.split("\n## Apex")[1])
    assert sorted(extensions) == ["amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda"]
    assert all(name in Path(environment.__file__).read_text() for name in extensions)
