"""Where a thread is, in words; what is written of all threads."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_fp8.train.health.stack_dump import place, place_of, place_of_error, stacks, waits


class Handle:
    """As those of asynchronous collectives, with a frame that can be looked at."""

    def wait(self):
        return place(sys._getframe(1)), waits(sys._getframe(1))


def named(code, file, **names):
    """What `code`, as if it stood in `file`, leaves in `found`."""
    names["found"] = []
    exec(compile(code, file, "exec"), names)
    return names["found"][0]


def test_a_collective_is_called_by_its_name_and_its_caller():
    code = "def all_reduce(look): found.append(look())\ndef wrapper(*a): return all_reduce(*a)\n"
    code += "def all_gather_object(look): wrapper(look)\n"
    file = "/x/torch/distributed/distributed_c10d.py"
    names = {"found": []}
    exec(compile(code, file, "exec"), names)
    names["all_gather_object"](lambda: (place(sys._getframe(1)), waits(sys._getframe(1))))
    found, told = names["found"][0]
    assert told and found.kind == "waits"
    assert found.text.startswith("all_gather_object, called in train/health/test_stack_dump.py:")
    assert found.text.endswith("(test_a_collective_is_called_by_its_name_and_its_caller)")


def test_a_collective_that_is_just_entered_or_decorated_has_a_caller():
    """Its decorator is all there is of it for a moment; torch's own deprecations lie between it and who called it."""
    names = {"found": []}
    code = "def wrapper(look): found.append(look())\n"
    exec(compile(code, "/x/torch/distributed/c10d_logger.py", "exec"), names)
    exec(compile("def around(look): wrapper(look)\n", "/x/typing_extensions.py", "exec"), names)
    names["around"](lambda: place(sys._getframe(1)))
    (found,) = names["found"]
    assert found.kind == "waits" and found.text.startswith(
        "a collective, called in train/health/test_stack_dump.py:"
    )


def test_a_frame_between_two_lines_has_a_place():
    """Python 3.11 says that it has no line."""
    code = compile("x", "/x/y/z/data.py", "exec")
    frame = SimpleNamespace(f_code=code, f_lineno=None, f_back=None)
    assert not waits(frame) and place(frame).text == "y/z/data.py:1 (<module>)"


def test_a_line_that_waits_is_quoted():
    handle = Handle()
    found, told = handle.wait()
    assert told and found.kind == "waits" and found.text.startswith("'found, told = handle.wait()' in ")


def test_a_compiler_anywhere_above_counts_and_other_work_does_not():
    look = lambda: place(sys._getframe(1))  # noqa: E731
    code = "def work(): found.append(look())\nwork()"
    assert named(code, "/x/torch/_dynamo/convert_frame.py", look=look).kind == "compiles"
    assert named(code, "/x/torch/_dynamo/eval_frame.py", look=look).kind == "elsewhere"
    assert named(code, "/x/y/z/data.py", look=look).text == "y/z/data.py:1 (work)"


def test_where_another_thread_is_and_where_an_error_was_raised():
    event, ready = threading.Event(), threading.Event()

    def waiting():
        ready.set()
        event.wait()

    thread = threading.Thread(target=waiting)
    thread.start()
    ready.wait()
    try:
        assert "threading.py" in place_of(thread.ident).text
    finally:
        event.set()
        thread.join()
    with pytest.raises(ValueError, match="x") as caught:
        raise ValueError("x")
    assert "test_stack_dump.py" in place_of_error(caught.value.__traceback__).text
    assert place_of_error(None) is None


def _text():
    dist.all_reduce(torch.ones(2))
    return stacks()


def test_stacks_have_names_of_threads_and_collectives_of_groups(ranks):
    text = ranks(2).run(_text)[0]
    assert "is 'MainThread'" in text and "most recent call first" in text and "in _text" in text
    assert "ranks [0, 1]): " in text and "collectives begun" in text
