"""Text on a terminal: others' steers nothing, and a warning names the user's line."""

import ast
import contextlib
import threading
import warnings
from pathlib import Path

import pytest

import megatron_fp8
from megatron_fp8.files.terminal import printable, warn_user


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


CODE = """
def call(function, *arguments):
    function(*arguments)
"""


def module(name):
    """A function of a module of this name, which calls another."""
    names = {"__name__": name}
    exec(compile(CODE, f"/{name}.py", "exec"), names)
    return names["call"]


def where(recorded):
    return [(Path(warning.filename).name, warning.lineno) for warning in recorded]


@pytest.mark.parametrize("between", [[], ["megatron.core.x", "megatron_fp8.y", "dataclasses"]])
def test_a_warning_is_at_the_innermost_line_of_the_user(between, recwarn):
    function, arguments = warn_user, ("text",)
    for name in ["megatron_fp8.nn", *between]:
        function, arguments = module(name), (function, *arguments)
    function(*arguments)
    with contextlib.ExitStack() as stack:
        stack.callback(function, *arguments)  # runs in the last line of the block, by way of contextlib
    module("users_code")(function, *arguments)
    (own, first), (also_own, second), users = where(recwarn)
    assert own == also_own == "test_terminal.py" and second == first + 1 and users == ("users_code.py", 3)


def test_a_warning_of_a_thread_is_at_its_caller(recwarn):
    thread = threading.Thread(target=module("megatron_fp8.x"), args=(warn_user, "text"))
    thread.start()
    thread.join()
    assert where(recwarn) == [("megatron_fp8.x.py", 3)]


def test_only_this_function_warns():
    """``stacklevel`` is right for one way to a warning alone."""
    folder = Path(megatron_fp8.__file__).parent
    calls = [
        str(path)
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("warn", "warn_explicit")
        and isinstance(node.value, ast.Name)
        and node.value.id == warnings.__name__
    ]
    assert calls == [str(folder / "files" / "terminal.py")]
