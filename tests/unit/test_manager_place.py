"""Where the agent of the first node starts a manager, and who does not."""

from __future__ import annotations

import pytest

from taskd.config import AgentConfig
from taskd.torchrun.settings import manager_place

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


def test_of_several_nodes_the_first_one_has_it(monkeypatch) -> None:
    assert place(monkeypatch, "127.0.0.1:9601", "localhost", 1, 2) is None
    assert place(monkeypatch, "127.0.0.1:9601", "", 1, 2) is None
    assert place(monkeypatch, f"{ELSEWHERE}:9601", ELSEWHERE, 0, 2) is None


def _has_ipv6() -> bool:
    from taskd.torchrun.settings import _is_own

    return _is_own("[::1]")
