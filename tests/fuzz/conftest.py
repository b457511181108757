"""Fixtures of the fuzzers."""

from tests.support.victims import originals, place

__all__ = ["originals", "place"]
