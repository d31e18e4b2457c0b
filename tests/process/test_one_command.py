"""`torchrun --rdzv-backend=taskd train.py` is all that is typed: no patch, and no manager.py.

Torch finds taskd by its entry point, in the metadata of an installed package; here in a folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from taskd import keys
from testbed.hosts import INTERFACE
from tests.process import harness
from tests.process.harness import wait_for_step, wait_until
from tests.process.installation import install
from tests.process.test_recovery import reference as reference  # noqa: PLC0414

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    from testbed.hosts import Host

pytestmark = pytest.mark.slow

TORCHRUN = "torch.distributed.run"
LIMIT_S = 60


@contextlib.contextmanager
def installed_job(directory: pathlib.Path, **env: str) -> Iterator[harness.Job]:
    """A job as a newcomer starts it: nothing but the installation."""
    path = install(directory / "installed")
    with harness.job(directory, PYTHONPATH=path, **env) as job:
        for name in ("TASKD_PROCESS_ENABLE", "TASKD_MANAGER"):
            if name not in env:
                del job.env[name]
        yield job


def start(
    job: harness.Job, *options: str, nproc: int = 4, host: Host | None = None, **env: str
) -> harness.Output:
    """Torchrun, on this host or on `host`."""
    return job.start_agent(
        "train.py",
        nproc=nproc,
        options=("--rdzv-backend=taskd", *options),
        host=host,
        module=TORCHRUN,
        **env,
    )


def managers(text: str) -> list[int]:
    """Pids of the managers that have listened, in order."""
    return [int(pid) for pid in re.findall(r"listens on \S+ \(pid (\d+)\)", text)]


def check(job: harness.Job, digests: dict[int, str], faults: int) -> None:
    """All succeeded, each fault has happened, the result is that of a run without any.

    Torchrun waits for the end of a manager that serves no other node.
    """
    started = [*job.agents, job.manager] if job.manager is not None else job.agents
    for process in started:
        assert process.wait(LIMIT_S).returncode == 0, process.text
    assert len(job.facts("fault")) == faults
    assert job.digests() == digests
    if len(job.agents) > 1:
        wait_until(job, lambda: not job.leftovers())
    assert job.leftovers() == set()


def test_a_killed_rank_is_replaced_in_place(tmp_path: pathlib.Path, reference) -> None:
    with installed_job(tmp_path, FAULTS="1@5:forward:kill", TASKD_FAULT_TIMOUT="9") as job:
        del job.env["TASKD_LOG_PATH"]
        agent = start(job, f"--rdzv-conf=log_path={job.log_dir}")
        check(job, reference(), faults=1)
        said = "the variable TASKD_FAULT_TIMOUT is read by nobody: did you mean TASKD_FAULT_TIMEOUT"
        assert agent.text.count(said) == 1  # by torchrun, and not by the manager that it starts
        (record,) = job.recoveries()
        assert (record["strategy"], record["steps_redone"]) == ("recover-in-place", 0)
        assert (job.log_dir / "manager.log").exists()


@pytest.mark.parametrize("has_secret", [False, True])
def test_a_manager_that_is_killed_is_started_again_and_recovers(
    tmp_path: pathlib.Path, reference, has_secret: bool
) -> None:
    env = {"STEPS": "80", "SLEEP_S": "0.05"}
    if has_secret:
        assert keys.main(["new", "--out", str(tmp_path / "secret")]) == 0
        env["TASKD_SECRET_FILE"] = str(tmp_path / "secret")
    with installed_job(tmp_path, FAULTS="2@70:forward:kill", **env) as job:
        agent = start(job)
        wait_for_step(job, 10)
        agent.wait_text("joined the manager", LIMIT_S)
        (first,) = managers(agent.text)
        os.kill(first, signal.SIGKILL)
        check(job, reference(STEPS="80"), faults=1)
        assert "ended with -9: it is started again\n" in agent.text
        assert len(managers(agent.text)) == 2
        assert [record["strategy"] for record in job.recoveries()] == ["recover-in-place"]


def test_a_manager_py_that_comes_late_takes_over(tmp_path: pathlib.Path, reference) -> None:
    env = {"STEPS": "80", "SLEEP_S": "0.05"}
    with installed_job(tmp_path, FAULTS="1@5:forward:kill;2@70:forward:told-kill", **env) as job:
        agent = start(job)
        agent.wait_text("recovered by", LIMIT_S)
        wait_for_step(job, 10)
        manager = job.start_manager()
        manager.wait_text("registered, ranks", LIMIT_S)
        job.tell()
        check(job, reference(STEPS="80"), faults=2)
        assert "a manager.py of this job takes over" in agent.text
        assert "recovered by recover-in-place" in manager.text
        assert len(managers(agent.text)) == 1, "ours is not started again"
        assert [record["generation"] for record in job.recoveries()] == [1, 2]


def test_a_manager_py_that_is_there_is_used(tmp_path: pathlib.Path, reference) -> None:
    with installed_job(tmp_path, FAULTS="1@5:forward:kill") as job:
        manager = job.start_manager()
        agent = start(job)
        check(job, reference(), faults=1)
        assert "recovered by recover-in-place" in manager.text
        assert "starts a manager" not in agent.text


@pytest.mark.parametrize("who", ["another job", "the same name", "no manager"])
def test_a_port_that_is_taken_costs_nothing(tmp_path: pathlib.Path, reference, who: str) -> None:
    env = {"STEPS": "120", "SLEEP_S": "0.05", "TASKD_FAULT_TIMEOUT": "3"}
    with (
        installed_job(tmp_path, FAULTS="1@110:forward:kill", **env) as job,
        contextlib.ExitStack() as stack,
    ):
        port = {"TASKD_PORT": str(job.port)}
        if who == "no manager":
            stranger = stack.enter_context(socket.socket())
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            stranger.bind(("127.0.0.1", job.port))
            stranger.listen()
            says = "nobody answers who speaks as a manager"
        else:
            name = "test-job" if who == "the same name" else "another-job"
            other = stack.enter_context(
                installed_job(tmp_path / "other", **port, MINDX_TASK_ID=name, STEPS="100000")
            )
            start(other).wait_text("joined the manager", LIMIT_S)
            says = "it is a manager of another job" if who == "another job" else "is taken by"
        agent = start(job)
        check(job, reference(STEPS="120"), faults=1)
        assert "starts a manager of its own on a free port" in agent.text
        assert says in agent.text
        assert "no manager answers" not in agent.text
        assert [record["strategy"] for record in job.recoveries()] == ["recover-in-place"]


@pytest.mark.parametrize("way", ["TASKD_MANAGER", "--rdzv-conf"])
def test_no_manager_is_started_where_that_is_off(tmp_path: pathlib.Path, way: str) -> None:
    env = {"TASKD_MANAGER": "off"} if way == "TASKD_MANAGER" else {}
    options = ("--rdzv-conf=manager=off",) if way == "--rdzv-conf" else ()
    with installed_job(tmp_path, **env) as job:
        agent = start(job, *options)
        assert agent.wait(LIMIT_S).returncode == 0, agent.text
        assert "taskd 0.1.0 from" in agent.text
        assert "starts a manager" not in agent.text


def test_the_manager_does_not_outlive_a_killed_torchrun(tmp_path: pathlib.Path) -> None:
    # Who waits until the node of the agent is taken for lost waits for longer than the test does.
    with installed_job(tmp_path, STEPS="100000", TASKD_FAULT_TIMEOUT="600") as job:
        agent = start(job)
        agent.wait_text("joined the manager", LIMIT_S)
        (pid,) = managers(agent.text)
        manager = os.pidfd_open(pid)
        os.kill(agent.process.pid, signal.SIGKILL)
        assert select.select([manager], [], [], LIMIT_S)[0]
        os.close(manager)
        wait_until(job, lambda: not job.leftovers())


def test_of_two_hosts_that_of_the_endpoint_has_the_manager(
    tmp_path: pathlib.Path, reference
) -> None:
    """With c10d node 0 is the host of the lower address: here the other one."""
    with (
        harness.hosts(tmp_path, 2) as (first, second),
        installed_job(
            tmp_path / "job",
            FAULTS="1@5:forward:kill;3@8:forward:kill",
            GLOO_SOCKET_IFNAME=INTERFACE,
        ) as job,
    ):
        options = ("--nnodes=2", f"--rdzv-endpoint={second.address}:{job.master_port}")
        agents = [
            start(
                job,
                *options,
                f"--rdzv-conf=is_host={is_host}",
                f"--local-addr={host.address}",
                host=host,
                nproc=2,
            )
            for host, is_host in ((second, 1), (first, 0))
        ]
        check(job, reference(), faults=2)
        assert "agent-1 node 1 starts a manager" in agents[0].text
        assert "starts a manager" not in agents[1].text
        assert "can be reached by other hosts and no secret is set" in agents[0].text
        assert {record["strategy"] for record in job.recoveries()} == {"recover-in-place"}


def test_a_manager_py_takes_over_on_two_hosts(tmp_path: pathlib.Path, reference) -> None:
    with (
        harness.hosts(tmp_path, 2) as (first, second),
        installed_job(
            tmp_path / "job",
            FAULTS="1@3:forward:kill;3@10:forward:kill",
            GLOO_SOCKET_IFNAME=INTERFACE,
            HOLD_AT="9",
        ) as job,
    ):
        options = ("--nnodes=2", f"--rdzv-endpoint={first.address}:{job.master_port}")
        agents = [
            start(job, *options, f"--rdzv-conf=rank={rank}", host=host, nproc=2, **env)
            for rank, (host, env) in enumerate(((first, {"POD_IP": first.address}), (second, {})))
        ]
        agents[0].wait_text("recovered by", LIMIT_S)
        manager = job.start_manager(host=first)
        manager.wait_text("node 1 of 2 registered", LIMIT_S)
        job.tell()
        check(job, reference(), faults=2)
        assert "recovered by recover-in-place" in manager.text
        assert [record["generation"] for record in job.recoveries()] == [1, 2]
