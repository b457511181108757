"""docs/estimates.md, docs/scaling.md and benchmarks/results have the tables that benchmarks.estimates and .scale make."""

from __future__ import annotations

import pytest

from benchmarks import estimates, scale


@pytest.mark.parametrize("device", estimates.DEVICES)
@pytest.mark.parametrize("name", estimates.LAYOUTS)
def test_the_results_have_every_table(name: str, device: str) -> None:
    assert estimates.section(name, device) in estimates.FULL.read_text(encoding="utf-8")


def test_the_page_has_the_bytes() -> None:
    assert estimates.summary() in estimates.PAGE.read_text(encoding="utf-8")


def test_the_page_on_scale_has_what_ranks_exchange() -> None:
    assert scale.exchange(*scale.SHOWN) in scale.PAGE.read_text(encoding="utf-8")
