"""Ranks before their process group: who is missing, what differs, and ending together. Threads play the ranks."""

import contextlib
import io
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_fp8.train.launch import startup_barrier as meeting_file
from megatron_fp8.train.launch.parallel import exit_code
from megatron_fp8.train.launch.startup_barrier import RanksMissing, StartupBarrier, _describe
from tests.support.ports import held_ports


@pytest.fixture(autouse=True)
def handler():
    """The test process keeps its own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def launch(monkeypatch):
    """meetings(ranks, world_size) of a launch whose store torchrun keeps; each has what it was ended with in `ends`."""
    monkeypatch.setattr(meeting_file, "_LOOK_S", 0.05)
    monkeypatch.setattr(meeting_file, "_GRACE_S", 0.1)
    agent = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=200)
    )
    made = []

    def meetings(ranks, world_size, environ=None, port=agent.port):
        environ = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if environ is None else environ
        for rank in ranks:
            ends = []
            place = SimpleNamespace(
                rank=rank,
                world_size=world_size,
                local_rank=rank,
                master_addr="127.0.0.1",
                master_port=port,
                told=(f"RANK={rank}", f"WORLD_SIZE={world_size}"),
            )
            made.append(StartupBarrier(place, environ, end=ends.append))
            made[-1].ends = ends
        return made[-len(ranks) :]

    yield meetings
    for one in made:
        one.close()


@pytest.fixture
def port():
    with held_ports(1) as (found,):
        yield found


def everywhere(work, *per_rank):
    """Results, or exceptions, of `work(*arguments)` for each rank's arguments at the same time."""
    with ThreadPoolExecutor(len(per_rank)) as pool:
        futures = [pool.submit(work, *arguments) for arguments in per_rank]
        return [future.exception() or future.result() for future in futures]


def until(condition, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_equal_facts_are_agreed_on_and_the_process_group_gets_a_store(launch):
    ranks = launch([0, 1, 2], 3)
    facts = {"optimizer.lr": 0.1, "data.paths": ["a"], "not a number": float("nan")}
    assert everywhere(lambda one: one.agree("settings", facts), *((one,) for one in ranks)) == [None] * 3
    stores = [one.group_store() for one in ranks]
    stores[0].set("from", "rank 0")
    assert stores[2].get("from") == b"rank 0"


def test_ranks_meet_without_waiting_for_a_look(launch, monkeypatch, port):
    """Rank 0 is there at once; the other one comes first, to a store that is not there yet."""
    monkeypatch.setattr(meeting_file, "_LOOK_S", 60.0)
    (other,) = launch([1], 2, {}, port)
    time.sleep(0.1)
    (first,) = launch([0], 2, {}, port)
    assert everywhere(lambda one: one.agree("settings", {}, 50.0), (first,), (other,)) == [None] * 2


def test_of_what_only_one_may_have_each_hears_who_has_it(launch):
    ranks = launch([0, 1, 2], 3)
    everywhere(lambda one: one.arrive("here", 200.0), *((one,) for one in ranks))
    said = ((ranks[2], "a"), (ranks[0], "a"), (ranks[1], "b"), (ranks[2], "a"))
    assert [one.first_to_say(what) for one, what in said] == [2, 2, 1, 2]


def test_a_rank_that_looked_at_some_things_takes_rank_0s_word_for_the_others(launch):
    """Of a node's ranks one looks at all of the files; what another one has seen of them counts all the same."""
    ranks = launch([0, 1, 2], 3)

    def meet(what, *seen):
        partial = (False, True, False)
        return everywhere(
            lambda one, facts, partial: one.agree(what, facts, 6.0, partial),
            *zip(ranks, seen, partial, strict=True),
        )

    all_ = {"bytes": 7, "digest": "a"}
    assert meet("files", all_, {"bytes": 7}, all_) == [None] * 3
    assert meet("nothing seen", all_, {}, all_) == [None] * 3
    first, *_ = meet("other files", all_, {"bytes": 8}, all_)
    assert str(first).startswith("the ranks differ: bytes is 7 on rank 0 and 8 on rank 1.")


def test_a_rank_that_looked_at_everything_is_held_to_all_of_it(launch):
    ranks = launch([0, 1], 2)
    first, _ = everywhere(
        lambda one, facts: one.agree("files", facts, 6.0),
        *zip(ranks, ({"bytes": 7, "digest": "a"}, {"bytes": 7}), strict=True),
    )
    assert 'digest is "a" on rank 0 and not set on rank 1' in str(first)


def test_the_groups_store_waits_as_long_as_the_group(launch):
    """NCCL's communicators are made late, and ranks wait there for each other's first use."""
    ranks = launch([0, 1], 2)
    assert everywhere(lambda one: one.agree("settings", {}), *((one,) for one in ranks)) == [None] * 2
    assert [one.group_store(3600.0).timeout for one in ranks] == [timedelta(hours=1)] * 2


def test_a_connection_that_is_lost_on_the_way_is_made_again(launch, monkeypatch):
    """Of a thousand ranks that connect at once, the store may turn some away."""
    ranks = launch([0, 1], 2)
    assert everywhere(lambda one: one.agree("settings", {}), *((one,) for one in ranks)) == [None] * 2
    connect, refusals = dist.TCPStore, [dist.DistNetworkError("reset by peer"), None]

    def unreliable(*args, **kwargs):
        if refusal := refusals.pop(0):
            raise refusal
        return connect(*args, **kwargs)

    monkeypatch.setattr(dist, "TCPStore", unreliable)
    assert ranks[1].group_store() is not None and refusals == []


def test_what_differs_is_one_line_on_rank_0_and_ends_the_others(launch):
    ranks = launch([0, 1, 2], 3)

    def agree(one, facts):
        try:
            one.agree("settings", facts, timeout_s=4)
        except ValueError as error:
            if one.rank == 0:
                one.tell(2, str(error))
            raise

    same = {"optimizer.lr": 0.1, "train.seed": 1}
    outcomes = everywhere(
        agree,
        (ranks[0], same),
        (ranks[1], {"optimizer.lr": 0.2, "NVTE_X": "1", "train.seed": 1}),
        (ranks[2], same),
    )
    said = str(outcomes[0])
    assert "optimizer.lr is 0.1 on rank 0 and 0.2 on rank 1" in said
    assert 'NVTE_X is not set on rank 0 and "1" on rank 1' in said
    assert "train.seed" not in said and "rank 2" not in said
    assert until(lambda: ranks[1].ends == ranks[2].ends == [2])


def test_another_world_size_is_told_before_anybody_waits_for_ranks_that_never_come(launch):
    (first,), (second,) = launch([0], 4), launch([1], 2)
    outcomes = everywhere(
        lambda one: one.agree("settings", {"the world size": one.world_size}, timeout_s=4),
        (first,),
        (second,),
    )
    assert "the world size is 4 on rank 0 and 2 on rank 1" in str(outcomes[0])


def test_long_lists_are_cut():
    different = [(rank, {f"key{k}": [0, "x" * 500] for k in range(11)}) for rank in range(1, 12)]
    said = _describe(different)
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8, ... (11)" in said and "; and 3 more" in said
    assert len(said) < 2500


def test_one_rank_refuses_wherever_the_others_are_and_one_of_several_prints(launch):
    ranks = launch([0, 1, 2], 3)
    assert until(lambda: all(one._connected.is_set() for one in ranks))
    said = []
    everywhere(lambda one: one.tell(2, "bad input", lambda: said.append(one.rank)), (ranks[0],), (ranks[1],))
    assert len(said) == 1
    assert until(lambda: ranks[2].ends == [2])
    assert ranks[0].ends == ranks[1].ends == []


def test_an_exception_that_nobody_expected_ends_all_ranks_as_failed(launch):
    ranks = launch([0, 1], 2)
    assert until(lambda: all(one._connected.is_set() for one in ranks))
    with pytest.raises(AssertionError), ranks[1]:
        raise AssertionError("broken")
    assert until(lambda: ranks[0].ends == [1])


def test_two_processes_with_one_rank_are_refused(launch):
    ranks = launch([0, 0], 2)
    outcomes = everywhere(lambda one: one.agree("settings", {}, timeout_s=4), *((one,) for one in ranks))
    assert any("two processes of this launch are rank 0" in str(outcome) for outcome in outcomes)


def test_one_rank_looks_who_is_missing_and_asks_by_halves(launch, monkeypatch):
    """A thousand ranks that each ask about a thousand would keep the store busy for minutes."""
    monkeypatch.setattr(meeting_file, "FIRST_LINE_S", 3.0)  # the second line is three seconds later
    looked, asked = [], []
    look = StartupBarrier._missing

    def looks(one):
        if one._store is not None:  # on a busy machine some have not reached it yet, and ask nobody
            looked.append(one.rank)
        return look(one)

    monkeypatch.setattr(StartupBarrier, "_missing", looks)
    absent = StartupBarrier._absent
    monkeypatch.setattr(
        StartupBarrier, "_absent", lambda one, what, ranks: asked.append(what) or absent(one, what, ranks)
    )
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        ranks = launch(range(7), 8)
        assert until(lambda: "1 of 8 ranks have not started: 7" in said.getvalue())
        assert len(looked) == 1 and len(asked) == 7  # 8, then twice 4, 2 and 1
        for one in ranks:
            one.close()


def test_missing_ranks_are_named_at_doubling_intervals_by_one_rank(launch, monkeypatch):
    monkeypatch.setattr(meeting_file, "FIRST_LINE_S", 0.4)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        ranks = launch([0, 2], 12)
        assert until(lambda: said.getvalue().count("\n") >= 2)
    first, second = said.getvalue().splitlines()[:2]
    assert first == "waiting     0 s so far: 10 of 12 ranks have not started: 1, 3, 4, 5, 6, 7, 8, 9, ..."
    assert re.match(r"waiting +[1-9]\d* s so far: 10 of 12", second)
    # One that has come and is stopped: it is at no later stage, and one that was there does not answer.
    for one in ranks:
        one.close()


def test_a_rank_that_is_stopped_after_it_came_is_named(launch, monkeypatch):
    ranks = launch([0, 1], 2)
    everywhere(lambda one: one.agree("settings", {}, timeout_s=100), *((one,) for one in ranks))
    for one in ranks:
        one.arrive("the process group")
    assert ranks[0]._missing() == ""
    ranks[1].close()  # as SIGSTOP does: its thread is still
    assert ranks[0]._missing() == "1 of 2 ranks do not answer: 1"


def test_a_rank_that_never_comes_is_a_failure_and_no_bad_input(launch):
    """Batch scripts retry what ends with 1."""
    (alone,) = launch([0], 2)
    with pytest.raises(
        RanksMissing,
        match=r"1 of 2 ranks have not come: 1 \(RANK=0, WORLD_SIZE=2; to run alone, unset these variables\) after 0.00\d+"
        r" minutes: look at their logs",
    ) as found:
        alone.agree("settings", {}, timeout_s=0.3)
    assert exit_code(found.value) == 1
    assert exit_code(ConnectionResetError()) == exit_code(TimeoutError()) == 1
    assert exit_code(ValueError("lr=-1")) == exit_code(OSError("no such file")) == 2


def test_without_torchrun_rank_0_keeps_the_store(launch, port):
    (late,) = launch([1], 2, environ={}, port=port)
    variables = "(RANK=1, WORLD_SIZE=2; to run alone, unset these variables)"
    assert late._missing() == f"rank 0 has not started: nothing listens at 127.0.0.1:{port} {variables}"
    (agents,) = launch([1], 2, environ={"TORCHELASTIC_USE_AGENT_STORE": "True"}, port=port)
    assert "where torchrun should (TORCHELASTIC_USE_AGENT_STORE=True)" in agents._missing()
    agents.close()
    (first,) = launch([0], 2, environ={}, port=port)
    agreed = everywhere(lambda one: one.agree("settings", {"a": 1}, timeout_s=100), (first,), (late,))
    assert agreed == [None, None]
    (other,) = launch([0], 2, environ={}, port=port)
    with pytest.raises(ValueError, match=f"cannot listen on MASTER_PORT={port}.*a second rank 0"):
        other.agree("settings", {}, timeout_s=100)


def test_one_rank_waits_for_nobody():
    alone = SimpleNamespace(rank=0, world_size=1, local_rank=0, master_addr="", master_port=0, told=())
    with StartupBarrier(alone, {}) as one:
        one.agree("settings", {"a": 1})
        one.arrive("the process group")
        said = []
        one.tell(2, "bad", lambda: said.append("bad"))
        assert said == ["bad"] and isinstance(one.group_store(), dist.HashStore)


class StoppedStore:
    """As a store whose keeper is stopped: it takes what it is told, and answers nothing."""

    def __init__(self):
        self.released = threading.Event()

    def set(self, key, value):
        pass

    def check(self, keys):
        self.released.wait()
        raise RuntimeError("gone")

    compare_set = add = lambda self, *_: self.check([])


def test_a_store_that_does_not_answer_is_said_and_given_up(launch, monkeypatch, capsys):
    monkeypatch.setattr(meeting_file, "FIRST_LINE_S", 0.3)
    monkeypatch.setattr(meeting_file, "_GIVE_UP_S", 1.0)
    (rank, _) = launch([0, 1], 2)
    assert until(lambda: rank._connected.is_set())
    rank._store = stopped = StoppedStore()
    assert until(lambda: rank.ends)
    stopped.released.set()
    said = capsys.readouterr().err
    assert rank.ends == [1] and said.count("error: the store at 127.0.0.1:") == 1
    assert said.count(" does not answer: its host, rank 0 or torchrun, is suspended") >= 1


def test_a_failure_is_said_though_the_store_does_not_answer(launch, monkeypatch):
    monkeypatch.setattr(meeting_file, "_ANSWER_S", 0.2)
    (rank, _) = launch([0, 1], 2)
    assert until(lambda: rank._connected.is_set())
    rank.close()
    rank._store, said = StoppedStore(), []
    rank.tell(1, "failed", lambda: said.append("failed"))
    assert said == ["failed"]
    rank._store.released.set()
