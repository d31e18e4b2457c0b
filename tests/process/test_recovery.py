"""The crash matrix: real torchrun, real kills, four ranks on gloo.

Each injected fault is asserted to have happened.

The reference digest comes from a run without faults and without taskd in its way (no manager,
recovery off).
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import time

import pytest

from tests.process import harness
from tests.process.harness import wait_for_step, wait_until

pytestmark = pytest.mark.slow

RENDEZVOUS = [
    pytest.param(("--standalone",), id="standalone"),
    pytest.param(("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}"), id="c10d"),
    pytest.param(
        ("--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port={port}"),
        id="static",
    ),
]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, shared_folder: pathlib.Path):
    """Digest of each rank without taskd, by the settings of the workload; computed once each."""

    def digest_of(nproc: int = 4, **env: str) -> dict[int, str]:
        def train() -> dict[str, str]:
            directory = tmp_path_factory.mktemp("reference")
            harness.run_plainly(
                directory,
                str(harness.SCRIPTS / "train.py"),
                nproc=nproc,
                FACTS=str(directory),
                **env,
            )
            return {
                str(fact["rank"]): fact["digest"]
                for fact in harness.facts_in(directory)
                if fact["what"] == "returned"
            }

        digests = harness.once(shared_folder, f"train {nproc} {sorted(env.items())}", train)
        assert sorted(digests) == [str(rank) for rank in range(nproc)]
        return {int(rank): digest for rank, digest in digests.items()}

    return digest_of


def check_recovered(
    job: harness.Job,
    finished: harness.Finished,
    reference: dict[int, str],
    *,
    faults: int,
    replaced: set[int],
    redone: int = 0,
) -> None:
    """The job ended well, to the last bit; every fault happened; only what died was replaced.

    Nothing is left.
    """
    assert finished.returncode == 0, finished.output[-6000:]
    assert len(job.facts("fault")) == faults
    assert job.digests() == reference
    pids: dict[int, set[int]] = {}
    for fact in job.facts("entered"):
        pids.setdefault(fact["rank"], set()).add(fact["pid"])
    kept = {rank for rank, seen in pids.items() if len(seen) == 1}
    assert kept >= set(range(4)) - replaced, f"healthy processes were replaced: {pids}"
    steps = [(fact["rank"], fact["step"]) for fact in job.facts("committed")]
    twice = len(steps) - len(set(steps))
    assert twice <= redone * len(kept | replaced), f"{twice} commits were done again"
    assert job.manager is not None
    assert job.manager.wait(20).returncode == 0, job.manager.text
    assert job.leftovers() == set()
    assert os.listdir("/dev/shm") == [] or not [
        name for name in os.listdir("/dev/shm") if "taskd" in name
    ]


@pytest.mark.parametrize("rank", range(4))
def test_kill_of_any_rank_in_the_middle_of_a_step(
    tmp_path: pathlib.Path, reference, rank: int
) -> None:
    with harness.job(tmp_path, FAULTS=f"{rank}@5:forward:kill") as job:
        finished = job.run()
        check_recovered(job, finished, reference(), faults=1, replaced={rank})
        (record,) = job.recoveries()
        assert record["faults"][0]["rank"] == rank
        assert record["faults"][0]["detail"] == "SIGKILL"
        assert record["version"] == 5
        assert record["steps_redone"] == 0
        assert record["generation"] == 1
        assert record["restarts_used"] == 1
        assert record["strategy"] == "recover-in-place"
        assert 0 < record["total_s"] < 30


@pytest.mark.parametrize("place", ["step", "forward", "backward", "optimizer", "before-commit"])
@pytest.mark.parametrize("step", [0, 1, 2, 11])
def test_kill_at_each_place_of_the_first_second_and_last_step(
    tmp_path: pathlib.Path, reference, place: str, step: int
) -> None:
    with harness.job(tmp_path, FAULTS=f"2@{step}:{place}:kill") as job:
        check_recovered(job, job.run(), reference(), faults=1, replaced={2})


DETAILS = {
    "segv": "SIGSEGV",
    "abort": "SIGABRT",
    "exit3": "exit 3",
    "exit0": "exit 0",
    "sysexit0": "exit 0",
}


def test_every_other_way_to_die_in_one_run(tmp_path: pathlib.Path, reference) -> None:
    faults = [f"{index % 4}@{2 * index + 1}:forward:{how}" for index, how in enumerate(DETAILS)]
    with harness.job(tmp_path, FAULTS=";".join(faults)) as job:
        check_recovered(job, job.run(), reference(), faults=len(DETAILS), replaced=set(range(4)))
        for record, detail in zip(job.recoveries(), DETAILS.values(), strict=True):
            assert detail in record["faults"][0]["detail"]


@pytest.mark.parametrize("how", DETAILS)
def test_every_other_way_to_die(tmp_path: pathlib.Path, reference, how: str) -> None:
    with harness.job(tmp_path, FAULTS=f"1@4:forward:{how}") as job:
        check_recovered(job, job.run(), reference(), faults=1, replaced={1})
        assert DETAILS[how] in job.recoveries()[0]["faults"][0]["detail"]


def test_an_exception_in_one_rank_replaces_no_process(tmp_path: pathlib.Path, reference) -> None:
    with harness.job(tmp_path, FAULTS="3@4:forward:raise") as job:
        check_recovered(job, job.run(), reference(), faults=1, replaced=set())
        (record,) = job.recoveries()
        assert record["strategy"] == "retry"
        assert record["faults"][0]["detail"] == "ValueError: a bad sample"


def test_an_exception_that_cannot_be_shown_is_one_like_others(
    tmp_path: pathlib.Path, reference
) -> None:
    with harness.job(tmp_path, FAULTS="3@4:forward:odd") as job:
        check_recovered(job, job.run(), reference(), faults=1, replaced=set())
        (record,) = job.recoveries()
        assert record["strategy"] == "retry"
        assert record["faults"][0]["detail"].startswith(r"Odd: \udcff\udcff")
        assert len(record["faults"][0]["detail"]) == 500


def test_an_exception_that_comes_back_at_the_same_step_ends_the_job(tmp_path: pathlib.Path) -> None:
    """Whatever its text says, and in whichever process.

    It is tried once more in the same one, and once in a new one.
    """
    with harness.job(tmp_path, FAULTS="3@4:forward:always-raise-differently") as job:
        finished = job.run()
        assert finished.returncode != 0
        first, second, third = (fact["pid"] for fact in job.facts("fault"))
        assert first == second != third
        assert "ValueError: a bad sample at " in finished.output
        assert "Traceback" in finished.output
        assert "came back" in finished.last_line, finished.last_line
        assert job.manager is not None
        assert job.manager.wait(20).returncode == 1
        assert job.leftovers() == set()
        assert [
            (record["strategy"], bool(record["not_completed"])) for record in job.recoveries()
        ] == [("retry", True), ("recover-in-place", True), ("exit", True)]


def test_a_process_that_is_broken_is_replaced_the_second_time(
    tmp_path: pathlib.Path, reference
) -> None:
    with harness.job(tmp_path, FAULTS="3@4:step:break") as job:
        check_recovered(job, job.run(), reference(), faults=1, replaced={3})
        retried, replaced = job.recoveries()
        assert retried["not_completed"].startswith(
            "before every rank had made a new step, rank 3 raised ValueError: a bad sample at "
        )
        assert (replaced["strategy"], replaced["steps_redone"], replaced["not_completed"]) == (
            "recover-in-place",
            0,
            "",
        )
        assert "the process of rank 3 is replaced" in replaced["reason"]
        assert replaced["faults"][0]["detail"] != retried["faults"][0]["detail"]
        assert replaced["faults"][0]["signature"] == retried["faults"][0]["signature"]


def test_two_at_once(tmp_path: pathlib.Path, reference) -> None:
    with harness.job(tmp_path, FAULTS="0@5:forward:kill;2@5:forward:kill") as job:
        check_recovered(job, job.run(), reference(), faults=2, replaced={0, 2})


def test_one_during_the_recovery_of_another(tmp_path: pathlib.Path, reference) -> None:
    with harness.job(tmp_path, FAULTS="2@5:forward:kill;1@0:entry-2:kill") as job:
        check_recovered(job, job.run(), reference(), faults=2, replaced={1, 2})


def test_one_that_restores_while_another_recovers(tmp_path: pathlib.Path, reference) -> None:
    with harness.job(tmp_path, FAULTS="2@5:forward:kill;0@0:restored-2:kill") as job:
        check_recovered(job, job.run(), reference(), faults=2, replaced={0, 2})


@pytest.mark.parametrize("place", ["0@0:boot", "0@5:step"])
def test_one_that_was_just_replaced(tmp_path: pathlib.Path, reference, place: str) -> None:
    # The first fault fires at its step; the second, of the same rank, in the replacement: at its
    # start or its first step.
    faults = (
        f"0@5:forward:kill;{place}:kill"
        if "boot" not in place
        else "2@5:forward:kill;2@5:step:kill;2@5:backward:kill"
    )
    with harness.job(tmp_path, FAULTS=faults) as job:
        finished = job.run()
        rank = 0 if "boot" not in place else 2
        check_recovered(job, finished, reference(), faults=faults.count("kill"), replaced={rank})


def test_twenty_in_one_run(tmp_path: pathlib.Path, reference) -> None:
    places = ["forward", "backward", "optimizer", "step", "before-commit"]
    faults = ";".join(f"{i * 7 % 4}@{2 + 3 * i}:{places[i % 5]}:kill" for i in range(20))
    with harness.job(tmp_path, FAULTS=faults, STEPS="64") as job:
        check_recovered(
            job, job.run(timeout_s=120), reference(STEPS="64"), faults=20, replaced=set(range(4))
        )
        assert [record["generation"] for record in job.recoveries()] == list(range(1, 21))


@pytest.mark.parametrize("place", ["before-init", "in-init"])
def test_before_and_inside_init_process_group(
    tmp_path: pathlib.Path, reference, place: str
) -> None:
    with harness.job(tmp_path, FAULTS=f"1@0:{place}:kill") as job:
        check_recovered(job, job.run(), reference(), faults=1, replaced={1})


@pytest.mark.parametrize("place", ["boot", "in-init"])
def test_groups_made_outside_the_function(tmp_path: pathlib.Path, reference, place: str) -> None:
    with harness.job(tmp_path, FAULTS=f"1@0:{place}:kill;3@6:backward:kill", OUTER_INIT="1") as job:
        check_recovered(job, job.run(), reference(OUTER_INIT="1"), faults=2, replaced={1, 3})


def test_groups_made_above_the_decorated_function(tmp_path: pathlib.Path, reference) -> None:
    with harness.job(
        tmp_path, FAULTS="1@4:forward:kill;0@6:backward:kill", OUTER_INIT="above"
    ) as job:
        check_recovered(job, job.run(), reference(), faults=2, replaced={0, 1})


@pytest.mark.parametrize("rank", [0, 3])
def test_while_the_others_have_already_finished(
    tmp_path: pathlib.Path, reference, rank: int
) -> None:
    with harness.job(tmp_path, FAULTS=f"{rank}@12:after-last:kill") as job:
        check_recovered(job, job.run(), reference(), faults=1, replaced={rank})


def test_with_data_loader_processes_alive(tmp_path: pathlib.Path, reference) -> None:
    with harness.job(
        tmp_path, FAULTS="1@4:forward:kill;2@7:backward:kill", LOADER_WORKERS="2"
    ) as job:
        check_recovered(job, job.run(), reference(LOADER_WORKERS="2"), faults=2, replaced={1, 2})


def test_forward_and_backward_in_a_closure_of_the_optimizer(
    tmp_path: pathlib.Path, reference
) -> None:
    with harness.job(tmp_path, FAULTS="1@4:backward:kill", CLOSURE="1") as job:
        check_recovered(job, job.run(), reference(), faults=1, replaced={1})


def test_batch_norm_statistics_are_exact(tmp_path: pathlib.Path, reference) -> None:
    with harness.job(tmp_path, FAULTS="1@4:forward:kill;0@7:backward:kill", BATCH_NORM="1") as job:
        check_recovered(job, job.run(), reference(BATCH_NORM="1"), faults=2, replaced={0, 1})


def test_the_largest_is_killed_as_by_an_out_of_memory_killer(
    tmp_path: pathlib.Path, reference
) -> None:
    """SIGKILL from outside to the process with the largest memory, as the kernel chooses it."""
    with harness.job(tmp_path, SLEEP_S="0.05", STEPS="40") as job:
        job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 5)
        pids = {fact["rank"]: fact["pid"] for fact in job.facts("entered")}
        sizes = {
            rank: int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
            for rank, pid in pids.items()
        }
        victim = max(sizes, key=lambda rank: sizes[rank])
        os.kill(pids[victim], signal.SIGKILL)
        finished = agent.wait(60)
        check_recovered(job, finished, reference(STEPS="40"), faults=0, replaced={victim})
        assert job.recoveries()[0]["faults"][0]["rank"] == victim


def test_a_rank_that_does_not_come_is_replaced(tmp_path: pathlib.Path, reference) -> None:
    """Rank 2 dies only when rank 1 has stopped.

    A rank that stops after the recovery is a hang, and no fault of this kind.
    """
    with harness.job(tmp_path, FAULTS="1@4:forward:stop", TASKD_FAULT_TIMEOUT="6") as job:
        job.start_manager()
        agent = job.start_agent("train.py")
        pids = wait_until(
            job,
            lambda: (
                {fact["rank"]: fact["pid"] for fact in job.facts("fault") + job.facts("entered")}
                if job.facts("fault")
                else None
            ),
        )
        wait_until(job, lambda: harness.state_of(pids[1]) == "T")
        os.kill(pids[2], signal.SIGKILL)
        check_recovered(job, agent.wait(60), reference(), faults=1, replaced={1, 2})
        assert {fault["rank"] for record in job.recoveries() for fault in record["faults"]} >= {
            1,
            2,
        }


def test_a_spent_budget_ends_the_job_and_says_so(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path, FAULTS="1@4:forward:kill;2@6:forward:kill;3@8:forward:kill") as job:
        finished = job.run(options=("--max-restarts=2",))
        assert finished.returncode != 0
        assert len(job.facts("fault")) == 3
        assert "restart budget" in finished.last_line, finished.last_line
        assert job.manager is not None
        assert job.manager.wait(20).returncode == 1
        assert job.leftovers() == set()


@pytest.mark.parametrize("options", RENDEZVOUS)
@pytest.mark.parametrize("share", ["0", "1"])
def test_each_rendezvous(
    tmp_path: pathlib.Path, reference, options: tuple[str, ...], share: str
) -> None:
    with harness.job(
        tmp_path, FAULTS="0@5:forward:kill", TORCH_DISABLE_SHARE_RDZV_TCP_STORE=share
    ) as job:
        options = tuple(option.format(port=job.master_port) for option in options)
        check_recovered(job, job.run(options=options), reference(), faults=1, replaced={0})


@pytest.mark.parametrize("number", [15, 2, 9])  # SIGTERM, SIGINT, SIGKILL
def test_nothing_is_left_when_torchrun_is_ended(tmp_path: pathlib.Path, number: int) -> None:
    with harness.job(
        tmp_path, SLEEP_S="0.05", STEPS="2000", TASKD_FAULT_TIMEOUT="6", LOADER_WORKERS="1"
    ) as job:
        job.start_manager()
        agent = job.start_agent("train.py", nproc=2)
        wait_for_step(job, 3)
        os.kill(agent.process.pid, number)
        finished = agent.wait(30)
        assert finished.returncode != 0
        assert job.manager is not None
        assert job.manager.wait(30).returncode == 1
        if number != signal.SIGKILL:
            name = signal.Signals(number).name
            said = (
                rf"taskd: job test-job has ended: torchrun got {name} after (\d+) committed steps"
            )
            found = re.match(said, finished.last_line)
            assert found is not None, finished.output
            assert int(found[1]) >= 3
            is_told = "TASKD_RECOVER_STRATEGY=recover-in-place,dump" in finished.last_line
            assert is_told == (number == signal.SIGTERM)
            assert f"(stopped: torchrun was interrupted, {name})" in job.manager.text
        deadline = time.monotonic() + 15
        while job.leftovers() and time.monotonic() < deadline:
            # the workers end a moment after torchrun: waiting for that fact
            time.sleep(0.02)
        assert job.leftovers() == set()


@pytest.mark.parametrize("rank", [0, 3])
def test_two_agents_on_one_machine(tmp_path: pathlib.Path, reference, rank: int) -> None:
    with harness.job(tmp_path, FAULTS=f"{rank}@5:backward:kill;2@8:forward:kill") as job:
        job.start_manager()
        options = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={job.master_port}")
        first = job.start_agent("train.py", nproc=2, options=(*options, "--node-rank=0"))
        second = job.start_agent("train.py", nproc=2, options=(*options, "--node-rank=1"))
        assert second.wait(90).returncode == 0, second.text[-6000:]
        check_recovered(job, first.wait(30), reference(), faults=2, replaced={rank, 2})


def test_without_a_manager_the_job_trains_after_a_warning(
    tmp_path: pathlib.Path, reference
) -> None:
    with harness.job(tmp_path, TASKD_FAULT_TIMEOUT="3", SLEEP_S="0.15") as job:
        finished = job.run(manager=False)
        assert finished.returncode == 0, finished.output[-6000:]
        assert job.digests() == reference()
        assert "no manager" in finished.output
        assert job.leftovers() == set()


def test_without_a_manager_a_death_restarts_the_group_as_torchrun_does(
    tmp_path: pathlib.Path, reference
) -> None:
    with harness.job(tmp_path, TASKD_FAULT_TIMEOUT="3", FAULTS="1@4:forward:kill") as job:
        finished = job.run(manager=False)
        assert finished.returncode == 0, finished.output[-6000:]
        assert "Going on as plain torchrun" in finished.output
        lost = r" ERROR taskd .* of 4 committed steps those begin again that no checkpoint holds"
        assert len(re.findall(lost, finished.output)) == 1
        assert len(job.facts("fault")) == 1
        assert job.digests() == reference()
        assert job.leftovers() == set()


def test_a_manager_that_is_stopped_too_long_finds_that_the_job_went_on_without_it(
    tmp_path: pathlib.Path, reference
) -> None:
    with harness.job(
        tmp_path, FAULTS="1@8:forward:kill", SLEEP_S="0.2", TASKD_FAULT_TIMEOUT="3"
    ) as job:
        manager, agent = job.start_manager(), job.start_agent("train.py")
        wait_for_step(job, 2)
        os.kill(manager.process.pid, signal.SIGSTOP)
        wait_until(job, lambda: harness.state_of(manager.process.pid) == "T")
        agent.wait_text("Going on as plain torchrun", 60)
        os.kill(manager.process.pid, signal.SIGCONT)
        assert manager.wait(20).returncode == 0, manager.text
        assert "this manager ends: the agent of node 0 left (fallback" in manager.text
        assert agent.wait(60).returncode == 0, agent.text
        assert len(job.facts("fault")) == 1
        assert job.digests() == reference()
        assert job.leftovers() == set()


def test_a_manager_that_dies_and_comes_back_still_heals(tmp_path: pathlib.Path, reference) -> None:
    with harness.job(
        tmp_path, SLEEP_S="0.05", STEPS="80", FAULTS="1@5:forward:kill;2@70:forward:kill"
    ) as job:
        manager = job.start_manager()
        agent = job.start_agent("train.py")
        manager.wait_text("recover", 60)
        wait_for_step(job, 10)
        os.kill(manager.process.pid, signal.SIGKILL)
        manager.wait(10)
        job.start_manager()
        check_recovered(job, agent.wait(90), reference(STEPS="80"), faults=2, replaced={1, 2})
        assert [record["generation"] for record in job.recoveries()] == [1, 2]


@pytest.mark.parametrize(
    ("how", "strategy", "replaced", "detail"),
    [
        ("raise", "retry", set(), "ValueError: a bad sample"),
        ("kill", "recover-in-place", {1}, "SIGKILL"),
    ],
)
def test_a_fault_while_no_manager_is_there_is_in_the_record_of_the_next(
    tmp_path: pathlib.Path, reference, how: str, strategy: str, replaced: set[int], detail: str
) -> None:
    """With what was done about it, and with all of the time that it took."""
    with harness.job(tmp_path, SLEEP_S="0.05", STEPS="80", FAULTS=f"1@10:step:told-{how}") as job:
        manager, agent = job.start_manager(), job.start_agent("train.py")
        wait_for_step(job, 2)
        os.kill(manager.process.pid, signal.SIGKILL)
        manager.wait(10)
        job.tell()
        (happened,) = wait_until(job, lambda: job.facts("fault"))
        began = time.monotonic()
        job.start_manager()
        check_recovered(job, agent.wait(90), reference(STEPS="80"), faults=1, replaced=replaced)
        (record,) = job.recoveries()
        assert (record["strategy"], record["restarts_used"]) == (strategy, 1)
        (fault,) = record["faults"]
        assert (fault["rank"], fault["detail"]) == (1, detail)
        assert record["total_s"] > began - happened["time"]
