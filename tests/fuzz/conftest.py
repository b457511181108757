"""Fixtures of the fuzzers."""

from tests.support.fuzz_targets import originals, place

__all__ = ["originals", "place"]
