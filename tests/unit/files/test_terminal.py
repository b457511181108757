"""Text of others on a terminal: nothing steers it, and what can be read stays."""

import pytest

from megatron_fp8.files.terminal import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layers.0 ü 日本 →", "layers.0 ü 日本 →"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b]0;title\x07\x1b[2J", r"\x1b]0;title\x07\x1b[2J"),
        ("a\rb\x08\x7f\x9b", r"a\rb\x08\x7f\x9b"),
        ("\u202egnp.exe", r"\u202egnp.exe"),  # turns the order of letters round
        ("\udcff", r"\udcff"),
        ("", ""),
    ],
)
def test_what_would_steer_it_is_spelled_out(text, shown):
    assert printable(text) == shown
