"""What a comparison says to somebody who looks on."""

from __future__ import annotations

import sys

from megatron_fp8.study.compare.progress import Progress
from tests.support.terminal import LIKE_MARKUP, Terminal


def test_names_on_a_terminal_stay_as_they_are(monkeypatch):
    """Of both places: the bar's words and the lines above it."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(40) as progress:
        progress.begin("[/x], seed 1", "1 of 2", 20, 0)
        progress.say(LIKE_MARKUP)
        written = sys.stderr
    assert LIKE_MARKUP in written.getvalue() and "[/x], seed 1 (1 of 2)" in written.getvalue()
