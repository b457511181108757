"""Restarted ranks meet each other, and not the dead."""

import re
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_fp8.train.launch import rendezvous
from megatron_fp8.train.launch.rendezvous import Rendezvous, check_restarts
from tests.support.ports import held_ports

TORCHRUN = {
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "1",
}  # fmt: skip
TIMEOUT = timedelta(seconds=100)


def test_an_attempt_does_not_see_what_an_earlier_one_wrote():
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)

    def attempt(number):
        environ = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": number}
        return Rendezvous(0, "127.0.0.1", agent.port, environ).connect()

    attempt("0").set("address of rank 0", "of the dead")
    assert attempt("0").get("address of rank 0") == b"of the dead"
    assert not attempt("1").check(["address of rank 0"])


def test_under_srun_rank_0_keeps_the_store_and_nobody_comes_before_it():
    with held_ports(1) as (port,):
        other = Rendezvous(1, "127.0.0.1", port, {"SLURM_PROCID": "1"})
        assert other.connect() is None and not other.hosted
        first = Rendezvous(0, "127.0.0.1", port, {"SLURM_PROCID": "0"})
        first.connect().set("a", "b")
        assert first.hosted and other.connect().get("a") == b"b"


def test_a_name_that_is_not_known_is_said_once_and_refused_in_time(monkeypatch, capfd):
    """torch would try for 40 s without a word. Where nodes are made for a job, a name may become known a little later."""
    known = []

    def look_up(host, port, **_):
        if not known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(
        dist, "TCPStore", lambda *_, **__: pytest.fail("torch is asked for a name that nobody knows")
    )
    for rank in (0, 1):
        place = Rendezvous(rank, "nobody.invalid", 29500, {})
        assert place.connect() is None and place.connect() is None
        assert re.fullmatch(
            r"waiting +MASTER_ADDR='nobody.invalid' is not known on \S+ \(Name or service not known\); trying for 60 s\n",
            capfd.readouterr().err,
        )
    monkeypatch.setattr(rendezvous, "_NAMED_S", 0.0)
    with pytest.raises(ValueError, match=r"MASTER_ADDR='nobody.invalid' is not known.*rank 0's node"):
        place.connect()
    known.append(True)
    monkeypatch.setattr(place, "_answers", lambda: False)
    assert place.connect() is None


def test_restarts_on_several_nodes_need_a_store_that_is_not_shared():
    check_restarts(TORCHRUN)
    several = {**TORCHRUN, "GROUP_WORLD_SIZE": "2"}
    with pytest.raises(ValueError, match=r"max-restarts=3.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        check_restarts(several)
    check_restarts({**several, "TORCHELASTIC_MAX_RESTARTS": "0"})
    check_restarts({**several, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    check_restarts({})
