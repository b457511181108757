"""Names that are asked for, and those that no name server could know."""

import pytest

from megatron_fp8.train.launch.hosts import is_host


@pytest.mark.parametrize(
    "name", ["node0", "a.b.example", "10.0.0.1", "::1", "fe80::1%eth0", "bücher", "x_y", "a" * 63]
)
def test_names(name):
    assert is_host(name)


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a\tb", "a\0b", "a..b", ".", "a" * 64, "\udcff", "http://a", "a\n"]
)
def test_no_names(name):
    assert not is_host(name)
