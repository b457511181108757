"""JSON of which nothing is dropped, and that nothing can be too deep for."""

import pytest

from megatron_fp8.files.strict_json import load_json

DEEP = 64


def nested(levels: int) -> bytes:
    return (
        b'{"a": [' * (levels // 2) + b"[" * (levels % 2) + b"1" + b"]" * (levels % 2) + b"]}" * (levels // 2)
    )


def test_what_it_reads():
    assert load_json(b"[1" + b"0" * 308 + b", -7]") == [10**308, -7]
    assert load_json(b'{"a": [1, 2.5, null], "b": {"a": "x"}}\r\n') == {"a": [1, 2.5, None], "b": {"a": "x"}}
    assert load_json(b"\xef\xbb\xbf[NaN]")[0] != 0, "a byte order mark, as some editors write it"
    assert load_json(nested(DEEP)) and load_json(b"[" + b",".join([b"[[1]]"] * 1000) + b"]")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": {"b": 1, "c": 2, "b": 1}}', "'b' is there twice"),
        (nested(DEEP + 1), "deeper than 64 levels"),
        (b"[" * 10**5, "deeper than 64 levels"),
        (b"9" * 10**6, "digits"),
        (b"[1" + b"0" * 309 + b"]", r"10000000\.\.\. with 310 digits is too large"),
        ('{"a": 1}'.encode("utf-16"), "byte 0 of it is no UTF-8"),
        (b'"\xed\xa0\x80"', "byte 1 of it is no UTF-8"),
        (b"", "Expecting value"),
    ],
)
def test_what_it_refuses_in_one_line(content, said):
    with pytest.raises(ValueError, match=said) as error:
        load_json(content)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


@pytest.mark.parametrize("constant", ["NaN", "-Infinity", "1e400"])
def test_what_json_has_not(constant):
    with pytest.raises(ValueError, match=f"{constant} is no number"):
        load_json(f'{{"a": {constant}}}'.encode(), finite=True)
    assert str(load_json(constant.encode())).startswith(("nan", "inf", "-inf"))
