"""A torchrun that waits without a place takes over that of a lost node."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.harness import wait_for_step, wait_until
from tests.process.test_recovery import (
    check_recovered,
    reference,  # noqa: F401
)

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    Reference = Callable[..., dict[int, str]]

pytestmark = pytest.mark.slow

LIMIT_S = 40


class Nodes:
    """A job over two torchruns of two ranks each, and the spares that wait for their places."""

    def __init__(self, job: harness.Job, backend: str = "static") -> None:
        self.job, self.backend = job, backend
        self.manager = job.start_manager()
        self.agents = [self.start(node_rank) for node_rank in range(2)]
        self.spares: list[harness.Output] = []

    def start(self, node_rank: int, **env: str) -> harness.Output:
        """One more torchrun; with static rendezvous its index is this one."""
        port = self.job.master_port
        options = (
            (
                f"--node-rank={node_rank}",
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
            )
            if self.backend == "static"
            else (
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{port}",
                "--rdzv-id=one",
                f"--rdzv-conf=is_host={int(node_rank == 0)}",
            )
        )
        return self.job.start_agent("train.py", nproc=2, options=("--nnodes=2", *options), **env)

    def add_spare(self) -> harness.Output:
        """Returns when the manager knows it."""
        spare = self.start(len(self.agents) + len(self.spares), TASKD_SPARE="1")
        self.spares.append(spare)
        self.manager.wait_text(f"({len(self.spares)} wait now)", LIMIT_S)
        return spare

    def lose(self, agent: harness.Output, held: int | None = None) -> None:
        """SIGKILL for this torchrun, which the manager knows. Then the step `held` is let go."""
        for one in self.agents:
            one.wait_text("joined the manager at", LIMIT_S)
        os.kill(agent.process.pid, signal.SIGKILL)
        assert agent.wait(LIMIT_S).returncode == -signal.SIGKILL
        self.job.tell(held)


def _job(directory: pathlib.Path, **env: str) -> harness.Job:
    settings = {
        "TASKD_RECOVER_STRATEGY": "recover",
        "TASKD_FAULT_TIMEOUT": "9",  # two thirds of it without an answer, and agents go on alone
        "STEPS": "60",
        "SLEEP_S": "0.05",
        "HOLD_AT": "50",  # so that it is not over before a node is lost
    }
    return harness.job(directory, **settings | env)


def _committed(job: harness.Job, step: int) -> set[int]:
    """The ranks that have committed it."""
    return {fact["rank"] for fact in job.facts("committed") if fact["step"] >= step}


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_spare_takes_the_place_of_a_lost_node(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
    backend: str,
) -> None:
    """In the same step, to the last bit, and without anybody who starts a torchrun."""
    with _job(tmp_path) as job:
        nodes = Nodes(job, backend)
        spare = nodes.add_spare()
        wait_for_step(job, 8)
        nodes.lose(nodes.agents[1])
        assert spare.wait(LIMIT_S).returncode == 0, job.story()
        finished = nodes.agents[0].wait(LIMIT_S)
        (record,) = job.recoveries()
        assert (record["strategy"], record["steps_redone"]) == ("recover", 0)
        replaced = {fault["rank"] for fault in record["faults"]}
        check_recovered(job, finished, reference(STEPS="60"), faults=0, replaced={2, 3})
        assert replaced <= {2, 3}


def test_what_is_a_ranks_alone_comes_back_in_a_step_that_the_others_have_completed(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
) -> None:
    """Its random numbers and its place in the data, from the rank of another node."""
    faults = "2@20:optimizer:stop;3@20:optimizer:stop"
    with _job(tmp_path, FAULTS=faults) as job:
        nodes = Nodes(job)
        spare = nodes.add_spare()
        others = {0, 1}
        wait_until(job, lambda: _committed(job, 21) == others)
        nodes.lose(nodes.agents[1])
        assert spare.wait(LIMIT_S).returncode == 0, job.story()
        finished = nodes.agents[0].wait(LIMIT_S)
        (record,) = job.recoveries()
        assert (record["version"], record["steps_redone"]) == (21, 0)
        check_recovered(job, finished, reference(STEPS="60"), faults=2, replaced={2, 3})
        assert "what differs between ranks is as" not in job.story()  # nothing of it is lost


@pytest.mark.extended(
    "test_a_spare_takes_the_place_of_a_lost_node[c10d]; tests/simulation/test_pair_partitions.py: "
    "test_the_host_of_the_manager_is_lost_and_that_of_the_next_one"
)
def test_two_nodes_are_lost_one_after_the_other(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
) -> None:
    """Also the place that a spare has taken is given to the next."""
    with _job(tmp_path, STEPS="100", HOLD_AT="30,80") as job:
        nodes = Nodes(job)
        first, second = nodes.add_spare(), nodes.add_spare()
        wait_for_step(job, 8)
        nodes.lose(nodes.agents[1], held=30)
        wait_for_step(job, 40)
        nodes.lose(first, held=80)
        assert second.wait(LIMIT_S).returncode == 0, job.story()
        finished = nodes.agents[0].wait(LIMIT_S)
        records = job.recoveries()
        assert [record["strategy"] for record in records] == ["recover", "recover"]
        check_recovered(job, finished, reference(STEPS="100"), faults=0, replaced={2, 3})


@pytest.mark.extended("tests/unit/core/test_spares.py: test_a_silent_spare_is_not_waited_for")
def test_a_spare_that_is_gone_is_passed_over(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
) -> None:
    """The first one stands still when it is needed, and is ended only afterwards."""
    with _job(tmp_path) as job:
        nodes = Nodes(job)
        first, second = nodes.add_spare(), nodes.add_spare()
        wait_for_step(job, 8)
        os.kill(first.process.pid, signal.SIGSTOP)
        nodes.lose(nodes.agents[1])
        assert second.wait(LIMIT_S).returncode == 0, job.story()
        finished = nodes.agents[0].wait(LIMIT_S)
        first.end()
        # its forkserver ends when it is seen to be gone
        wait_until(job, lambda: not job.leftovers())
        check_recovered(job, finished, reference(STEPS="60"), faults=0, replaced={2, 3})
        assert job.recoveries()[0]["strategy"] == "recover"


@pytest.mark.extended(
    "nearest: tests/unit/core/test_spares.py: "
    "test_the_place_of_a_spare_that_ends_is_offered_to_the_next"
)
def test_a_lost_node_comes_back_and_is_the_next_spare(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
) -> None:
    with _job(tmp_path, STEPS="120", HOLD_AT="20,100") as job:
        nodes = Nodes(job)
        spare = nodes.add_spare()
        wait_for_step(job, 8)
        nodes.lose(nodes.agents[1], held=20)
        wait_for_step(job, 30)
        again = nodes.start(1)
        again.wait_text("a spare has the place of node 1", LIMIT_S)
        again.wait_text("joined the manager", LIMIT_S)
        wait_for_step(job, 60)
        nodes.lose(spare, held=100)
        assert again.wait(LIMIT_S).returncode == 0, job.story()
        finished = nodes.agents[0].wait(LIMIT_S)
        assert len(job.recoveries()) == 2
        check_recovered(job, finished, reference(STEPS="120"), faults=0, replaced={2, 3})


@pytest.mark.extended(
    "tests/unit/manager/test_late.py: test_one_agent_that_is_back_tells_that_the_job_runs; "
    "test_a_spare_takes_the_place_of_a_lost_node[c10d]"
)
def test_a_torchrun_that_is_started_again_with_c10d(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
) -> None:
    """It has no index, and asks for the place of whoever is lost, without a word of the user."""
    with _job(tmp_path) as job:
        nodes = Nodes(job, "c10d")
        wait_for_step(job, 8)
        nodes.lose(nodes.agents[1])
        again = nodes.start(1)
        assert again.wait(LIMIT_S).returncode == 0, job.story()
        assert "this torchrun waits as a spare" in again.text
        finished = nodes.agents[0].wait(LIMIT_S)
        check_recovered(job, finished, reference(STEPS="60"), faults=0, replaced={2, 3})


@pytest.mark.extended(
    "nearest: tests/unit/core/test_absence.py: test_not_where_it_is_not_allowed, without a spare"
)
def test_a_job_that_replaces_no_nodes_has_no_use_for_a_spare(tmp_path: pathlib.Path) -> None:
    with _job(tmp_path, TASKD_RECOVER_STRATEGY="recover-in-place") as job:
        nodes = Nodes(job)
        wait_for_step(job, 2)
        finished = nodes.start(7, TASKD_SPARE="1").wait(LIMIT_S)
        assert finished.returncode == 1, finished.output
        assert "a spare needs recover in TASKD_RECOVER_STRATEGY" in finished.output
        job.tell()
        assert nodes.agents[0].wait(LIMIT_S).returncode == 0


@pytest.mark.parametrize("is_well", [True, False], ids=["succeeds", "fails"])
def test_spares_end_with_the_job(tmp_path: pathlib.Path, *, is_well: bool) -> None:
    env = {} if is_well else {"FAULTS": "2@30:forward:always-raise"}
    with _job(tmp_path, **env) as job:
        nodes = Nodes(job)
        spare = nodes.start(7, TASKD_SPARE="1", TASKD_HOST="another")
        nodes.manager.wait_text("a spare waits on", LIMIT_S)
        job.tell()
        finished = spare.wait(LIMIT_S)
        assert finished.returncode == (0 if is_well else 1), finished.output
        assert ("the job has failed: " in finished.output) is not is_well


@pytest.mark.extended(
    "tests/unit/core/test_spares.py: test_the_place_of_a_spare_that_ends_is_offered_to_the_next"
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_spare_may_be_ended(tmp_path: pathlib.Path, number: int) -> None:
    """It says goodbye, and the manager offers it nothing."""
    with _job(tmp_path) as job:
        nodes = Nodes(job)
        spare = nodes.add_spare()
        os.kill(spare.process.pid, number)
        assert spare.wait(LIMIT_S).returncode != 0
        nodes.manager.wait_text("leaves: ", LIMIT_S)
        job.tell()
        assert nodes.agents[0].wait(LIMIT_S).returncode == 0, job.story()


@pytest.mark.extended(
    "nearest: test_manager_attack.py: test_promises_on_the_command_line_are_held_against_*, nodes; "
    "tests/unit/core/test_spares.py: test_the_place_of_a_spare_that_ends_*"
)
def test_a_spare_that_does_not_fit_says_why(tmp_path: pathlib.Path) -> None:
    env = {"TASKD_WAIT_RESCHEDULE_TIMEOUT": "8"}
    with _job(tmp_path, **env) as job:
        nodes = Nodes(job)
        options = ("--nnodes=2", "--node-rank=5", "--master-addr=127.0.0.1")
        spare = job.start_agent(
            "train.py",
            nproc=3,
            options=(*options, f"--master-port={job.master_port}"),
            TASKD_SPARE="1",
        )
        nodes.manager.wait_text("(1 wait now)", LIMIT_S)
        wait_for_step(job, 8)
        nodes.lose(nodes.agents[1])
        finished = spare.wait(LIMIT_S)
        assert finished.returncode == 1, finished.output
        assert "it has --nproc-per-node 3, the job has 2" in finished.output
        assert nodes.agents[0].wait(LIMIT_S).returncode == 1


@pytest.mark.extended(
    "nearest: test_a_spare_takes_the_place_of_a_lost_node[c10d]; test_elections.py: "
    "test_of_two_nodes_the_manager_is_lost_with_its_node[False]"
)
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_node_0_is_lost(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
    backend: str,
) -> None:
    """With it goes the store at which all have met; the manager is another process."""
    with _job(tmp_path) as job:
        nodes = Nodes(job, backend)
        spare = nodes.add_spare()
        wait_for_step(job, 8)
        nodes.lose(nodes.agents[0])
        assert spare.wait(LIMIT_S).returncode == 0, job.story()
        finished = nodes.agents[1].wait(LIMIT_S)
        (record,) = job.recoveries()
        assert (record["strategy"], record["steps_redone"]) == ("recover", 0)
        check_recovered(job, finished, reference(STEPS="60"), faults=0, replaced={0, 1})


@pytest.mark.extended(
    "tests/unit/manager/test_late.py: test_one_agent_that_is_back_tells_that_the_job_runs; "
    "tests/unit/core/test_meeting.py: test_who_is_started_again_does_not_meet_the_others_*"
)
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_node_0_is_started_again(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
    backend: str,
) -> None:
    """Its torchrun asks the manager first: nobody would come to the rendezvous that it opens."""
    with _job(tmp_path) as job:
        nodes = Nodes(job, backend)
        wait_for_step(job, 8)
        nodes.lose(nodes.agents[0])
        again = nodes.start(0)
        assert again.wait(LIMIT_S).returncode == 0, job.story()
        finished = nodes.agents[1].wait(LIMIT_S)
        (record,) = job.recoveries()
        assert record["strategy"] == "recover"
        check_recovered(job, finished, reference(STEPS="60"), faults=0, replaced={0, 1})


@pytest.mark.extended(
    "tests/unit/core/test_meeting.py: test_the_store_of_the_rendezvous_is_lost_*; "
    "tests/unit/test_trainer_stores.py: test_who_has_the_store_of_the_rendezvous_tells_the_others"
)
def test_the_host_of_the_rendezvous_is_lost_and_is_not_node_0(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
) -> None:
    """With c10d the addresses give the numbers, and any node may have the store."""
    with _job(tmp_path) as job:
        manager = job.start_manager()
        hosts = {"1": "127.0.0.2", "0": "127.0.0.1"}
        agents = [_with_address(job, host, address) for host, address in hosts.items()]
        spare = _with_address(job, "0", "127.0.0.3", TASKD_SPARE="1")
        manager.wait_text("(1 wait now)", LIMIT_S)
        wait_for_step(job, 8)
        for agent in agents:
            agent.wait_text("joined the manager at", LIMIT_S)
        os.kill(agents[0].process.pid, signal.SIGKILL)
        job.tell()
        assert spare.wait(LIMIT_S).returncode == 0, job.story()
        finished = agents[1].wait(LIMIT_S)
        (record,) = job.recoveries()
        assert (record["strategy"], record["steps_redone"]) == ("recover", 0)
        check_recovered(job, finished, reference(STEPS="60"), faults=0, replaced={2, 3})


@pytest.mark.parametrize("preload", ["auto", "off"])
def test_a_spare_has_imported_what_the_workers_import(tmp_path: pathlib.Path, preload: str) -> None:
    """Also what takes long: its replacements find it in their memory."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "takes_long.py").write_text(_TAKES_LONG)
    env = {"RECOVERABLE": "1", "IMPORTS": "takes_long", "TASKD_PRELOAD": preload}
    with _job(tmp_path / "job", **env) as job:
        job.env["PYTHONPATH"] = os.pathsep.join([str(library), job.env["PYTHONPATH"]])
        manager = job.start_manager()
        spare = _importing(job, 2, TASKD_SPARE="1")
        agents = [_importing(job, node_rank) for node_rank in range(2)]
        manager.wait_text("(1 wait now)", LIMIT_S)
        wait_until(job, lambda: len(job.facts("imported")) == 2)
        if preload == "auto":
            spare.wait_text("are preloaded after", LIMIT_S)
        os.kill(agents[1].process.pid, signal.SIGKILL)
        wait_until(job, lambda: len(job.facts("imported")) == 3)
        (job.facts_dir / "go").touch()
        assert spare.wait(LIMIT_S).returncode == agents[0].wait(LIMIT_S).returncode == 0
        *_, fact = job.facts("imported")
        (record,) = job.recoveries()
        assert (fact["rank"], record["strategy"]) == (1, "recover")
        is_preloaded = fact["who"]["takes_long"] == "taskd-preloaded"
        assert is_preloaded is (preload == "auto"), fact
        assert fact["who"]["beside_importing"] != "taskd-preloaded", "it is the script's own"
        assert job.leftovers() == set()


_TAKES_LONG = """import time
WHO = open("/proc/self/comm").read().strip()
time.sleep(1.5)
"""


def _importing(job: harness.Job, node_rank: int, **env: str) -> harness.Output:
    options = (
        "--nnodes=2",
        f"--node-rank={node_rank}",
        "--master-addr=127.0.0.1",
        f"--master-port={job.master_port}",
    )
    return job.start_agent("importing.py", nproc=1, options=options, **env)


def _with_address(job: harness.Job, is_host: str, address: str, **env: str) -> harness.Output:
    """A torchrun whose place c10d finds by its address. `is_host`: "1": it has the store."""
    options = (
        "--nnodes=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{job.master_port}",
        "--rdzv-id=one",
        f"--rdzv-conf=is_host={is_host}",
        f"--local-addr={address}",
    )
    return job.start_agent("train.py", nproc=2, options=options, **env)


@pytest.mark.extended(
    "tests/unit/core/test_meeting.py: test_the_node_is_lost_to_which_they_have_moved"
)
def test_both_nodes_are_lost_one_after_the_other(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
) -> None:
    """The store moves twice, and then a rank is killed that has met nobody but there."""
    faults = {"HOLD_AT": "30,90", "FAULTS": "3@110:forward:kill"}
    with _job(tmp_path, STEPS="150", **faults) as job:
        nodes = Nodes(job)
        first, second = nodes.add_spare(), nodes.add_spare()
        wait_for_step(job, 8)
        nodes.lose(nodes.agents[0], held=30)
        wait_for_step(job, 50)
        nodes.lose(nodes.agents[1], held=90)
        assert second.wait(LIMIT_S).returncode == 0, job.story()
        finished = first.wait(LIMIT_S)
        records = job.recoveries()
        strategies = [record["strategy"] for record in records]
        assert strategies == ["recover", "recover", "recover-in-place"]
        check_recovered(job, finished, reference(STEPS="150"), faults=1, replaced={0, 1, 2, 3})
