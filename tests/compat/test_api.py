"""The ten documented functions: names, signatures, bools instead of exceptions.

Each role does its work.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest

import taskd
from taskd import api
from taskd.agent.clients import callbacks
from taskd.api import taskd_agent_api as agent_module
from taskd.api import taskd_manager_api as manager_module
from taskd.api import taskd_proxy_api as proxy_module
from taskd.api import taskd_worker_api as worker_module
from taskd.config import CallbackAgentConfig, LogConfig, ManagerConfig, RelayConfig
from taskd.core import events
from taskd.manager.service import Service
from taskd.transport import zeromq
from taskd.wire import codec, translate
from taskd.worker import life

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 20.0
ROOT = pathlib.Path(taskd.__file__).resolve().parents[1]
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


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """No variable of ours, nothing initialised before or after."""
    for name in list(os.environ):
        if name.startswith("TASKD_") or name in (
            "RANK",
            "LOCAL_WORLD_SIZE",
            "POD_IP",
            "MINDX_TASK_ID",
            "MS_NODE_RANK",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TASKD_LOG_PATH", str(tmp_path / "log"))
    logger = logging.getLogger("taskd")
    logger.propagate = True
    yield
    if worker_module._held.is_initialised:
        api.destroy_taskd_worker()
    if proxy_module._held.relay is not None:
        api.destroy_taskd_proxy()
    if manager_module._held.service is not None:
        manager_module._held.service._link.close()
    manager_module._held.service, manager_module._held.is_off, agent_module._held.agent = (
        None,
        False,
        None,
    )
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


def await_fact(fact, what: str) -> None:
    """Waits on an event that nobody sets: a wait with a deadline, not a sleep."""
    deadline, pause = time.monotonic() + LIMIT_S, threading.Event()
    while not fact():
        assert time.monotonic() < deadline, what
        pause.wait(0.01)


def free_port() -> str:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class RunningManager:
    """A manager in a thread of this process."""

    def __init__(self, tmp_path) -> None:
        self.router = zeromq.Router("127.0.0.1:0")
        self.address = self.router.address
        self.port = self.address.rpartition(":")[2]
        self.service = Service(
            ManagerConfig("default_job", self.address, 30.0, None, LogConfig(tmp_path / "log")),
            self.router,
        )
        self.thread = threading.Thread(target=self.service.run)

    def end(self) -> None:
        """Tell it, over the wire, that its job is over."""
        envelope = codec.Envelope("default_job", "agent", 0, None, "end", 0, 0, "end")
        dealer = zeromq.Dealer(self.address, "end")
        registration = events.AgentRegistered(
            0.0, "", 0, "end", 1, 1, 0, 0, 0, (events.WorkerReport(0, 0, "running"),)
        )
        for number, event in enumerate(
            (registration, events.AgentLeft(0.0, "", 0, "failed", "")), 1
        ):
            message = translate.event_to_message(event)
            dealer.send(None, codec.encode(dataclasses.replace(envelope, sequence=number), message))
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        dealer.close()


@pytest.fixture
def later(tmp_path):
    """One that has its port; the test starts its thread."""
    running = RunningManager(tmp_path)
    yield running
    if running.thread.is_alive():
        running.end()


@pytest.fixture
def manager(later):
    later.thread.start()
    return later


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
    assert api.init_taskd_manager({"node_num": 2, "cluster_infos": {}}) is True
    assert api.init_taskd_proxy({"ListenPort": free_port(), "UpstreamAdr": "::1"}) is True
    assert api.init_taskd_agent(
        {"Framework": "PyTorch", "ServerRank": "0", "other": ""}, Launcher([])
    )
    said = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    expected = (
        "init_taskd_manager: 'node_num' .* has no effect: did you mean node_nums\\?",
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


# ---------------------------------------------------------------- agent


class State(str, Enum):
    """As torch's WorkerState."""

    HEALTHY = "HEALTHY"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclasses.dataclass
class Failure:
    exitcode: int


@dataclasses.dataclass
class RunResult:
    """As torch's."""

    state: State
    failures: dict[int, Failure] = dataclasses.field(default_factory=dict)

    def is_failed(self) -> bool:
        return self.state is State.FAILED


class Thing:
    """Anything with these attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__ |= attributes


class Launcher:
    """A SimpleElasticAgent as far as it is used.

    `lives`: what the monitor says in each life of the group, from when on `may_begin` says so.
    """

    def __init__(
        self,
        *lives: list[RunResult],
        max_restarts: int = 5,
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        self._may_begin = may_begin
        workers = [Thing(global_rank=rank, world_size=2, id=100 + rank) for rank in range(2)]
        self._worker_group = Thing(
            spec=Thing(max_restarts=max_restarts, monitor_interval=0.01),
            workers=workers,
            group_world_size=1,
        )
        self._remaining_restarts = max_restarts
        self.lives = list(lives)
        self.calls: list[str] = []

    def _initialize_workers(self, group) -> None:
        self.calls.append("start")
        self.present = list(self.lives.pop(0))

    def _stop_workers(self, group) -> None:
        self.calls.append("stop")

    def _restart_workers(self, group) -> None:
        self.calls.append("restart")
        self.present = list(self.lives.pop(0))

    def _monitor_workers(self, group) -> RunResult:
        if not self._may_begin():
            return HEALTHY
        return self.present.pop(0) if len(self.present) > 1 else self.present[0]

    def _exit_barrier(self) -> None:
        self.calls.append("barrier")


def is_connected() -> bool:
    """Whether its manager has accepted the agent: before, it waits for none, or two seconds."""
    link = agent_module._held.agent._manager
    return link is not None and link.session.is_registered


HEALTHY, SUCCEEDED = RunResult(State.HEALTHY), RunResult(State.SUCCEEDED)


def failed(code: int = 3) -> RunResult:
    return RunResult(State.FAILED, {1: Failure(code)})


def init(launcher: Any, port: str = "1") -> bool:
    return api.init_taskd_agent(
        {"Framework": "PyTorch", "ServerRank": "0", "UpstreamPort": port}, launcher
    )


@pytest.mark.parametrize(
    ("config", "cls"),
    [
        ({}, Launcher([])),
        (None, Launcher([])),
        ({"Framework": "JAX"}, Launcher([])),
        ({"Framework": "PyTorch"}, Launcher([])),
        ({"Framework": "PyTorch", "ServerRank": "0"}, None),
        ({"Framework": "PyTorch", "ServerRank": "0"}, object()),
        ({"Framework": "PyTorch", "ServerRank": "x"}, Launcher([])),
        ({"Framework": "PyTorch", "ServerRank": "0", "UpstreamAddr": "a:b:c"}, Launcher([])),
        ({"Framework": "PyTorch", "ServerRank": "0", "UpstreamPort": 9602}, Launcher([])),
        ([], Launcher([])),
    ],
)
def test_a_wrong_agent_config_is_false(config, cls) -> None:
    assert api.init_taskd_agent(config, cls) is False
    assert api.register_func("MONITOR", print) is False
    assert api.start_taskd_agent() is None


def test_mindspore_registers_its_functions_and_is_told_which_are_missing() -> None:
    """As msrun asks, see tests/unit/msrun; here it has registered one of four."""
    from taskd.api.taskd_agent_api import init_taskd_agent, register_func, start_taskd_agent

    assert init_taskd_agent({"Framework": "MindSpore"}) is True
    assert register_func("MONITOR", print) is True
    assert register_func("KILL_WORKER", "no function") is False
    missing = "KILL_WORKER, START_ALL_WORKER, START_WORKER_LIST"
    with pytest.raises(SystemExit, match=f"msrun has not registered {missing}"):
        start_taskd_agent()


def test_mindspore_is_told_at_once_that_it_has_to_manage_without_us(monkeypatch, caplog) -> None:
    """After False msrun tries MSRunPlugin, and then works alone."""
    from taskd.errors import ConfigError
    from taskd.python.framework.agent.ms_mgr.msrun_plugin import MSRunPlugin

    monkeypatch.setenv("TASKD_PROCESS_ENABLE", "off")
    assert api.init_taskd_agent({"Framework": "MindSpore"}) is False
    assert "TASKD_PROCESS_ENABLE is off: msrun looks after its processes itself" in caplog.text
    assert api.register_func("MONITOR", print) is False
    assert api.start_taskd_agent() is None
    with pytest.raises(ConfigError):
        MSRunPlugin()


def test_the_rank_of_the_environment_is_the_default(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "4")
    assert api.init_taskd_agent({"Framework": "PyTorch"}, Launcher([])) is True
    assert agent_module._held.agent._config.node_rank == 4


def test_callbacks_must_be_callable() -> None:
    assert init(Launcher([]))
    assert api.register_func("MONITOR", "x") is False
    assert api.register_func(5, print) is False
    assert api.register_func("MONITOR", print) is True
    assert api.register_func("ANYTHING", print) is True


def test_a_run_without_fault_returns_the_launchers_result(manager) -> None:
    launcher = Launcher([HEALTHY] * 5 + [SUCCEEDED], may_begin=is_connected)
    assert init(launcher, manager.port)
    assert api.start_taskd_agent() is SUCCEEDED
    assert launcher.calls == ["start", "barrier"]
    manager.thread.join(LIMIT_S)
    assert manager.service.result is True


def test_a_failure_is_reported_and_the_manager_restarts_the_group(manager) -> None:
    lives = [HEALTHY, failed()], [HEALTHY] * 5 + [SUCCEEDED]
    launcher = Launcher(*lives, may_begin=is_connected)
    assert init(launcher, manager.port)
    assert api.start_taskd_agent() is SUCCEEDED
    assert launcher.calls == ["start", "stop", "start", "barrier"]
    assert launcher._remaining_restarts == 4
    manager.thread.join(LIMIT_S)
    assert manager.service.result is True
    assert manager.service._machine.restarts_used == 1


def test_a_manager_that_comes_after_a_restart_alone_is_told_of_it(later, monkeypatch) -> None:
    """What waited for it says how the workers were when nobody answered."""
    monkeypatch.setenv("TASKD_FAULT_TIMEOUT", "3")
    launcher = Launcher([failed()], [failed()], [SUCCEEDED])
    restart = launcher._restart_workers
    launcher._restart_workers = lambda group: (restart(group), later.thread.start())
    assert init(launcher, later.port)
    assert api.start_taskd_agent() is SUCCEEDED
    assert launcher.calls == ["start", "restart", "stop", "start", "barrier"]
    later.thread.join(LIMIT_S)
    assert later.service.result is True
    assert later.service._machine.restarts_used == 2


def test_the_same_failure_again_and_again_ends_the_job(manager) -> None:
    launcher = Launcher(*([HEALTHY, failed()] for _ in range(5)), may_begin=is_connected)
    assert init(launcher, manager.port)
    result = api.start_taskd_agent()
    assert result.is_failed()
    assert result.failures[1].exitcode == 3
    assert launcher.calls == ["start", "stop", "start", "stop", "start", "stop"]
    manager.thread.join(LIMIT_S)
    assert manager.service.result is False


def test_registered_callbacks_are_called_in_place_of_the_methods(manager) -> None:
    launcher, calls = Launcher([failed()], [SUCCEEDED], may_begin=is_connected), []
    assert init(launcher, manager.port)
    for operator, method in callbacks.DEFAULTS.items():

        def call(group, operator=operator, method=method):
            if operator != "MONITOR":
                calls.append(operator)
            return getattr(launcher, method)(group)

        assert api.register_func(operator, call)
    assert api.start_taskd_agent() is SUCCEEDED
    assert calls == ["START_ALL_WORKER", "KILL_WORKER", "START_ALL_WORKER"]


def test_without_a_manager_it_restarts_as_torch_does_until_the_budget_is_spent(monkeypatch) -> None:
    monkeypatch.setenv("TASKD_FAULT_TIMEOUT", "0.5")
    launcher = Launcher([failed(1)], [failed(2)], max_restarts=1)
    assert init(launcher)
    result = api.start_taskd_agent()
    assert result.failures[1].exitcode == 2
    assert launcher.calls == ["start", "restart", "stop"]


def test_an_interrupted_run_says_goodbye(manager) -> None:
    class Terminated(BaseException):
        pass

    launcher = Launcher([HEALTHY])
    assert init(launcher, manager.port)
    polls = iter(range(10**6))

    def monitor(group):
        if manager.service._sessions.agents and next(polls) > 3:
            raise Terminated
        return HEALTHY

    api.register_func("MONITOR", monitor)
    with pytest.raises(Terminated):
        api.start_taskd_agent()
    manager.thread.join(LIMIT_S)
    assert manager.service.result is False


@pytest.mark.slow
def test_torchs_own_agent_is_driven_by_the_manager(manager, tmp_path) -> None:
    """Real processes.

    One rank fails in its first life, the manager restarts the group, torchrun ends well.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        f"pathlib.Path({str(tmp_path)!r}, 'life-' + count + '-' + "
        "os.environ['RANK']).touch()\n"
        "sys.exit(3 if count == '0' and os.environ['RANK'] == '1' else 0)\n"
    )
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent\n"
        "from torch.distributed import run\n"
        "from taskd.api import init_taskd_agent, start_taskd_agent\n"
        "def invoke(self, role='default'):\n"
        f"    config = {{'Framework': 'PyTorch', 'ServerRank': '0', 'UpstreamPort': "
        f"'{manager.port}'}}\n"
        "    assert init_taskd_agent(config, self)\n"
        "    return start_taskd_agent()\n"
        "LocalElasticAgent._invoke_run = invoke\n"
        "run.main()\n"
    )
    finished = subprocess.run(
        [
            sys.executable,
            str(launcher),
            "--standalone",
            "--nproc-per-node=2",
            "--max-restarts=3",
            str(script),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TASKD_FAULT_TIMEOUT": "300",  # it waits for its manager as long as that may take
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert {path.name for path in tmp_path.glob("life-*")} >= {"life-0-1", "life-1-0", "life-1-1"}
    manager.thread.join(LIMIT_S)
    assert manager.service.result is True
