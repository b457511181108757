"""Names that are asked for, and those that no name server could know."""

import socket

import pytest

from megatron_fp8.train.launch import hosts
from megatron_fp8.train.launch.hosts import is_host, leads_here
from tests.support.ports import held_ports


@pytest.mark.parametrize(
    "name", ["node0", "a.b.example", "10.0.0.1", "::1", "fe80::1%eth0", "bücher", "x_y", "a" * 63]
)
def test_names(name):
    assert is_host(name)


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a\tb", "a\0b", "a..b", ".", "a" * 64, "\udcff", "http://a", "a\n"]
)
def test_no_names(name):
    assert not is_host(name)


ELSEWHERE = "192.0.2.1"  # of documentation: no machine has it


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_this_machine(name):
    assert leads_here(name, 29500)


def test_an_address_of_another_machine(monkeypatch):
    def refused(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", refused)
    with held_ports(1) as (port,):
        assert not leads_here(ELSEWHERE, port)


def test_an_address_that_leads_here_though_no_interface_has_it(monkeypatch):
    real = socket.create_connection
    monkeypatch.setattr(
        socket, "create_connection", lambda place, **options: real(("127.0.0.1", place[1]), **options)
    )
    with held_ports(1) as (port,):
        assert leads_here(ELSEWHERE, port)


def test_somebody_else_who_answers_there(monkeypatch):
    """As a proxy does, which takes every connection."""
    with socket.create_server(("127.0.0.1", 0)) as proxy, held_ports(1) as (port,):
        real = socket.create_connection
        monkeypatch.setattr(hosts, "_ANSWER_S", 0.2)
        monkeypatch.setattr(
            socket, "create_connection", lambda place, **options: real(proxy.getsockname(), **options)
        )
        assert not leads_here(ELSEWHERE, port)
