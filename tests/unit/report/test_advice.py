"""Advice of whoever gives it: shown with all its fields, and nothing is made up."""

import pytest

from megatron_fp8.report.run import ShownAdvice, parse_advice, read_advice


def test_objects_and_texts():
    found = parse_advice(
        [
            {
                "site": "fc1",
                "cause": "underflow",
                "share": 0.123456,
                "line": "--model.fp8_recipe=mxfp8",
                "x": None,
            },
            {"title": "bad", "cause": "why", "figures": {"sqnr_db": 12.0, "sites": ["p", "q"]}},
            "plain",
            {"site": "alone"},
        ]
    )
    assert found == (
        ShownAdvice("underflow", ("--model.fp8_recipe=mxfp8",), (("site", "fc1"), ("share", "0.1235"))),
        ShownAdvice("bad", (), (("cause", "why"), ("figures", "sqnr_db 12, sites p, q"))),
        ShownAdvice("plain", (), ()),
        ShownAdvice("Advice", (), (("site", "alone"),)),
    )


def test_what_is_no_list_is_refused():
    for wrong in (b"{}", b"{", b"\xff"):
        with pytest.raises(ValueError, match=r"'a\.json'"):
            read_advice(wrong, "a.json")
