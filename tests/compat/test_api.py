"""The ten documented functions: names, signatures, bools instead of exceptions.

Each role does its work.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

import taskd
from taskd import api
from taskd.api import taskd_manager_api as manager_module
from taskd.api import taskd_proxy_api as proxy_module
from taskd.api import taskd_worker_api as worker_module
from taskd.config import CallbackAgentConfig, ManagerConfig, RelayConfig
from taskd.transport import zeromq
from taskd.worker import life
from tests.compat.launcher import Launcher
from tests.compat.running import await_fact, free_port

ROOT = pathlib.Path(taskd.__file__).resolve().parents[1]

pytestmark = pytest.mark.usefixtures("clean")

NAMES = (
    "destroy_taskd_proxy",
    "destroy_taskd_worker",
    "init_taskd_agent",
    "init_taskd_manager",
    "init_taskd_proxy",
    "init_taskd_worker",
    "register_func",
    "start_taskd_agent",
    "start_taskd_manager",
    "start_taskd_worker",
)


# ---------------------------------------------------------------- names


def test_the_package_has_a_version_and_exactly_the_ten_functions() -> None:
    assert isinstance(taskd.__version__, str)
    assert tuple(sorted(api.__all__)) == NAMES
    assert all(callable(getattr(api, name)) for name in NAMES)


@pytest.mark.parametrize("role", ["manager", "worker", "agent", "proxy"])
def test_each_function_can_be_imported_from_the_module_of_its_role(role: str) -> None:
    module = importlib.import_module(f"taskd.api.taskd_{role}_api")
    own = {name for name in NAMES if name.endswith(f"_taskd_{role}")}
    own |= {"register_func"} if role == "agent" else set()
    assert {name for name in own if getattr(module, name) is getattr(api, name)} == own
    assert own


def test_signatures_are_the_documented_ones() -> None:
    def parameters(function) -> dict[str, Any]:
        return {name: item.default for name, item in inspect.signature(function).parameters.items()}

    needed = inspect.Parameter.empty
    assert parameters(api.init_taskd_worker) == {
        "rank_id": needed,
        "upper_limit_of_disk_in_mb": 5000,
        "framework": "pt",
    }
    assert parameters(api.init_taskd_agent) == {"config": None, "cls": None}
    assert (
        parameters(api.init_taskd_manager) == parameters(api.init_taskd_proxy) == {"config": needed}
    )
    assert parameters(api.register_func) == {"operator": needed, "func": needed}
    for name in (
        "start_taskd_worker",
        "destroy_taskd_worker",
        "start_taskd_agent",
        "destroy_taskd_proxy",
        "start_taskd_manager",
    ):
        assert parameters(getattr(api, name)) == {}


def test_importing_the_api_loads_neither_torch_nor_zmq() -> None:
    code = (
        "import sys, taskd.api; print([name for name in ('torch', 'zmq', "
        "'taskd.manager.service') if name in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
        == "[]\n"
    )


# ---------------------------------------------------------------- manager


def test_a_manager_needs_init_before_start() -> None:
    assert api.start_taskd_manager() is False


@pytest.mark.parametrize(
    "config", [{"node_nums": "2"}, {"job_id": 1}, {"proc_per_node": 0}, "x", {"cluster_infos": 3}]
)
def test_a_wrong_manager_config_is_false_and_says_why(config, caplog) -> None:
    assert api.init_taskd_manager(config) is False
    assert "is not accepted: expected" in caplog.text


def test_a_taken_port_is_false(manager, monkeypatch) -> None:
    monkeypatch.setenv("TASKD_PORT", manager.port)
    assert api.init_taskd_manager({}) is False
    assert api.start_taskd_manager() is False


def test_a_manager_is_initialised_once_with_all_documented_keys(monkeypatch) -> None:
    monkeypatch.setenv("TASKD_PORT", free_port())
    config = {
        "job_id": "j",
        "node_nums": 1,
        "proc_per_node": 2,
        "plugin_dir": "",
        "fault_recover": "",
        "taskd_enable": "on",
        "cluster_infos": {"ip": "", "port": "", "name": "", "role": ""},
    }
    assert api.init_taskd_manager(config) is True
    assert api.init_taskd_manager(config) is False


def test_a_key_that_nobody_reads_is_named_with_the_one_that_was_meant(monkeypatch, capsys) -> None:
    monkeypatch.setenv("TASKD_PORT", free_port())
    monkeypatch.setenv("TASKD_FAULT_TIMOUT", "9")
    assert api.init_taskd_manager({"node_num": 2, "cluster_infos": {}}) is True
    assert api.init_taskd_proxy({"ListenPort": free_port(), "UpstreamAdr": "::1"}) is True
    assert api.init_taskd_agent(
        {"Framework": "PyTorch", "ServerRank": "0", "other": ""}, Launcher([])
    )
    said = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    expected = (
        "init_taskd_manager: 'node_num' .* has no effect: did you mean node_nums\\?",
        "TASKD_FAULT_TIMOUT is read by nobody: did you mean TASKD_FAULT_TIMEOUT\\?",
        "init_taskd_proxy: 'UpstreamAdr' .* has no effect: did you mean UpstreamAddr\\?",
        "init_taskd_agent: 'other' .* has no effect; it knows Framework, UpstreamAddr, ",
    )
    assert len(said) == len(expected)
    for line, pattern in zip(said, expected, strict=True):
        assert re.search(pattern, line), line


def test_the_documented_keys_are_those_that_are_read() -> None:
    page = (ROOT / "docs/compat.md").read_text().partition("Keys of `init_taskd_manager`:")[2]
    manager, _, others = page.partition("Operators of")[0].partition("Keys of `init_taskd_agent`")
    items = re.findall(r"(?m)^- (`.*)", manager)
    named = [name for item in items for name in re.findall(r"`([a-z_]+)`", item)]
    assert set(named) == {*ManagerConfig.KEYS, "default_job"}
    named = re.findall(r"`(\w+)`", " ".join(re.findall(r"(?m)^\| (`[^|]*)\|", others)))
    assert set(named) == {*RelayConfig.KEYS, *CallbackAgentConfig.KEYS}


def test_a_pod_ip_that_nobody_knows_is_named_with_a_way_on(monkeypatch, capsys) -> None:
    monkeypatch.setenv("POD_IP", "no.such.host")
    assert api.init_taskd_manager({}) is False
    said = capsys.readouterr().err
    assert "no.such.host:9601 cannot be bound: this host knows no such name" in said
    assert "set POD_IP or TASKD_BIND_ADDR to an IP address of this host" in said


def test_a_manager_that_is_switched_off_has_nothing_to_do(monkeypatch) -> None:
    monkeypatch.setenv("TASKD_PROCESS_ENABLE", "off")
    assert api.init_taskd_manager({}) is True
    assert api.start_taskd_manager() is True


def test_an_unexpected_error_is_false_with_a_traceback(monkeypatch, caplog) -> None:
    class Broken:
        def run(self) -> bool:
            raise RuntimeError("broken")

    monkeypatch.setattr(manager_module._held, "service", Broken())
    assert api.start_taskd_manager() is False
    assert "RuntimeError: broken" in caplog.text


# ---------------------------------------------------------------- worker


@pytest.mark.parametrize(
    "arguments", [(-1,), ("0",), (True,), (None,), (0, -1), (0, "5"), (0, 5, "tf"), (0, 5, None)]
)
def test_wrong_worker_arguments_are_false(arguments, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert api.init_taskd_worker(*arguments) is False
    assert api.start_taskd_worker() is False
    assert api.destroy_taskd_worker() is False


@pytest.mark.parametrize(
    ("framework", "environment"),
    [
        ("pt", {}),
        ("pt", {"RANK": "0"}),
        ("pt", {"RANK": "-1", "LOCAL_WORLD_SIZE": "1"}),
        ("pt", {"RANK": "a", "LOCAL_WORLD_SIZE": "1"}),
        ("ms", {}),
        ("ms", {"MS_NODE_RANK": "-2"}),
    ],
)
def test_a_worker_without_a_usable_node_rank_is_false(framework, environment, monkeypatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert api.init_taskd_worker(0, framework=framework) is False


def test_a_worker_without_agent_joins_the_manager_and_leaves(manager, monkeypatch) -> None:
    for name, value in (
        ("RANK", "3"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("TASKD_MANAGER_ADDR", manager.address),
    ):
        monkeypatch.setenv(name, value)
    assert api.init_taskd_worker(3) is True
    assert api.start_taskd_worker() is True
    await_fact(lambda: worker_module._held.presence.has_joined, "the worker did not join")
    assert set(manager.service._sessions.workers) == {3}
    assert api.init_taskd_worker(3) is True
    assert api.destroy_taskd_worker() is True
    assert api.destroy_taskd_worker() is False
    assert not [thread for thread in threading.enumerate() if thread.name == "taskd-presence"]


def test_a_worker_does_not_wait_for_a_manager_that_is_not_there(monkeypatch) -> None:
    for name, value in (("MS_NODE_RANK", "0"), ("TASKD_MANAGER_ADDR", "127.0.0.1:1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(zeromq, "_LINGER_MS", 60_000)  # what its last words would be waited for
    began = time.monotonic()
    assert api.init_taskd_worker(0, framework="ms") is True
    assert api.destroy_taskd_worker() is True
    assert time.monotonic() - began < 50


def test_a_forked_child_leaves_the_parents_worker_alone(manager, monkeypatch) -> None:
    for name, value in (
        ("RANK", "0"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("TASKD_MANAGER_ADDR", manager.address),
    ):
        monkeypatch.setenv(name, value)
    api.init_taskd_worker(0)
    await_fact(lambda: worker_module._held.presence.has_joined, "the worker did not join")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if api.destroy_taskd_worker() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert worker_module._held.presence._thread.is_alive()


def test_a_worker_of_our_agent_is_attached_to_its_runtime(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    life.set_current(life.Life(rank=2, world_size=4, incarnation=0))
    try:
        assert api.init_taskd_worker(1) is False
        assert api.init_taskd_worker(2) is True
        assert worker_module._held.presence is None
        assert api.start_taskd_worker() is True
        assert api.destroy_taskd_worker() is True
    finally:
        life.set_current(None)


# ---------------------------------------------------------------- proxy


@pytest.mark.parametrize(
    "config",
    [
        {"ListenAddr": "no.such.host"},
        {"ListenPort": 9602},
        {"UpstreamAddr": ""},
        {"UpstreamPort": "x"},
        {"ServerRank": "-1"},
        5,
    ],
)
def test_a_wrong_proxy_config_is_false(config) -> None:
    assert api.init_taskd_proxy(config) is False
    assert api.destroy_taskd_proxy() is False


def test_a_worker_reaches_the_manager_through_the_proxy(manager, monkeypatch) -> None:
    port = free_port()
    config = {
        "ListenAddr": "127.0.0.1",
        "ListenPort": port,
        "UpstreamAddr": "127.0.0.1",
        "UpstreamPort": manager.port,
    }
    assert api.init_taskd_proxy(config) is True
    assert api.init_taskd_proxy(config) is False
    for name, value in (
        ("RANK", "7"),
        ("LOCAL_WORLD_SIZE", "8"),
        ("TASKD_MANAGER_ADDR", f"127.0.0.1:{port}"),
    ):
        monkeypatch.setenv(name, value)
    assert api.init_taskd_worker(7) is True
    await_fact(
        lambda: worker_module._held.presence.has_joined, "the worker did not join through the proxy"
    )
    assert set(manager.service._sessions.workers) == {7}
    assert api.destroy_taskd_worker() is True
    assert api.destroy_taskd_proxy() is True
    assert not [thread for thread in threading.enumerate() if thread.name == "taskd-relay"]


def test_the_proxy_forgets_clients_that_have_gone(manager, monkeypatch) -> None:
    from taskd.agent.clients import relay as relay_module

    assert api.init_taskd_proxy({"ListenPort": free_port(), "UpstreamPort": manager.port}) is True
    relay = proxy_module._held.relay
    dealer = zeromq.Dealer(relay.address, "gone")
    dealer.send(None, b"garbage is passed on like anything else")
    await_fact(lambda: manager.service._refusals.counts["malformed"] == 1, "not passed on")
    monkeypatch.setattr(relay_module, "_SILENCE_S", 0.2)
    dealer.send(None, b"last words")
    await_fact(
        lambda: manager.service._refusals.counts["malformed"] == 2 or not relay._dealers,
        "neither passed on nor forgotten",
    )
    dealer.close()
    await_fact(lambda: not relay._dealers, "not forgotten")
