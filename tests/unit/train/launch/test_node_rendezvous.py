"""Nodes keep the numbers that they were given, and find each other where node 0 listens."""

from __future__ import annotations

import inspect
import socket
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch.distributed import DistError, HashStore, TCPStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from megatron_fp8.train.launch import node_rendezvous
from megatron_fp8.train.launch.node_rendezvous import Nodes, _Numbered


def of_torch(store: HashStore, number: int) -> Any:
    """A rendezvous that numbers this node by its name."""
    return mock.Mock(next_rendezvous=lambda: SimpleNamespace(store=store, rank=number, world_size=2))


def test_a_node_has_the_number_it_was_given():
    store = HashStore()
    places = []
    ids = []
    for number, host in ((0, "localhost"), (1, "node0")):
        numbered = _Numbered(of_torch(store, 1 - number), Nodes(2, number, host, 29500))
        info = numbered.next_rendezvous()
        ids.append(numbered.get_run_id())
        assert (info.rank, info.world_size) == (number, 2)
        places.append((info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port))
    assert [host for host, _ in places] == ["localhost", "node0"] and places[0][1] == places[1][1]
    assert ids[0] == ids[1] and len(ids[0]) == 32


def test_two_nodes_of_one_number_are_refused():
    store = HashStore()
    _Numbered(of_torch(store, 0), Nodes(2, 0, "node0", 29500)).next_rendezvous()
    with pytest.raises(ValueError, match="two nodes have --node-rank 0: give each of the 2 its own"):
        _Numbered(of_torch(store, 1), Nodes(2, 0, "node0", 29500)).next_rendezvous()


def test_a_port_that_is_taken_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen at --master 127.0.0.1:{port} .*a free port"):
            Nodes(2, 0, "127.0.0.1", port).rendezvous(print)


def test_a_node_that_never_listens_is_named(monkeypatch):
    monkeypatch.setattr(node_rendezvous, "JOIN_S", 0)
    monkeypatch.setattr(node_rendezvous, "FIRST_LINE_S", 0.1)
    said: list[str] = []
    with (
        socket.socket() as bound,
        pytest.raises(DistError, match=r"nothing listens at --master 127.0.0.1:\d+ "),
    ):
        bound.bind(("127.0.0.1", 0))  # and does not listen
        Nodes(2, 1, "127.0.0.1", bound.getsockname()[1]).rendezvous(said.append)


@pytest.mark.parametrize(
    "talks", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100]
)
def test_a_program_of_another_kind_at_node_0_is_said(monkeypatch, capfd, talks):
    """Torch tried for a minute and longer, deaf to signals, and printed stacks of C++."""
    monkeypatch.setattr(node_rendezvous, "STRANGER_S", 1.0)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port, kept = stranger.getsockname()[1], []

        def answer() -> None:
            while True:
                try:
                    kept.append(stranger.accept()[0])
                    kept[-1].sendall(talks)
                except OSError:  # whoever asked has left, or the test is over
                    if stranger.fileno() < 0:
                        return

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(
            DistError, match=f"a process listens at --master 127.0.0.1:{port} that is no launcher"
        ):
            Nodes(2, 1, "127.0.0.1", port).rendezvous(print)
        stranger.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    for one in kept:
        one.close()
    assert capfd.readouterr() == ("", "")


def test_a_store_is_one():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert node_rendezvous._is_store("127.0.0.1", store.port)


def test_a_rendezvous_reads_no_stacks(monkeypatch):
    """Torch's own name of a method reads them twice, in each record that it makes."""
    torch_s, named = dynamic_rendezvous.get_method_name, []
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", torch_s)  # put back afterwards
    monkeypatch.setattr(
        dynamic_rendezvous, "construct_and_record_rdzv_event", lambda **record: named.append(record["name"])
    )
    monkeypatch.setattr(inspect, "stack", lambda: pytest.fail("a stack was read"))
    rendezvous = Nodes().rendezvous(print)
    assert rendezvous.next_rendezvous().world_size == 1
    rendezvous.shutdown()
    assert {"DynamicRendezvousHandler.next_rendezvous", "_DistributedRendezvousOpExecutor.run"} <= set(named)
