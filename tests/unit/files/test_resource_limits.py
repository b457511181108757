"""Which limit of a process an error has met, by what the limits themselves raise."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from megatron_fp8.files import resource_limits
from megatron_fp8.files.atomic_io import remedy
from megatron_fp8.files.resource_limits import check_files, limit_reached, locale_limit

HELD = """
import os, resource, sys
from megatron_fp8.files.resource_limits import check_threads, limit_reached
limit, size, work = getattr(resource, sys.argv[1]), int(sys.argv[2]), sys.argv[3]
resource.setrlimit(limit, (size, size))
try:
    exec(work)
except Exception as error:
    print(limit_reached(error))
"""


def under(limit: str, size: int, work: str) -> str:
    """What is said of `work` in a process with that limit."""
    done = subprocess.run(
        [sys.executable, "-c", HELD, limit, str(size), work], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize(
    "limit, size, work, words",
    [
        ("RLIMIT_NOFILE", 20, "held = [open(os.devnull) for _ in range(20)]", "may open 20 files (`ulimit -n`)"),
        ("RLIMIT_AS", 2**30, "bytearray(2**31)", "`ulimit -v` allows 1,024 MiB, so raise that"),
        ("RLIMIT_DATA", 2**30, "bytearray(2**31)", "`ulimit -d` allows 1,024 MiB, so raise that"),
        ("RLIMIT_AS", 2**29, "check_threads(200)", "`ulimit -v` allows 512 MiB"),
    ],
)  # fmt: skip
def test_a_limit_is_named_with_how_to_raise_it(limit, size, work, words):
    assert words in under(limit, size, work)


@pytest.mark.parametrize(
    "text, words",
    [
        ("[enforce fail at socket.cc:24] rv != -1. socket: Too many open files", "`ulimit -n`"),
        ("Too many open files in system", "fs.file-max"),
        (
            "err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
            "more memory",
        ),
        ("Resource temporarily unavailable", "`ulimit -u`"),
    ],
)
def test_what_torch_and_other_ranks_raise_is_known_by_its_text(text, words):
    assert words in str(limit_reached(RuntimeError(text)))


def test_what_an_error_came_from_counts_and_other_errors_do_not():
    error = ValueError("x cannot be read: make it readable")
    assert limit_reached(error) is None
    error.__cause__ = OSError(24, os.strerror(24))
    assert "`ulimit -n`" in str(limit_reached(error))
    for other in ("CUDA out of memory. Tried to allocate 2 GiB", "Connection closed by peer"):
        assert limit_reached(RuntimeError(other)) is None


def test_the_remedy_of_what_cannot_be_written_is_that_of_its_reason():
    assert remedy(OSError(24, "")) == "raise that limit"
    assert remedy(Exception("I/O error: No space left on device (os error 28)")) == "make room there"


def test_a_locale_that_has_utf8_stands_in_no_ones_way(monkeypatch):
    assert locale_limit("é") is None
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    monkeypatch.setenv("LC_ALL", "C")
    assert "The locale (LC_ALL=C" in str(locale_limit("é".encode()))
    assert locale_limit(b"\xff") is None


RAISED = """\
import resource
from megatron_fp8.files.resource_limits import raise_files
print(raise_files(), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_of_open_files_is_raised_as_far_as_allowed():
    def low():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))

    done = subprocess.run(
        [sys.executable, "-c", RAISED], preexec_fn=low, capture_output=True, text=True, check=True
    )
    assert done.stdout == "512 (512, 512)\n"


def test_more_ranks_than_files_are_refused_in_words(monkeypatch):
    monkeypatch.setattr(resource_limits, "raise_files", lambda: 1024)
    check_files(512, hosts_store=False, over_gloo=False)
    check_files(1, hosts_store=True, over_gloo=True)  # nobody to be connected to
    for ranks, hosts_store, over_gloo, needed in ((1024, True, False, 3200), (512, False, True, 1152)):
        said = rf"may open 1024 files \(`ulimit -Hn`\), and {ranks} ranks need at least {needed}, .*raise the limit"
        with pytest.raises(ValueError, match=said):
            check_files(ranks, hosts_store=hosts_store, over_gloo=over_gloo)
