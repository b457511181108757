"""YAML of which nothing is dropped."""

import pytest

from megatron_fp8.files.strict_yaml import load_yaml


def test_what_it_reads():
    assert load_yaml(b"a: {b: [1, 2.5, null]}\nc: &x [1]\nd: *x\n") == {
        "a": {"b": [1, 2.5, None]},
        "c": [1],
        "d": [1],
    }


@pytest.mark.parametrize(
    "content, said",
    [
        (b"a: 1\na: 2", "stands twice, again in line 2"),
        (b"[a]: 1", "must be a name"),
        (b"a: [", "expected"),
        (b"a:\n  b: 1\n c: 2", "^line 3 does not begin where the other keys"),
        (b"\xff", "decode"),
        (b"[" * 40_000, "recursion"),
    ],
)
def test_what_it_refuses_in_one_line(content, said):
    with pytest.raises(ValueError, match=said) as error:
        load_yaml(content)
    assert "\n" not in str(error.value)
