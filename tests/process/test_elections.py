"""The host of the manager is lost: the other agents elect where the next one starts."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from taskd import keys
from testbed.hosts import INTERFACE
from tests.process import harness
from tests.process.harness import wait_for_step, wait_until
from tests.process.test_recovery import (
    reference,  # noqa: F401
)

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

LIMIT_S = 60
COLD_S = 200  # where torchruns are started as fresh interpreters
ELECTING = {
    "TASKD_RECOVER_STRATEGY": "recover",
    "TASKD_MANAGER": "auto",
    "TASKD_FAULT_TIMEOUT": "6",
    "SLEEP_S": "0.05",
}
NODES = 4
# sitecustomize: a manager that an agent starts needs longer than the 5 s that others wait for it
SLOW_START = """import time
if b"taskd.manager.automatic" in open("/proc/self/cmdline", "rb").read():
    time.sleep(7.0)
    open({!r}, "w").close()
"""
HELD = "0@9:step:told-go-on"  # nobody goes on from there before those who are to vote are known


def _start(job: harness.Job, node_rank: int, count: int = NODES, **env: str) -> harness.Output:
    options = (
        f"--nnodes={count}",
        f"--node-rank={node_rank}",
        "--master-addr=127.0.0.1",
        f"--master-port={job.master_port}",
    )
    return job.start_agent("train.py", nproc=1, options=options, **env)


@pytest.mark.parametrize("has_secret", [False, True])
def test_the_manager_is_lost_with_its_node(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
    has_secret: bool,
) -> None:
    """Node 0 is killed with the manager: a spare takes its place, in the same step."""
    env = {}
    if has_secret:
        assert keys.main(["new", "--out", str(tmp_path / "secret")]) == 0
        env["TASKD_SECRET_FILE"] = str(tmp_path / "secret")
    with harness.job(
        tmp_path,
        **ELECTING,
        STEPS="80",
        FAULTS=HELD,
        **env,
    ) as job:
        manager = job.start_manager()
        agents = [_start(job, node_rank) for node_rank in range(NODES)]
        spare = _start(job, NODES, TASKD_SPARE="1")
        manager.wait_text("(1 wait now)", LIMIT_S)
        for agent in agents:
            agent.wait_text("joined the manager at", LIMIT_S)
        job.tell()
        wait_for_step(job, 12)
        for process in (manager.process, agents[0].process):
            os.kill(process.pid, signal.SIGKILL)
        outputs = [agent.wait(LIMIT_S) for agent in (*agents[1:], spare)]
        assert [output.returncode for output in outputs] == [0] * 4, job.story()
        records = job.recoveries()
        assert [record["strategy"] for record in records] == ["recover"]
        assert records[0]["steps_redone"] == 0
        assert job.digests() == reference(STEPS="80")
        pids = {(fact["rank"], fact["pid"]) for fact in job.facts("entered")}
        assert len(pids) == NODES + 1, "rank 0 is another process, and nobody else is"
        wait_until(job, lambda: not job.leftovers())  # no torchrun waits for an elected manager


@pytest.mark.extended(
    "decisions: TestBegunAnew in tests/unit/core/test_electorate.py, "
    "tests/unit/manager/test_begun_anew.py; tests/simulation/test_partitions.py: managers begin "
    "anew, hosts are lost"
)
def test_a_manager_was_started_again_before_its_host_is_lost(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    """Spares have come and gone before that; one has taken a place since: it has a vote, too."""
    with harness.job(
        tmp_path,
        **ELECTING,
        STEPS="300",
        FAULTS=HELD,
    ) as job:
        manager = job.start_manager()
        agents = [_start(job, node_rank, 3) for node_rank in range(3)]
        for agent in agents:
            agent.wait_text("joined the manager at", LIMIT_S)
        spares = [_start(job, 3 + number, 3, TASKD_SPARE="1") for number in range(3)]
        manager.wait_text("(3 wait now)", LIMIT_S)
        os.kill(spares.pop().process.pid, signal.SIGKILL)  # one roster more than the next tells
        manager.wait_text("leaves: its connection broke", LIMIT_S)
        job.tell()
        wait_for_step(job, 12)
        os.kill(manager.process.pid, signal.SIGKILL)
        manager.wait(LIMIT_S)
        manager = job.start_manager()
        manager.wait_text("(2 wait now)", LIMIT_S)
        os.kill(agents[2].process.pid, signal.SIGKILL)
        wait_until(job, lambda: len(job.recoveries()) == 1)
        for process in (manager.process, agents[0].process):
            os.kill(process.pid, signal.SIGKILL)
        outputs = [agent.wait(LIMIT_S) for agent in (agents[1], *spares)]
        assert [output.returncode for output in outputs] == [0] * 3, job.story()
        assert [record["strategy"] for record in job.recoveries()] == ["recover"] * 2
        assert job.digests() == reference(nproc=3, STEPS="300")


@pytest.mark.extended(
    "tests/simulation/test_partitions.py: "
    "test_in_every_pattern_the_larger_part_goes_on_and_no_other"
)
def test_a_host_that_is_cut_off_with_the_manager_does_not_go_on(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    """The other part does, with a spare; when the network heals, the former part ends."""
    steps = {"STEPS": "100"}
    with (
        harness.hosts(tmp_path, 4) as hosts,
        harness.job(
            tmp_path / "job",
            GLOO_SOCKET_IFNAME=INTERFACE,
            TASKD_RECOVER_STRATEGY="recover",
            TASKD_MANAGER="auto",
            TASKD_FAULT_TIMEOUT="6",
            SLEEP_S="0.05",
            **steps,
        ) as job,
    ):
        manager = job.start_manager(host=hosts[0])
        for node_rank in range(3):
            job.start_node("train.py", node_rank, 3, hosts[node_rank], nproc=1)
        spare = job.start_node("train.py", 3, 3, hosts[3], nproc=1, TASKD_SPARE="1")
        manager.wait_text("(1 wait now)", LIMIT_S)
        wait_for_step(job, 8)
        hosts[0].cut()
        outputs = [agent.wait(LIMIT_S) for agent in (*job.agents[1:3], spare)]
        assert [output.returncode for output in outputs] == [0] * 3, job.story()
        assert job.digests() == reference(nproc=3, **steps)
        wait_until(job, job.recoveries)  # nobody waits for an elected manager
        assert [record["strategy"] for record in job.recoveries()] == ["recover"]
        assert hosts[0].counts()["lost_out"] > 0
        assert "more than half of the agents are out of reach" in manager.text
        assert job.agents[0].process.poll() is None, "it waits for the others"


@pytest.mark.extended(
    "tests/unit/core/test_election.py: test_a_node_that_was_only_cut_off_keeps_its_processes; "
    "test_networks.py heals a host"
)
def test_a_host_that_is_cut_off_with_the_manager_comes_back_with_its_process(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    """The others have elected a manager, which knows that node from the roster alone."""
    with (
        harness.hosts(tmp_path, 3) as hosts,
        harness.job(
            tmp_path / "job",
            GLOO_SOCKET_IFNAME=INTERFACE,
            TASKD_RECOVER_STRATEGY="recover",
            TASKD_MANAGER="auto",
            TASKD_FAULT_TIMEOUT="6",
            SLEEP_S="0.05",
            HOLD_AT="60",
            STEPS="100",
        ) as job,
    ):
        job.start_manager(host=hosts[0])
        for node_rank in range(3):
            job.start_node("train.py", node_rank, 3, hosts[node_rank], nproc=1)
        for agent in job.agents:
            agent.wait_text("joined the manager at", LIMIT_S)
        wait_for_step(job, 8)
        hosts[0].cut()
        lost = "node 0 is lost, and nobody takes its place yet"  # says the manager that was elected
        wait_until(job, lambda: any(lost in agent.text for agent in job.agents[1:]))
        assert hosts[0].counts()["lost_out"] > 0
        hosts[0].heal()
        job.tell()
        codes = [agent.wait(LIMIT_S).returncode for agent in job.agents]
        assert codes == [0, 0, 0], job.story()
        assert job.digests() == reference(nproc=3, STEPS="100")
        assert [record["strategy"] for record in job.recoveries()] == ["recover"]
        pids = {(fact["rank"], fact["pid"]) for fact in job.facts("entered")}
        assert len(pids) == 3, "each rank has the process that it began with"
        wait_until(job, lambda: not job.leftovers())


def _secret(tmp_path: pathlib.Path) -> dict[str, str]:
    assert keys.main(["new", "--out", str(tmp_path / "secret")]) == 0
    return {"TASKD_SECRET_FILE": str(tmp_path / "secret")}


@pytest.mark.parametrize("has_secret", [False, True])
def test_of_two_nodes_the_manager_is_lost_with_its_node(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
    has_secret: bool,
) -> None:
    """Node 1 and the spare elect a manager, and the spare takes place 0, in the same step."""
    with _pair(tmp_path, FAULTS=HELD, **(_secret(tmp_path) if has_secret else {})) as job:
        manager = job.start_manager()
        agents = [_start(job, node_rank, count=2) for node_rank in range(2)]
        spare = _start(job, 2, count=2, TASKD_SPARE="1")
        manager.wait_text("has a vote", LIMIT_S)
        job.tell()
        wait_for_step(job, 12)
        for process in (manager.process, agents[0].process):
            os.kill(process.pid, signal.SIGKILL)
        outputs = [agent.wait(LIMIT_S) for agent in (agents[1], spare)]
        assert [output.returncode for output in outputs] == [0] * 2, job.story()
        (record,) = job.recoveries()
        assert (record["strategy"], record["steps_redone"]) == ("recover", 0)
        assert job.digests() == reference(nproc=2, STEPS="80")
        pids = {(fact["rank"], fact["pid"]) for fact in job.facts("entered")}
        assert len(pids) == 3, "rank 0 is another process, and nobody else is"
        wait_until(job, lambda: not job.leftovers())  # no torchrun waits for an elected manager


def _pair(tmp_path: pathlib.Path, **env: str) -> harness.Job:
    """Of two nodes of one rank."""
    settings = {
        "TASKD_RECOVER_STRATEGY": "recover",
        "TASKD_MANAGER": "auto",
        "TASKD_FAULT_TIMEOUT": "6",
        "STEPS": "80",
        "SLEEP_S": "0.05",
    }
    return harness.job(tmp_path, **settings | env)


@pytest.mark.extended(
    "tests/simulation/test_pair_partitions.py: test_in_every_pattern_two_of_the_three_go_on_*; "
    "test_cut_off.py: test_nobody_comes_back_before_the_others_have_given_up"
)
def test_of_two_nodes_the_host_of_the_manager_is_cut_off_and_goes_on_living(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    """Node 1 and the spare go on; the other part replaces nobody, and says why."""
    steps = {"STEPS": "100"}
    with (
        harness.hosts(tmp_path, 4) as hosts,
        _pair(
            tmp_path / "job",
            GLOO_SOCKET_IFNAME=INTERFACE,
            TASKD_WAIT_RESCHEDULE_TIMEOUT="12",
            **steps,
        ) as job,
    ):
        manager = job.start_manager(host=hosts[0])
        for node_rank in range(2):
            job.start_node("train.py", node_rank, 2, hosts[node_rank], nproc=1)
        spare = job.start_node("train.py", 2, 2, hosts[2], nproc=1, TASKD_SPARE="1")
        manager.wait_text("has a vote", LIMIT_S)
        wait_for_step(job, 8)
        hosts[0].cut()
        outputs = [agent.wait(LIMIT_S) for agent in (job.agents[1], spare)]
        assert [output.returncode for output in outputs] == [0] * 2, job.story()
        assert job.digests() == reference(nproc=2, **steps)
        (record,) = wait_until(  # nobody waits for an elected manager
            job, lambda: [one for one in job.recoveries() if one["strategy"] == "recover"]
        )
        assert record["steps_redone"] == 0
        assert hosts[0].counts()["lost_out"] > 0
        manager.wait_text("the spare that has a vote is out of reach", LIMIT_S)
        finished = job.agents[0].wait(LIMIT_S)
        assert finished.returncode == 1, finished.output
        assert "nobody took its place within 12 s (node 1)" in finished.output


def test_of_two_nodes_a_stopped_manager_goes_on_late(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    """The nodes have elected another one, and the job has not noticed anything."""
    with _pair(tmp_path, STEPS="160", FAULTS="0@150:step:told-go-on") as job:
        manager = job.start_manager()
        agents = [_start(job, node_rank, count=2) for node_rank in range(2)]
        spare = _start(job, 2, count=2, TASKD_SPARE="1")
        manager.wait_text("has a vote", LIMIT_S)
        wait_for_step(job, 8)
        os.kill(manager.process.pid, signal.SIGSTOP)
        spare.wait_text("obeys the manager at", LIMIT_S)
        os.kill(manager.process.pid, signal.SIGCONT)
        manager.wait(LIMIT_S)
        job.tell()
        assert "is offered" not in manager.text
        outputs = [agent.wait(LIMIT_S) for agent in (*agents, spare)]
        assert [output.returncode for output in outputs] == [0] * 3, job.story()
        assert job.recoveries() == []
        assert job.digests() == reference(nproc=2, STEPS="160")


@pytest.mark.extended(
    "tests/unit/core/test_election.py: test_each_manager_that_is_elected_has_longer_to_start"
)
def test_of_two_nodes_the_next_manager_takes_longer_to_start_than_it_is_waited_for(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    """It is not started again and again."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "sitecustomize.py").write_text(SLOW_START.format(str(library / "slept")))
    with _pair(
        tmp_path / "job",
        STEPS="120",
        TASKD_JOIN_TIMEOUT="200",  # the election has an end, whatever else the host has to do
        FAULTS=HELD,
        PYTHONPATH=f"{harness.environment()['PYTHONPATH']}{os.pathsep}{library}",
    ) as job:
        manager = job.start_manager(TASKD_JOIN_TIMEOUT="600")  # these torchruns start cold
        agents = [_start(job, node_rank, count=2) for node_rank in range(2)]
        spare = _start(job, 2, count=2, TASKD_SPARE="1")
        manager.wait_text("has a vote", COLD_S)
        job.tell()
        wait_for_step(job, 12)
        for process in (manager.process, agents[0].process):
            os.kill(process.pid, signal.SIGKILL)
        outputs = [agent.wait(COLD_S) for agent in (agents[1], spare)]
        assert [output.returncode for output in outputs] == [0] * 2, job.story()
        assert (library / "slept").exists()
        assert [record["strategy"] for record in job.recoveries()] == ["recover"]
        assert job.digests() == reference(nproc=2, STEPS="120")


@pytest.mark.parametrize("case", ["none", "gone", "late", "two"])
def test_of_two_nodes_whether_there_is_a_spare_that_votes(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
    case: str,
) -> None:
    """None; one that ends before the fault; one that comes late; two, of which the first ends."""
    with _pair(tmp_path, STEPS="120", TASKD_JOIN_TIMEOUT="20", FAULTS=HELD) as job:
        manager = job.start_manager(TASKD_JOIN_TIMEOUT="600")  # torchruns may take long to start
        agents = [_start(job, node_rank, count=2) for node_rank in range(2)]
        spares = []
        if case in ("gone", "two"):
            spares.append(_start(job, 2, count=2, TASKD_SPARE="1"))
            manager.wait_text("has a vote", LIMIT_S)
        if case == "two":
            spares.append(_start(job, 3, count=2, TASKD_SPARE="1", TASKD_HOST="other"))
            manager.wait_text("(2 wait now)", LIMIT_S)
        wait_for_step(job, 8)
        if case == "late":
            spares.append(_start(job, 2, count=2, TASKD_SPARE="1"))
            manager.wait_text("has a vote", LIMIT_S)
        if case in ("gone", "two"):
            spares[0].end()
            manager.wait_text("leaves: ", LIMIT_S)
        if case == "gone":
            manager.wait_text("number=5", LIMIT_S)
        if case == "two":  # the other one has it, as agents and spare know by then
            wait_until(job, lambda: manager.text.count("has a vote") == 2)
        job.tell()
        wait_for_step(job, 12)
        for process in (manager.process, agents[0].process):
            os.kill(process.pid, signal.SIGKILL)
        finished = agents[1].wait(LIMIT_S)
        if case in ("none", "gone"):
            assert finished.returncode == 1
            assert "asks for votes" not in finished.output
            return
        assert finished.returncode == 0, job.story()
        assert spares[-1].wait(LIMIT_S).returncode == 0, job.story()
        assert [record["strategy"] for record in job.recoveries()] == ["recover"]
        assert job.digests() == reference(nproc=2, STEPS="120")
