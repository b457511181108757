"""Import paths that documentation names, today and before: each leads to a module."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from megatron_fp8.moved import MOVED

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
