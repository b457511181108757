"""Import paths that documentation names, today and before: each leads to a module."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_fp8.moved import MOVED
from megatron_fp8.nn import convert_to_fp8

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("old", MOVED)
def test_a_path_of_before_gives_todays_objects_and_says_where_they_are(old):
    now = importlib.import_module(f"megatron_fp8.{MOVED[old]}")
    sys.modules.pop(f"megatron_fp8.{old}", None)
    with pytest.warns(
        FutureWarning, match=rf"megatron_fp8\.{re.escape(old)} is now {re.escape(now.__name__)}"
    ):
        before = importlib.import_module(f"megatron_fp8.{old}")
    names = [name for name in vars(now) if not name.startswith("_")]
    assert names and all(getattr(before, name) is getattr(now, name) for name in names)
    with pytest.raises(AttributeError):
        _ = before.nothing_of_this_name


def test_a_name_of_before_gives_a_models_groups():
    """docs/performance.md once had these two lines, for capture by CUDA graphs."""
    from megatron_fp8.nn.module_lookup import groups_of
    from megatron_fp8.nn.step import families_of

    model = convert_to_fp8(torch.nn.Sequential(torch.nn.Linear(16, 16)), "mxfp8")
    model(torch.ones(2, 16))
    states = [state for family in families_of(model) for state in family.states.values()]
    assert states and states == [state for group in groups_of(model) for state in group.states.values()]


def test_every_import_of_the_documentation_works():
    found = {
        line.split("#")[0].strip()
        for page in PAGES
        for line in re.findall(r"^(?:from|import) megatron_fp8\b.*", page.read_text(encoding="utf-8"), re.M)
    }
    assert len(found) > 15
    for line in sorted(found):
        assert not any(line.startswith(f"from megatron_fp8.{old} ") for old in MOVED), line
        exec(line, {})
