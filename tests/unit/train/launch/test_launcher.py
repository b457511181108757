"""Which rank's end was the others', and what is said while something is waited for."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fp8.train.launch.launcher import _root
from megatron_fp8.train.launch.nodes import said_after
from megatron_fp8.train.launch.signals import Signals, Stopped


def failed(*ends: tuple[int, int]) -> Any:
    """Rank -> its end, from (exit code, second)."""
    return {rank: SimpleNamespace(exitcode=code, timestamp=at) for rank, (code, at) in enumerate(ends)}


@pytest.mark.parametrize(
    ("ends", "root"),
    [
        ([(1, 5), (1, 4)], 1),  # the first
        ([(1, 5), (1, 5)], 0),
        ([(1, 5), (-9, 5)], 1),  # a rank that lost its peer fails in the same second
        ([(-15, 5), (1, 5)], 1),  # the agent ends those that are left
        ([(-15, 4), (-15, 5)], 0),
        ([(-9, 4), (2, 5)], 1),  # bad input, which is bad for all
    ],
)
def test_the_rank_whose_end_was_the_others(ends, root):
    assert _root(failed(*ends)) == root


def test_what_is_waited_for_is_said_at_doubling_intervals():
    said: list[str] = []
    with said_after(0.05, said.append, "node 0"):
        time.sleep(0.3)
    before = list(said)
    time.sleep(0.2)
    assert said == before and 2 <= len(said) <= 3
    assert all(line.startswith("waiting ") and line.endswith(" s so far for node 0") for line in said)


def test_signals_are_owed_to_ranks_and_given_back_to_python(monkeypatch):
    said: list[str] = []
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append((pid, number)))
    before = signal.getsignal(signal.SIGTERM)
    signals = Signals(said.append)
    with signals.heard():
        signals.listen(ranks_run=True)
        signal.raise_signal(signal.SIGUSR1)
        assert signals.stop is None and not said
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signals.hand_on([7, 8])
        signals.hand_on([7, 8])
    assert signals.stop == signal.SIGTERM and len(said) == 1
    assert sent == [
        (pid, number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM) for pid in (7, 8)
    ]
    assert signal.getsignal(signal.SIGTERM) == before


def test_without_ranks_a_signal_ends_the_launcher_at_once():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes the suite ignore it
    try:
        signals = Signals(print)
        with signals.heard(), pytest.raises(Stopped, match="SIGHUP"):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signals.stop == signal.SIGHUP


def test_what_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = Signals(print)
        with signals.heard():
            signal.raise_signal(signal.SIGHUP)
            signal.signal(signal.SIGHUP, signal.default_int_handler)  # as torch's agent sets one
            signals.listen(ranks_run=True)
            signal.raise_signal(signal.SIGHUP)
        assert signals.stop is None
    finally:
        signal.signal(signal.SIGHUP, before)
