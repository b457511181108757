"""docs/estimates.md has the tables that `python -m benchmarks.estimates` prints."""

from __future__ import annotations

import pytest

from benchmarks import estimates


@pytest.mark.parametrize("device", estimates.DEVICES)
@pytest.mark.parametrize("name", estimates.LAYOUTS)
def test_it_has_every_table(name: str, device: str) -> None:
    assert estimates.section(name, device) in estimates.PAGE.read_text(encoding="utf-8")
