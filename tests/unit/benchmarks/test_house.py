"""benchmarks/house.py: lines of code, and functions that a call enters."""

from benchmarks import house
from megatron_fp8.recipe import DelayedScaling

SOURCE = '''\
"""A module."""

# why
import os  # here


def path(
    name: str,
) -> str:
    """Where."""
    return """
two"""
'''


def test_docstrings_comments_and_blank_lines_are_no_code():
    assert house.code_lines(SOURCE) == 6


def test_functions_of_the_package_count_once_and_others_do_not():
    once = house.entered(DelayedScaling)
    assert {code.co_name for code in once} >= {"__post_init__"}
    assert house.entered(lambda: (DelayedScaling(), DelayedScaling(), house.words([]))) == once


def test_a_warm_linear_enters_fewer_functions_than_its_first_step():
    forward, backward = house.warm_linear()
    assert 10 < backward < forward < 100
