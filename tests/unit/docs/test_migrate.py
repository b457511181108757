"""docs/migrate.md names what is there: Megatron-Core's dataclass, Transformer Engine's recorded classes, and our own."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig as Megatrons

from megatron_fp8 import TransformerConfig, fp8_autocast, fp8_step, recipe
from megatron_fp8.mcore.config.fields import REFUSED
from tests.support.te.signatures import recorded

PAGE = (Path(__file__).parents[3] / "docs" / "migrate.md").read_text()
NEWEST = "2.20.2"


def table(heading: str, after: str) -> list[list[str]]:
    """The cells of the first table under a heading that comes after a text."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0].split(after, 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", section, re.M)
    assert lines is not None
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[0].splitlines()[2:]]


def test_every_fp8_field_of_megatron_has_its_row_and_is_what_it_says():
    rows = {row[0].strip("`"): row[2] for row in table("Megatron-Core's fields", "Megatron-LM:")}
    theirs = {field.name for field in dataclasses.fields(Megatrons)}
    assert set(rows) <= theirs
    assert {name for name in theirs if "fp8" in name or "fp4" in name or name.endswith("_in_bf16")} <= set(
        rows
    )
    ours = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert set(rows) <= ours
    for name, here in rows.items():
        assert here.startswith("refused") == (name in REFUSED), name


@pytest.mark.parametrize(
    "name", [row[0].strip("`") for row in table("Transformer Engine's names", "not ignored:")]
)
def test_keywords_of_recipes(name):
    (row,) = [row for row in table("Transformer Engine's names", "not ignored:") if row[0].strip("`") == name]
    both, only_theirs, only_here = (set(re.findall(r"`(\w+)`", cell)) for cell in row[1:])
    theirs = set(recorded()[NEWEST]["recipes"][name]["fields"])
    ours = {field.name for field in dataclasses.fields(getattr(recipe, name))}
    assert (both, only_theirs, only_here) == (theirs & ours, theirs - ours, ours - theirs)


def test_calls():
    theirs = recorded()[NEWEST]
    assert {
        "Linear", "LayerNormLinear", "DotProductAttention", "autocast", "checkpoint", "fp8_model_init",
    } <= set(theirs["exports"])  # fmt: skip
    assert {"enabled", "recipe", "amax_reduction_group"} <= set(theirs["calls"]["autocast"]["__init__"])
    assert {"is_first_microbatch", "fp8_output", "fp8_grad"} <= set(theirs["calls"]["Linear"]["forward"])
    assert "group" in inspect.signature(fp8_step).parameters
    assert list(inspect.signature(fp8_autocast).parameters) == ["enabled", "recipe"]
