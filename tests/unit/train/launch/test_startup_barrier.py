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
import torch
import torch.distributed as dist

from megatron_fp8.train.launch import startup_barrier
from megatron_fp8.train.launch.parallel import exit_code
from megatron_fp8.train.launch.startup_barrier import RanksMissing, StartupBarrier, check_restarts
from tests.support.ports import held_ports


@pytest.fixture(autouse=True)
def handler():
    """The test process keeps its own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def launch(monkeypatch):
    """barriers(ranks, world_size) of a launch whose store torchrun keeps; each has what it was ended with in `ends`."""
    monkeypatch.setattr(startup_barrier, "_LOOK_S", 0.05)
    monkeypatch.setattr(startup_barrier, "_GRACE_S", 0.1)
    agent = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=200)
    )
    made = []

    def barriers(ranks, world_size, environ=None, port=agent.port, address="127.0.0.1"):
        environ = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if environ is None else environ
        for rank in ranks:
            ends = []
            place = SimpleNamespace(
                rank=rank,
                world_size=world_size,
                local_rank=rank,
                master_addr=address,
                master_port=port,
                variables=(f"RANK={rank}", f"WORLD_SIZE={world_size}"),
            )
            made.append(StartupBarrier(place, environ, end=ends.append))
            made[-1].ends = ends
        return made[-len(ranks) :]

    yield barriers
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
    """A rank that has only some of the facts takes the others from rank 0. The group's store waits as long as the group:
    NCCL's communicators are made late."""
    ranks = launch([0, 1, 2], 3)
    facts = {"optimizer.lr": 0.1, "data.paths": ["a"], "not a number": float("nan")}
    some = {"optimizer.lr": 0.1}
    agreed = everywhere(
        lambda one, facts, partial: one.agree("settings", facts, partial=partial),
        *((ranks[0], facts, False), (ranks[1], some, True), (ranks[2], facts, False)),
    )
    assert agreed == [None] * 3
    stores = [one.group_store(3600.0) for one in ranks]
    assert stores[0].timeout == timedelta(hours=1)
    stores[0].set("from", "rank 0")
    assert stores[2].get("from") == b"rank 0"


def test_an_attempt_does_not_see_what_an_earlier_one_wrote(launch):
    """torchrun keeps its store over restarts, and restarted ranks would read the addresses of dead ones."""
    for attempt in ("0", "1"):
        environ = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": attempt}
        ranks = launch([0, 1], 2, environ)
        assert everywhere(lambda one: one.agree("settings", {}), *((one,) for one in ranks)) == [None] * 2
        store = ranks[0].group_store()
        assert not store.check(["address of rank 0"])
        store.set("address of rank 0", "of the dead")


def test_what_differs_is_one_line_on_rank_0_and_ends_the_others(launch):
    ranks = launch([0, 1, 2], 3)

    def agree(one, facts, partial):
        try:
            one.agree("settings", facts, timeout_s=2, partial=partial)
        except ValueError as error:
            if one.rank == 0:
                one.tell(2, str(error))
            raise

    outcomes = everywhere(
        agree,
        (ranks[0], {"optimizer.lr": 0.1, "train.seed": 1, "digest": "a"}, False),
        (ranks[1], {"optimizer.lr": 0.2, "NVTE_X": "1"}, True),
        (ranks[2], {"optimizer.lr": 0.1, "train.seed": 1}, False),
    )
    said = str(outcomes[0])
    assert "optimizer.lr is 0.1 on rank 0 and 0.2 on rank 1" in said and "train.seed" not in said
    assert 'NVTE_X is not set on rank 0 and "1" on rank 1' in said
    assert 'digest is "a" on rank 0 and not set on rank 2' in said
    assert until(lambda: ranks[1].ends == ranks[2].ends == [2])


def test_another_world_size_is_refused_before_anybody_waits_for_ranks_that_never_come(launch):
    (first,), (second,) = launch([0], 4), launch([1], 2)
    assert until(lambda: first._connected.is_set() and second._connected.is_set())
    (problem,) = [one._problem for one in (first, second) if one._problem]
    assert "the ranks differ: the world size is " in str(problem)


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
    outcomes = everywhere(lambda one: one.agree("settings", {}, timeout_s=1), *((one,) for one in ranks))
    assert any("two processes of this launch are rank 0" in str(outcome) for outcome in outcomes)


def test_missing_ranks_are_named_at_doubling_intervals_by_one_rank(launch, monkeypatch):
    monkeypatch.setattr(startup_barrier, "FIRST_LINE_S", 0.4)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        ranks = launch([0, 2], 12)
        found = everywhere(lambda one: one.agree("settings", {}, 2.0), *((one,) for one in ranks))
    assert all(isinstance(error, RanksMissing) for error in found)
    first, second, *more = said.getvalue().splitlines()
    assert re.match(
        r"waiting +[01] s so far: 10 of 12 ranks have not started: 1, 3, 4, 5, 6, 7, 8, 9, \.\.\.$", first
    )
    assert re.match(r"waiting +1 s so far: 10 of 12", second) and len(more) <= 1


def test_a_rank_that_never_comes_is_a_failure_and_no_bad_input(launch):
    """Batch scripts retry what ends with 1."""
    (alone,) = launch([0], 2)
    with pytest.raises(
        RanksMissing,
        match=r"1 of 2 ranks have not started: 1 \(RANK=0, WORLD_SIZE=2; to run alone, unset these variables\)"
        r" after 0.00\d+ minutes: look at their logs",
    ) as found:
        alone.agree("settings", {}, timeout_s=0.3)
    assert exit_code(found.value) == 1
    assert exit_code(ConnectionResetError()) == exit_code(TimeoutError()) == 1
    assert exit_code(dist.DistBackendError("NCCL")) == exit_code(torch.AcceleratorError("ECC error")) == 1
    assert exit_code(ValueError("lr=-1")) == exit_code(OSError("no such file")) == 2


def test_without_torchrun_rank_0_keeps_the_store(launch, port):
    (late,) = launch([1], 2, environ={}, port=port)
    variables = "(RANK=1, WORLD_SIZE=2; to run alone, unset these variables)"
    assert (
        late._missing("settings")
        == f"rank 0 has not started: nothing listens at 127.0.0.1:{port} {variables}"
    )
    (agents,) = launch([1], 2, environ={"TORCHELASTIC_USE_AGENT_STORE": "True"}, port=port)
    assert "where torchrun should (TORCHELASTIC_USE_AGENT_STORE=True)" in agents._missing("settings")
    agents.close()
    (first,) = launch([0], 2, environ={}, port=port)
    agreed = everywhere(lambda one: one.agree("settings", {"a": 1}, timeout_s=100), (first,), (late,))
    assert agreed == [None, None]
    (other,) = launch([0], 2, environ={}, port=port)
    with pytest.raises(ValueError, match=f"cannot listen at .*MASTER_PORT={port}.*a second rank 0"):
        other.agree("settings", {}, timeout_s=100)


def test_one_rank_waits_for_nobody():
    alone = SimpleNamespace(rank=0, world_size=1, local_rank=0, master_addr="", master_port=0, variables=())
    with StartupBarrier(alone, {}) as one:
        one.agree("settings", {"a": 1})
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
    monkeypatch.setattr(startup_barrier, "FIRST_LINE_S", 0.3)
    monkeypatch.setattr(startup_barrier, "_GIVE_UP_S", 1.0)
    rank, other = launch([0, 1], 2)
    assert until(lambda: rank._connected.is_set())
    other.close()  # on a busy machine it would give up too
    rank._store = stopped = StoppedStore()
    assert until(lambda: rank.ends)
    stopped.released.set()
    said = capsys.readouterr().err
    assert rank.ends == [1] and said.count("error: the store at 127.0.0.1:") == 1
    assert said.count(" does not answer: its host, rank 0 or torchrun, is suspended") >= 1


def test_a_failure_is_said_though_the_store_does_not_answer(launch, monkeypatch):
    monkeypatch.setattr(startup_barrier, "_ANSWER_S", 0.2)
    (rank, _) = launch([0, 1], 2)
    assert until(lambda: rank._connected.is_set())
    rank.close()
    rank._store, said = StoppedStore(), []
    rank.tell(1, "failed", lambda: said.append("failed"))
    assert said == ["failed"]
    rank._store.released.set()


def test_an_address_that_is_not_known_is_refused(launch, monkeypatch):
    """torch warns at once, and tries for as long as it may."""
    monkeypatch.setattr(startup_barrier, "_CONNECT_S", 0.5)
    environ = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    (rank,) = launch([1], 2, environ, address="nobody.invalid")
    with pytest.raises(ValueError, match=r"MASTER_ADDR='nobody.invalid' is not known.*rank 0's node"):
        rank.agree("settings", {}, timeout_s=100)


def test_restarts_on_several_nodes_need_a_store_that_is_not_shared():
    several = {
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "2",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"max-restarts=3.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        check_restarts(several)
    for name, value in (
        ("GROUP_WORLD_SIZE", "1"),
        ("TORCHELASTIC_MAX_RESTARTS", "0"),
        ("TORCHELASTIC_USE_AGENT_STORE", "False"),
    ):
        check_restarts({**several, name: value})
