"""Codes and scales are what they were when the suite was frozen."""

from __future__ import annotations

from tests.frozen.codes import digests
from tests.frozen.write import read


def test_codes_and_scales() -> None:
    found, wanted = digests(), read("codes")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []
