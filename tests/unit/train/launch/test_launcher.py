"""Which rank's end was the others', and what is said while something is waited for."""

from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from megatron_fp8.train.launch import node_rendezvous
from megatron_fp8.train.launch import signals as signals_file
from megatron_fp8.train.launch.launcher import _root
from megatron_fp8.train.launch.node_rendezvous import said_after
from megatron_fp8.train.launch.signals import Signals, Stopped
from megatron_fp8.train.stop import AGAIN_S, ASKED_BY, REASONS, StopRequest


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


def test_what_is_waited_for_is_said_at_doubling_intervals(monkeypatch):
    said: list[str] = []
    waited: list[float | None] = []

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            return len(waited) > 3 or super().wait(0)

    monkeypatch.setattr(node_rendezvous, "Event", Over)
    with said_after(5, said.append, "node 0"):
        while len(waited) < 4:
            time.sleep(0.01)
    assert waited == [5, 5, 10, 20]
    assert said == [f"waiting     {seconds} s so far for node 0" for seconds in (5, 10, 20)]


def test_nothing_is_said_once_the_waiting_is_over():
    """A line that was being said then had another one after it."""
    said: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def say(line: str) -> None:
        begun.set()
        go_on.wait()
        said.append(line)

    with said_after(0.01, say, "node 0"):
        begun.wait()
        threading.Timer(0.05, go_on.set).start()
    before = list(said)
    time.sleep(0.2)
    assert said == before


def test_signals_are_owed_to_ranks_and_given_back_to_python(monkeypatch, tmp_path):
    said: list[str] = []
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append((pid, number)))
    before = signal.getsignal(signal.SIGTERM)
    signals = Signals(said.append, tmp_path / "asked by")
    with signals.heard():
        signals.listen(ranks_run=True)
        signal.raise_signal(signal.SIGUSR1)
        signals.hand_on([])
        assert not (tmp_path / "asked by").exists()
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


def test_a_second_ctrl_c_counts_a_second_after_the_first(monkeypatch, tmp_path):
    now = [100.0]
    monkeypatch.setattr(signals_file, "time", SimpleNamespace(monotonic=lambda: now[0]))
    signals = Signals(lambda _: None, tmp_path / "asked by")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with signals.heard():
            signals.listen(ranks_run=True)
            signal.raise_signal(signal.SIGINT)
            now[0] += AGAIN_S
            signal.raise_signal(signal.SIGINT)
            now[0] += 0.1
            with pytest.raises(SignalException, match="a second Ctrl-C"):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_ranks_a_signal_ends_the_launcher_at_once(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes the suite ignore it
    try:
        signals = Signals(print, tmp_path / "asked by")
        with signals.heard(), pytest.raises(Stopped, match="SIGHUP"):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signals.stop == signal.SIGHUP


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGTERM"])
def test_ranks_know_which_signal_the_launcher_got(name, monkeypatch, tmp_path):
    """They get SIGTERM, and what they say of it is what the launcher was sent first."""
    asked_by = tmp_path / "asked by"
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes the suite ignore it
    stop = StopRequest({ASKED_BY: str(asked_by)})
    try:
        stop.listen("SIGTERM")
        listens = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr("os.kill", lambda pid, number: sent.append(number))
        sent: list[int] = []
        signals = Signals(lambda _: None, asked_by)
        with signals.heard():
            signals.listen(ranks_run=True)
            signal.raise_signal(signal.Signals[name])
            signal.raise_signal(signal.SIGTERM)  # later ones change nothing
            signals.hand_on([7])
        assert sent == [signal.SIGTERM] * 2
        assert signal.getsignal(signal.SIGTERM) == listens
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert stop.votes() == [float(reason == name) for reason in REASONS]


@pytest.mark.parametrize("content", [None, "", "SIGKILL"])
def test_a_rank_that_was_told_itself_says_so(content, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    if content is not None:
        (tmp_path / "asked by").write_text(content)
    stop = StopRequest({ASKED_BY: str(tmp_path / "asked by")})
    try:
        stop.listen("SIGTERM")
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stop.votes() == [float(reason == "SIGTERM") for reason in REASONS]


def test_what_was_ignored_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = Signals(print, tmp_path / "asked by")
        with signals.heard():
            signal.raise_signal(signal.SIGHUP)
            signal.signal(signal.SIGHUP, signal.default_int_handler)  # as torch's agent sets one
            signals.listen(ranks_run=True)
            signal.raise_signal(signal.SIGHUP)
        assert signals.stop is None
    finally:
        signal.signal(signal.SIGHUP, before)
