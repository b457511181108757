"""docs/migrate.md names what the newest Transformer Engine has."""

import dataclasses
import inspect
import re

import pytest
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as theirs

from megatron_fp8 import recipe as ours
from tests.support.command import ROOT

PAGE = (ROOT / "docs" / "migrate.md").read_text()
ROWS = re.findall(r"^\| `(\w+Scaling)` \|(.*)\|(.*)\|(.*)\|$", PAGE, re.M)


@pytest.mark.parametrize(
    "name, cells", [(name, cells) for name, *cells in ROWS], ids=lambda value: str(value)[:20]
)
def test_keywords_of_recipes(name, cells):
    here, there = (
        {field.name for field in dataclasses.fields(getattr(module, name))} for module in (ours, theirs)
    )
    said = tuple(set(re.findall(r"`(\w+)`", cell)) for cell in cells)
    assert said == (here & there, there - here, here - there)


def test_calls():
    assert len(ROWS) > 3
    names = ("LayerNormLinear", "DotProductAttention", "checkpoint", "fp8_model_init")
    assert all(hasattr(te, name) for name in names)
    assert {"enabled", "recipe", "amax_reduction_group"} <= set(inspect.signature(te.autocast).parameters)
    read = set(inspect.signature(te.Linear.forward).parameters)
    assert {"is_first_microbatch", "fp8_output", "fp8_grad"} <= read
