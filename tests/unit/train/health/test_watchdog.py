"""When a phase takes too long, what is written then, and what is said: with a clock that the tests move."""

import json
import threading
import time

import pytest

from megatron_fp8.train.health import watchdog as module
from megatron_fp8.train.health.watchdog import WINDOW_ITERATIONS, WINDOW_S, StragglerMonitor, Watchdog

LEAST = 15.0


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Rank:
    """A watchdog whose thread never runs: `pass_time` looks instead of it."""

    def __init__(self, folder, rank=0, ranks=1, limit=1800.0):
        self.clock, self.said = Clock(), []
        self.watchdog = Watchdog(
            folder, rank, ranks, least=LEAST, limit=limit, say=self.said.append, clock=self.clock
        )

    def pass_time(self, seconds, step=0.5):
        """Half a second by half a second."""
        for _ in range(round(seconds / step)):
            self.clock.now += step
            self.watchdog.look()

    def steps(self, count, seconds, first=1):
        for iteration in range(first, first + count):
            self.watchdog.enter("step", iteration)
            self.pass_time(seconds)


@pytest.fixture
def rank(tmp_path):
    return Rank(tmp_path / "start")


def test_the_bound_is_learned_from_the_second_longest_of_late(rank):
    bound = rank.watchdog.bound
    assert bound("step") == 20 * LEAST  # the first ones compile, and nothing is known
    rank.steps(4, 2.0)
    rank.watchdog.enter("save", 4)
    assert bound("step") == LEAST and bound("save") == 20 * LEAST
    for took, iteration in ((30.0, 5), (10.0, 6)):
        rank.steps(1, took, first=iteration)
    rank.watchdog.enter("step", 7)
    assert bound("step") == 3 * 10.0  # one that was long is an exception, and two are not
    rank.steps(2, 1000.0, first=7)
    rank.watchdog.enter("step", 9)
    assert bound("step") == 3 * 30.0  # nor are hours
    rank.steps(16, 1.0, first=9)
    rank.watchdog.enter("end", 24)
    assert bound("step") == LEAST


def test_long_first_iterations_validations_and_saves_say_nothing(rank):
    for kind in ("step", "validation", "save", "end"):
        for iteration in (1, 2, 3):
            rank.watchdog.enter(kind, iteration)
            rank.pass_time(19 * LEAST)
    assert not rank.said and not rank.watchdog.folder.exists()


def test_a_long_iteration_is_said_within_20_s_and_again_after_twice_as_long(rank):
    rank.steps(5, 1.0)
    rank.watchdog.enter("step", 6)
    rank.pass_time(LEAST - 1.0)
    assert not rank.said and not rank.watchdog.folder.exists()
    rank.pass_time(20.0 - LEAST)
    (line,) = rank.said
    assert (
        line.startswith("waiting     iteration 6 takes 1")
        and " (of late 1 s): rank 0 works in iteration 6: " in line
    )
    (folder,) = rank.watchdog.folder.iterdir()
    assert line.endswith(f"Stacks: {folder}")
    record, _, stacks = (folder / "rank-0.txt").read_text().partition("\n")
    assert json.loads(record)["where"] in line and "test_watchdog.py" in stacks and "'MainThread'" in stacks
    rank.pass_time(LEAST * 9)  # 30 s, 60 s, 120 s
    assert len(rank.said) == 4 and len(list(rank.watchdog.folder.iterdir())) == 4
    rank.watchdog.enter("step", 7)
    assert rank.said[4] == "iteration 6 went on after 154 s"
    rank.watchdog.enter("step", 8)
    assert len(rank.said) == 5


def test_who_waits_for_one_at_the_start_of_a_resumed_run_answers_and_nobody_later(tmp_path):
    ranks = [Rank(tmp_path, rank, 2) for rank in range(2)]
    ranks[1].watchdog.enter(module.START, 0)
    ranks[1].pass_time(59.0)
    ranks[0].watchdog.enter("step", 500)
    ranks[0].pass_time(20.0)
    assert not list(tmp_path.iterdir())
    ranks[1].pass_time(1.5)
    (folder,) = tmp_path.iterdir()
    ranks[0].pass_time(1.5)
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.txt", "rank-1.txt"]
    ranks[0].pass_time(4.0)
    (line,) = ranks[0].said
    assert (
        line.startswith("waiting     iteration 500 takes 24 s so far: ")
        and "rank 1 works in the start: " in line
    )
    ranks[0].steps(6, 1.0, first=501)
    ranks[0].watchdog.enter("step", 507)
    (tmp_path / "iteration-0-start-70s").mkdir()
    ranks[0].pass_time(LEAST - 1.0)
    assert not list(tmp_path.glob("iteration-0-start-70s/*"))


def test_nothing_is_read_or_written_while_all_is_well(rank, monkeypatch):
    monkeypatch.setattr(module.Path, "iterdir", lambda folder: pytest.fail("looked into a folder"))
    rank.steps(30, 4.5)
    assert not rank.said


def test_the_start_is_watched_too(tmp_path):
    """A rank that reads its data for ever was named when a collective gave up."""
    ranks = [Rank(tmp_path, rank, 2) for rank in range(2)]
    ranks[0].watchdog.enter(module.START, 0)
    ranks[1].watchdog.enter(module.START, 0)
    ranks[1].pass_time(20.0, step=10.0)  # all of its threads stand still
    ranks[1].watchdog.enter("step", 1)
    ranks[0].pass_time(4 * LEAST - 0.5)
    assert not ranks[0].said
    ranks[0].pass_time(1.0)
    ranks[1].pass_time(LEAST)
    ranks[0].pass_time(4.0)
    (line,) = ranks[0].said
    assert line.startswith("waiting     the start takes 63 s so far: rank 0 works in the start: ")
    assert "; rank 1 works in iteration 1: " in line and not ranks[1].said
    ranks[0].watchdog.enter("step", 1)
    assert ranks[0].said[1] == "the start went on after 64 s"


def test_the_others_write_when_one_does_and_the_lowest_speaks(tmp_path):
    ranks = [Rank(tmp_path, rank, 3) for rank in range(3)]
    for rank in ranks[1:]:
        rank.steps(5, 1.0)
        rank.watchdog.enter("step", 6)
    ranks[1].pass_time(LEAST + 0.5)  # finds it long
    ranks[2].pass_time(LEAST / 3 + 1)  # no long one yet, but looks for folders
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["rank-1.txt", "rank-2.txt"]
    ranks[1].pass_time(4.0)
    ranks[2].pass_time(4.0)
    (line,) = ranks[1].said
    assert (
        not ranks[2].said
        and "rank 0 does not answer: it is stopped, dead or cut off; ranks 1, 2 work" in line
    )
    assert ranks[1].watchdog.differing_ranks() == "rank 0 does not answer: it is stopped, dead or cut off"


def test_what_fails_in_its_thread_is_said_once_and_it_goes_on(tmp_path):
    said, looks = [], []
    watchdog = Watchdog(tmp_path, 0, 2, least=600.0, limit=1800.0, say=said.append)
    watchdog.enter("step", 1)

    def look():
        looks.append(1)
        raise RuntimeError("a fault")

    watchdog.look = look
    watchdog.start()
    deadline = time.monotonic() + 200
    while len(looks) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    watchdog.close()
    assert len(looks) >= 3
    assert said == ["warning: the watchdog of rank 0 failed (RuntimeError('a fault')) and goes on"]


def test_a_slow_rank_of_a_pipeline_may_have_more_to_do(rank):
    rank.watchdog.pace.take = lambda total: "works"
    rank.watchdog.iterated(0.0)
    rank.watchdog._stages = 2
    rank.watchdog.iterated(0.0)
    assert rank.said[0].endswith("is slow: it works")
    assert rank.said[1].endswith("is slow: it works; or its pipeline stage has more to do than others")


def test_ranks_are_grouped_by_where_they_are_and_those_that_wait_come_last(rank):
    folder = rank.watchdog.folder
    folder.mkdir()
    places = ["waits", "elsewhere", "elsewhere", "compiles"]
    for number, kind in enumerate(places):
        record = {"rank": number, "kind": kind, "where": f"x.py:{kind}", "in": "iteration 6"}
        (folder / f"rank-{number}.txt").write_text(json.dumps(record) + "\n\nstacks")
    rank.watchdog.ranks = 6
    assert rank.watchdog._differences(folder) == [
        "ranks 4, 5 do not answer: they are stopped, dead or cut off",
        "rank 3 compiles in iteration 6: x.py:compiles",
        "ranks 1, 2 work in iteration 6: x.py:elsewhere",
        "rank 0 waits in iteration 6: x.py:waits",
    ]


def test_an_old_folder_is_not_answered(rank):
    (rank.watchdog.folder / "iteration-4-step-15s").mkdir(parents=True)
    rank.steps(6, 1.0)
    rank.watchdog.enter("step", 7)
    rank.pass_time(LEAST - 1)
    assert not list(rank.watchdog.folder.glob("*/*"))


def test_time_in_which_the_process_stood_still_is_not_the_iterations(rank):
    rank.steps(5, 1.0)
    rank.watchdog.enter("step", 6)
    rank.pass_time(1.0)
    rank.pass_time(100.0, step=100.0)
    rank.pass_time(LEAST - 1.5)
    (line,) = rank.said
    assert (
        line.startswith("warning: rank 0 on ")
        and " stood still for 100 s: it was stopped, or its machine" in line
    )


def test_stacks_that_cannot_be_written_are_said_with_the_reason(rank):
    rank.watchdog.folder.write_text("a file in the way")
    rank.steps(5, 1.0)
    rank.watchdog.enter("step", 6)
    rank.pass_time(LEAST + 1)
    (line,) = rank.said
    assert "rank 0 is in " in line and line.endswith("(Not a directory)")


def test_0_watches_nothing(tmp_path):
    before = threading.active_count()
    watchdog = Watchdog(tmp_path, 0, 1, least=0.0, limit=60.0, say=pytest.fail)
    watchdog.start()
    watchdog.enter("step", 1)
    assert threading.active_count() == before
    watchdog.close()


# ---------------------------------------------------------------------------------------- which rank is slow


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
