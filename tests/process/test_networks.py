"""Several hosts, and what befalls them and the network between them.

A bad link costs time. A node that is lost ends the job within the limit, by name; and whatever has
befallen a network that is whole again in time, the result is that of a run without faults.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from testbed.hosts import INTERFACE
from tests.process import harness
from tests.process.harness import wait_for_step, wait_until
from tests.process.test_dump import checkpoints
from tests.process.test_recovery import reference as reference  # noqa: PLC0414

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    from testbed.hosts import Host, Hosts

pytestmark = pytest.mark.slow

LIMIT_S = 120  # for what comes after some seconds on a machine that has nothing else to do
FAULT_TIMEOUT_S = 9  # two thirds of it without an answer, and agents go on alone
STEPS = {"STEPS": "100"}
HELD = {"HOLD_AT": "90"}  # so that the job is not over before anything befalls it
# Where the network is whole again in time: nodes are silent after 6 s, and lost 12 s later.
HEALED = {"TASKD_FAULT_TIMEOUT": "18"}


@contextlib.contextmanager
def job_on_hosts(
    directory: pathlib.Path, count: int = 2, **env: str
) -> Iterator[tuple[harness.Job, Hosts]]:
    """A training of two ranks on each host, which has begun. The manager is on the first one."""
    env = {"TASKD_FAULT_TIMEOUT": str(FAULT_TIMEOUT_S), "SLEEP_S": "0.05", **STEPS, **HELD} | env
    with (
        harness.hosts(directory, count) as hosts,
        harness.job(directory / "job", GLOO_SOCKET_IFNAME=INTERFACE, **env) as job,
    ):
        for agent in start(job, list(hosts)):
            agent.wait_text("joined the manager at", LIMIT_S)
        wait_for_step(job, 5)
        yield job, hosts


def start(job: harness.Job, hosts: list[Host]) -> list[harness.Output]:
    """The manager, and one torchrun on each of these."""
    job.start_manager(host=hosts[0])
    return [
        job.start_node("train.py", node_rank, len(hosts), host)
        for node_rank, host in enumerate(hosts)
    ]


def reached(job: harness.Job) -> int:
    """Steps that some rank has committed."""
    return max(fact["step"] for fact in job.facts("committed"))


def check_undisturbed(job: harness.Job, digests: dict[int, str]) -> None:
    """All ended well, with this result; no process was replaced, no step done twice."""
    for process in [*job.agents, job.manager]:
        assert process is not None
        assert process.wait(LIMIT_S).returncode == 0, job.story()
    assert job.digests() == digests
    assert {record["strategy"] for record in job.recoveries()} <= {"retry"}
    steps = [(fact["rank"], fact["step"]) for fact in job.facts("committed")]
    assert len(steps) == len(set(steps))
    assert len({fact["pid"] for fact in job.facts("entered")}) == len(digests)
    wait_until(job, lambda: not job.leftovers())


def check_lost(job: harness.Job, lost: int, *, code: int) -> str:
    """The manager and all nodes but this one have ended and say that it is lost. Their words."""
    assert job.manager is not None
    assert job.manager.wait(LIMIT_S).returncode == 1
    reason = harness.silence_of(lost, FAULT_TIMEOUT_S, job.manager.text)
    assert f"the job is given up: {reason}" in job.manager.text
    for node_rank, agent in enumerate(job.agents):
        if node_rank != lost:
            finished = agent.wait(LIMIT_S)
            assert finished.returncode == code, job.story()
            assert finished.last_line.startswith(f"taskd: job test-job has ended: {reason}")
    return reason


def test_a_link_that_is_lossy_and_then_cut_costs_no_node(tmp_path: pathlib.Path, reference) -> None:
    with job_on_hosts(tmp_path, **HEALED, HOLD_AT="30,90") as (job, (_, second)):
        second.loss(10)
        job.tell(30)
        wait_for_step(job, 45)
        wait_until(job, lambda: (counts := second.counts())["lost_out"] and counts["lost_in"])
        second.cut()
        job.agents[1].wait_text("has been silent for 6 s", LIMIT_S)
        assert second.counts()["lost_out"] > 0
        second.heal()
        assert reached(job) < 100
        job.tell()
        check_undisturbed(job, reference(**STEPS))


def test_a_host_that_is_killed_is_named_and_the_job_saved(tmp_path: pathlib.Path) -> None:
    with job_on_hosts(tmp_path, TASKD_RECOVER_STRATEGY="recover-in-place,dump") as (job, hosts):
        assert len(hosts[1].kill()) >= 3, "torchrun, and two ranks at least"
        survivors = [fact for fact in job.facts("committed") if fact["rank"] in (0, 1)]
        before = max(fact["step"] for fact in survivors)  # a lost rank may have one more
        assert before < 100
        reason = check_lost(job, 1, code=2)
        (checkpoint,) = checkpoints(job)
        assert checkpoint.manifest.fault == reason
        assert before <= checkpoint.manifest.version <= before + 1
        assert set(checkpoint.manifest.writers) <= {0, 1}
        assert job.leftovers() == set()


@pytest.mark.extended(
    "test_a_host_that_is_killed_is_named_and_the_job_saved; test_dump.py: "
    "test_the_next_start_goes_on_to_the_last_bit; nearest to what is said: "
    "tests/unit/worker/test_state.py: test_missing_extras_are_reported_*"
)
def test_a_job_that_has_lost_a_host_goes_on_with_another_one(tmp_path: pathlib.Path) -> None:
    """What only that host had, the random numbers of its ranks, is gone, and that is said."""
    with job_on_hosts(tmp_path, 3, TASKD_RECOVER_STRATEGY="dump") as (job, hosts):
        assert hosts[2].kill()
        check_lost(job, 2, code=2)
        (checkpoint,) = checkpoints(job)
        job.tell()
        former = len(job.agents)
        agents = start(job, [hosts[0], hosts[1], hosts.add()])
        for agent in agents:
            assert agent.wait(LIMIT_S).returncode == 0, job.story()
        assert {fact["source"] for fact in job.facts("restored")[-6:]} == {
            f"read version {checkpoint.manifest.version} from {checkpoint.path}"
        }
        assert len(job.agents) == former + 3
        assert len(set(job.digests().values())) == 1
        assert len(job.digests()) == 6
        said = f"{checkpoint.path} has no RNG and sampler state of this rank"
        for node_rank, agent in enumerate(agents):
            for rank in (2 * node_rank, 2 * node_rank + 1):
                assert (f"rank {rank}: {said}" in agent.text) == (node_rank == 2)


@pytest.mark.extended(
    "nearest: test_a_link_that_is_lossy_and_then_cut_costs_no_node: packets that come again; "
    "tests/simulation/test_large.py: test_messages_of_a_slow_node_come_late_*"
)
def test_a_slow_link_costs_time_alone(tmp_path: pathlib.Path, reference) -> None:
    with job_on_hosts(tmp_path, STEPS="14", HOLD_AT="8") as (job, (_, second)):
        second.delay(200)
        assert reached(job) <= 8
        job.tell()
        wait_until(job, lambda: reached(job) == 14)
        counts = second.counts()
        assert counts["passed_out"] > 0
        assert counts["passed_in"] > 0
        check_undisturbed(job, reference(STEPS="14"))


@pytest.mark.extended(
    "tests/simulation/test_large.py: test_a_node_that_is_not_heard_for_less_than_its_lease_*; "
    "nearest to the new connection: test_a_link_that_is_lossy_and_then_cut_*, a shorter outage"
)
def test_an_outage_of_nearly_two_thirds_of_the_lease_costs_no_node(
    tmp_path: pathlib.Path, reference
) -> None:
    """TCP left to itself would try again after 12.7 s and then after 25.5 s: too late."""
    with job_on_hosts(tmp_path, TASKD_FAULT_TIMEOUT="24") as (job, (_, second)):
        second.cut()
        threading.Event().wait(14)
        assert second.counts()["lost_out"] > 0
        second.heal()
        assert reached(job) < 100
        job.tell()
        check_undisturbed(job, reference(**STEPS))


@pytest.mark.extended(
    "nearest: test_a_link_that_is_lossy_and_then_cut_costs_no_node, both directions"
)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("way", ["in", "out"])
def test_a_link_that_fails_in_one_direction_and_heals_costs_no_node(
    tmp_path: pathlib.Path, reference, way: str, number: int
) -> None:
    with job_on_hosts(tmp_path, **HEALED) as (job, hosts):
        hosts[number].cut_one_way(way)
        job.agents[1].wait_text("has been silent for 6 s", LIMIT_S)
        assert hosts[number].counts()[f"lost_{way}"] > 0
        hosts[number].heal()
        assert reached(job) < 100
        job.tell()
        check_undisturbed(job, reference(**STEPS))


@pytest.mark.extended(
    "nearest: tests/simulation/test_large.py: test_for_longer_the_job_ends_with_the_reason, both "
    "directions; test_a_host_that_is_killed_is_named_and_the_job_saved"
)
@pytest.mark.parametrize("way", ["in", "out"])
def test_a_link_that_stays_dead_in_one_direction_costs_the_node(
    tmp_path: pathlib.Path, way: str
) -> None:
    with job_on_hosts(tmp_path, TASKD_RECOVER_STRATEGY="dump") as (job, hosts):
        hosts[1].cut_one_way(way)
        check_lost(job, 1, code=2)
        assert hosts[1].counts()[f"lost_{way}"] > 0
        assert len(checkpoints(job)) == 1


@pytest.mark.extended(
    "test_a_host_that_is_killed_is_named_and_the_job_saved; test_cut_off.py: "
    "test_nobody_comes_back_before_the_others_have_given_up"
)
def test_one_of_five_hosts_is_cut_off(tmp_path: pathlib.Path) -> None:
    with job_on_hosts(tmp_path, 5, TASKD_RECOVER_STRATEGY="dump") as (job, hosts):
        hosts[3].cut()
        check_lost(job, 3, code=2)
        assert hosts[3].counts()["lost_out"] > 0
        (checkpoint,) = checkpoints(job)
        assert not set(checkpoint.manifest.writers) & {6, 7}


@pytest.mark.extended(
    "test_recovery.py: test_nothing_is_left_when_torchrun_is_ended[9]; "
    "tests/native/test_agent_loss.py"
)
def test_workers_do_not_outlive_an_agent_that_is_killed_alone(tmp_path: pathlib.Path) -> None:
    with job_on_hosts(tmp_path) as (job, hosts):
        assert job.manager is not None
        os.kill(job.manager.process.pid, signal.SIGSTOP)  # so that it gives no node up meanwhile
        os.kill(job.agents[1].process.pid, signal.SIGKILL)
        assert job.agents[1].wait(LIMIT_S).returncode == -signal.SIGKILL
        wait_until(job, lambda: not hosts[1].pids())
        assert job.agents[0].process.poll() is None, "they are gone before the node is given up"
        os.kill(job.manager.process.pid, signal.SIGCONT)
        check_lost(job, 1, code=1)


@pytest.mark.extended(
    "tests/unit/core/test_node_alone.py: test_a_host_that_answers_and_has_no_manager_*, "
    "test_a_refusal_ends_the_wait; tests/unit/test_not_met.py: "
    "test_the_others_do_not_come_to_a_restart"
)
def test_a_node_that_comes_back_too_late_is_told_that_the_job_is_over(
    tmp_path: pathlib.Path,
) -> None:
    with job_on_hosts(tmp_path) as (job, hosts):
        hosts[1].cut()
        check_lost(job, 1, code=1)
        assert job.agents[1].process.poll() is None
        hosts[1].heal()
        finished = job.agents[1].wait(LIMIT_S)
        assert finished.returncode == 1
        wait_until(job, lambda: not hosts[1].pids())


def test_a_node_whose_place_a_spare_has_taken_ends_and_can_be_the_next_spare(
    tmp_path: pathlib.Path, reference
) -> None:
    """It does not start its workers again, to wait for others that never come."""
    env = {"TASKD_RECOVER_STRATEGY": "recover", "HOLD_AT": "50,90"}
    with job_on_hosts(tmp_path, **env) as (job, hosts):
        assert job.manager is not None
        cut_off = job.agents[1]
        spare = job.start_node("train.py", 2, 2, hosts.add(), TASKD_SPARE="1")
        job.manager.wait_text("(1 wait now)", LIMIT_S)
        job.tell(50)
        hosts[1].cut()
        spare.wait_text("joined the manager at", LIMIT_S)
        wait_until(job, lambda: len(job.recoveries()) == 1)
        assert hosts[1].counts()["lost_out"] > 0
        hosts[1].heal()
        ended = cut_off.wait(LIMIT_S)
        assert ended.returncode == 1, job.story()
        assert "the job goes on without this torchrun, which was cut off" in ended.last_line
        wait_until(job, lambda: not hosts[1].pids())
        again = job.start_node("train.py", 1, 2, hosts[1])
        wait_until(job, lambda: job.manager.text.count("(1 wait now)") == 2)
        job.tell()
        others = (job.agents[0], spare, again)
        assert [agent.wait(LIMIT_S).returncode for agent in others] == [0] * 3, job.story()
        assert job.digests() == reference(**STEPS)
        assert [record["strategy"] for record in job.recoveries()] == ["recover"]
