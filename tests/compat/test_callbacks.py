"""The agent of a launcher that keeps its own processes: the manager decides, callbacks do it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading

import pytest

import taskd
from taskd import api
from taskd.agent.clients import callbacks
from taskd.api import taskd_agent_api as agent_module
from taskd.errors import TransportError
from tests.compat.launcher import HEALTHY, SUCCEEDED, Launcher, failed, init, is_connected
from tests.compat.running import LIMIT_S, await_fact

ROOT = pathlib.Path(taskd.__file__).resolve().parents[1]

pytestmark = pytest.mark.usefixtures("clean")


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


def test_a_run_that_is_over_before_it_is_connected_tells_its_manager(manager) -> None:
    launcher = Launcher([SUCCEEDED])
    assert init(launcher, manager.port)
    assert api.start_taskd_agent() is SUCCEEDED
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
    lives = [failed()], [failed()], [SUCCEEDED]
    launcher = Launcher(*lives, may_begin=lambda: launcher.calls == ["start"] or is_connected())
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


@pytest.mark.parametrize("operator", ["KILL_WORKER", "START_ALL_WORKER"])
def test_its_manager_hears_it_while_a_callback_takes_its_time(manager, operator: str) -> None:
    """Workers that ignore SIGTERM keep torch for 30 s, which is as long as a lease."""
    launcher = Launcher([failed()], [SUCCEEDED], may_begin=is_connected)
    assert init(launcher, manager.port)
    heard_at = manager.service._machine._state.leases._heard_at
    waited = []

    def call(group) -> None:
        if launcher.calls:
            began_at = heard_at[0]
            await_fact(lambda: heard_at[0] > began_at + 1, "no heartbeats while it is called")
            waited.append(operator)
        getattr(launcher, callbacks.DEFAULTS[operator])(group)

    assert api.register_func(operator, call)
    assert api.start_taskd_agent() is SUCCEEDED
    assert waited == [operator]
    assert launcher.calls == ["start", "stop", "start", "barrier"]


def test_it_does_not_register_again_in_the_middle_of_a_restart(manager) -> None:
    """The launcher has half of its workers then."""
    launcher = Launcher([failed()], [HEALTHY] * 3 + [SUCCEEDED], may_begin=is_connected)
    assert init(launcher, manager.port)
    agents = manager.service._sessions.agents

    def kill(group) -> None:
        workers, group.workers = group.workers, []
        session = agents.pop(0)  # as a manager that was started again
        doubts = agent_module._held.agent._manager.session
        await_fact(lambda: not doubts.is_registered, "it has not heard that it is unknown")
        assert 0 not in agents
        group.workers = workers
        assert session.ranks == {0, 1}
        launcher._stop_workers(group)

    assert api.register_func("KILL_WORKER", kill)
    assert api.start_taskd_agent() is SUCCEEDED
    assert launcher.calls == ["start", "stop", "start", "barrier"]
    manager.thread.join(LIMIT_S)
    assert manager.service.result is True


def test_what_fails_while_it_is_called_is_not_swallowed(manager, monkeypatch) -> None:
    launcher = Launcher([failed()], [SUCCEEDED], may_begin=is_connected)
    assert init(launcher, manager.port)

    def kill(_group) -> None:
        link, failing = agent_module._held.agent._manager, threading.Event()

        def fail():
            failing.set()
            raise TransportError("no descriptor is left")

        with monkeypatch.context() as patched:
            patched.setattr(link, "turn", fail)
            assert failing.wait(LIMIT_S)

    assert api.register_func("KILL_WORKER", kill)
    with pytest.raises(TransportError, match="no descriptor is left"):
        api.start_taskd_agent()


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
