"""docs/migrate.md names what is there: Megatron-Core's dataclass and our own classes."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from megatron.core.transformer.transformer_config import TransformerConfig as Megatrons

from megatron_fp8 import TransformerConfig, fp8_autocast, fp8_step
from megatron_fp8.mcore.config.fields import REFUSED

PAGE = (Path(__file__).parents[3] / "docs" / "migrate.md").read_text()


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


def test_calls():
    assert "group" in inspect.signature(fp8_step).parameters
    assert list(inspect.signature(fp8_autocast).parameters) == ["enabled", "recipe"]
