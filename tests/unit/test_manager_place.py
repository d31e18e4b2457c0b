"""Where the agent of the first node starts a manager, and who does not."""

from __future__ import annotations

import socket

import pytest

from taskd.config import AgentConfig
from taskd.torchrun.settings import manager_place, settings_of, with_manager_at

HERE, ELSEWHERE = "127.0.0.2", "192.0.2.1"  # an address of this host, and one of no host


def place(monkeypatch, address: str, master: str, node_rank: int, nodes: int, **env: str):
    for name in ("TASKD_BIND_ADDR", "POD_IP", "LOCAL_PROXY_ENABLE", "TASKD_PORT", "TASKD_MANAGER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    settings = AgentConfig.load({"TASKD_MANAGER_ADDR": address} | env)
    return manager_place(settings, master, node_rank=node_rank, node_count=nodes)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:9601", "127.0.0.1:9601"),
        ("localhost:9700", "127.0.0.1:9700"),
        ("[::1]:9601", "[::1]:9601"),
        (f"{ELSEWHERE}:9601", None),
    ],
)
def test_one_node_has_it_where_its_agent_looks(monkeypatch, address, expected) -> None:
    if address.startswith("[") and not _has_ipv6():
        pytest.skip("this host has no IPv6")
    assert place(monkeypatch, address, "localhost", 0, 1) == expected
    assert place(monkeypatch, address, "localhost", 0, 1, TASKD_MANAGER="off") is None


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "0.0.0.0:9700"),
        ({"POD_IP": HERE}, f"{HERE}:9700"),
        ({"TASKD_BIND_ADDR": "127.0.0.3", "POD_IP": HERE}, "127.0.0.3:9700"),
        ({"LOCAL_PROXY_ENABLE": "on", "POD_IP": HERE}, "127.0.0.1:9700"),
        ({"POD_IP": "a-name"}, "a-name:9700"),
        ({"TASKD_BIND_ADDR": "127.0.0.3:no"}, "127.0.0.1:9700"),
    ],
)
def test_several_nodes_have_it_where_a_manager_py_would_listen(monkeypatch, env, expected) -> None:
    assert place(monkeypatch, "127.0.0.1:9700", "localhost", 0, 2, **env) == expected


def test_nodes_that_meet_at_an_ipv6_address_reach_it_there(monkeypatch) -> None:
    if not _has_ipv6():
        pytest.skip("this host has no IPv6")
    assert place(monkeypatch, "127.0.0.1:9700", "::1", 0, 2) == "[::]:9700"
    assert place(monkeypatch, "127.0.0.1:9700", "::1", 0, 2, POD_IP=HERE) == f"{HERE}:9700"


def test_of_several_nodes_the_first_one_has_it(monkeypatch) -> None:
    assert place(monkeypatch, "127.0.0.1:9601", "localhost", 1, 2) is None
    assert place(monkeypatch, "127.0.0.1:9601", "", 1, 2) is None
    assert place(monkeypatch, f"{ELSEWHERE}:9601", ELSEWHERE, 0, 2) is None


def test_a_name_that_means_nothing_at_the_start_leaves_no_loopback_address(monkeypatch) -> None:
    """Others would be told to meet at the stores of their own hosts."""
    monkeypatch.delenv("POD_IP", raising=False)
    outward = settings_of(ELSEWHERE).own_address
    if outward == "127.0.0.1":
        pytest.skip("this host has no address but loopback")
    real, is_known = socket.getaddrinfo, False

    def resolve(host, *arguments, **named):
        if host == "first-node" and not is_known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(ELSEWHERE if host == "first-node" else host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    settings = settings_of("first-node")
    assert settings.own_address == "127.0.0.1"
    is_known = True
    assert with_manager_at(settings, "first-node:9601").own_address == outward


def _has_ipv6() -> bool:
    from taskd.torchrun.settings import _is_own

    return _is_own("[::1]")
