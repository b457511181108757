"""Which rank is slow, from samples that the tests make."""

import pytest

from megatron_fp8.train.health.watchdog import WINDOW_ITERATIONS, WINDOW_S, StragglerMonitor


def windows(own, count, extra=0.0):
    """What ranks say that work `own` seconds of each iteration's longest: (window, rank, line)."""
    ranks, found = [StragglerMonitor(len(own)) for _ in own], []
    iterations = max(WINDOW_ITERATIONS, int(WINDOW_S / max(own)) + 1)
    for window in range(count):
        for _ in range(iterations):
            total = sum(rank.share() for rank in ranks)
            for number, (rank, seconds) in enumerate(zip(ranks, own, strict=True)):
                rank.sample(seconds, waits=False)
                rank.sample(max(own) - seconds, waits=True)
                if said := rank.take(total):
                    found.append((window, number, said))
    return found


def test_the_slow_rank_says_so_with_its_delay_once_it_was_slow_in_two_windows():
    ((window, rank, line),) = windows([0.4, 0.4, 1.0, 0.4], 6)
    assert (window, rank) == (2, 2)
    assert line == (
        "works 1 s an iteration where the others work 0.4 s on average, so all wait 0.6 s an iteration for it"
    )


def test_a_rank_that_is_slow_in_every_other_window_says_nothing():
    """As on a machine that others use: of few looks some windows have more than their share."""
    pace, said = StragglerMonitor(2), []
    for window in range(12):
        for _ in range(20):
            pace.sample(1.6 if window % 2 else 1.0, waits=False)
            said.append(pace.take(pace.share() + 1.0))
    assert not any(said)


@pytest.mark.parametrize("own", [[1.0, 1.0], [1.0, 0.7], [0.012, 0.005], [1.0]])
def test_ranks_that_differ_little_say_nothing(own):
    assert not windows(own, 5)


def test_it_is_said_again_when_the_delay_has_doubled():
    pace = StragglerMonitor(2)
    said = []
    for own in (1.0, 1.0, 1.0, 2.5, 2.5):
        for _ in range(20):
            pace.sample(own, waits=False)
            said.append(pace.take(pace.share() + 0.5))
    assert [line.rpartition("wait ")[2] for line in said if line] == [
        "0.5 s an iteration for it",
        "2 s an iteration for it",
    ]
