"""docs/estimates.md, docs/scaling.md and benchmarks/results have the tables that benchmarks.estimates and .scale make."""

from __future__ import annotations

import pytest

from benchmarks import estimates, scale


# Every model on one device, and the smallest on the others, whose bytes are the same.
@pytest.mark.parametrize(
    "name, device",
    [(name, "h100") for name in estimates.LAYOUTS]
    + [("llama3_8b", device) for device in estimates.DEVICES[1:]],
)
def test_the_results_have_the_tables(name: str, device: str) -> None:
    assert estimates.section(name, device) in estimates.FULL.read_text(encoding="utf-8")


def test_the_page_has_the_bytes() -> None:
    assert estimates.summary() in estimates.PAGE.read_text(encoding="utf-8")


def test_the_page_on_scale_has_what_ranks_exchange() -> None:
    assert scale.exchange(*scale.SHOWN) in scale.PAGE.read_text(encoding="utf-8")
