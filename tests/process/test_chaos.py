"""`python -m taskd.chaos` on real jobs: what it injects happens, and its verdict is true."""

from __future__ import annotations

import json
import re
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from testbed.hosts import missing
from tests.process import harness
from tests.process.installation import install

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

LIMIT_S = 150
RANKS = 2
FOUND_AS = {"kill": "killed", "segv": "crashed", "stop": "hang"}


def start(job: harness.Job, *options: str, agent: tuple[str, ...] = ()) -> harness.Output:
    """As a user does."""
    path = install(job.directory / "installed")
    env = {key: value for key, value in job.env.items() if not key.startswith("TASKD_P")}
    env |= {"PYTHONPATH": path, "TASKD_PORT": str(job.port), "TASKD_MANAGER": "auto"}
    command = [
        *(sys.executable, "-m", "taskd.chaos", *options),
        *("--json", str(job.directory / "verdict.json")),
        *("--directory", str(job.directory / "chaos"), "--"),
        *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=taskd"),
        *(f"--nproc-per-node={RANKS}", *agent, str(harness.SCRIPTS / "train.py")),
    ]
    return harness.Output(command, env, job.directory / "chaos.out", job.directory)


def chaos(
    job: harness.Job, *options: str, agent: tuple[str, ...] = ()
) -> tuple[harness.Finished, dict]:
    """Run it to its end; returns that, and the verdict."""
    process = start(job, *options, agent=agent)
    try:
        finished = process.wait(LIMIT_S)
    finally:
        process.end()
    path = job.directory / "verdict.json"
    return finished, json.loads(path.read_text()) if path.exists() else {}


def check(verdict: dict, kinds: dict[str, int]) -> None:
    """Each fault has happened, to the rank that was drawn, and was found as what it was."""
    assert verdict["passed"], verdict["problems"]
    assert verdict["injected"] == kinds
    for fault in verdict["faults"]:
        assert fault["has_happened"]
        assert fault["total_s"] > 0
        if fault["kind"] in FOUND_AS:
            assert fault["ranks"] == [fault["position"]]
            assert fault["found_as"] == [FOUND_AS[fault["kind"]]]
            assert fault["recovered_by"] == "recover-in-place"
    assert verdict["other_recoveries"] == 0
    assert verdict["exit_code"] == 0


def test_two_faults_of_a_seed_are_recovered_and_the_result_is_the_same(
    tmp_path: pathlib.Path,
) -> None:
    with harness.job(tmp_path, STEPS="160", SLEEP_S="0.05") as job:
        finished, verdict = chaos(
            job, "--seed=3", "--faults=2", "--every=0.5", "--kinds=kill,segv",
            "--reference", r"--digest=rank \d: digest \w+",
        )  # fmt: skip
        assert finished.returncode == 0, finished.output
        check(verdict, {"kill": 1, "segv": 1})
        assert verdict["digest_equal"] == "yes"
        assert verdict["steps_redone"] == 0
        assert set(verdict["shares_by_mtbf"]) == {"10 min", "1 h", "3 h"}
        assert "verdict: passed" in finished.output
        assert job.leftovers() == set()


@pytest.mark.extended(
    "tests/unit/test_chaos.py: test_what_fails; tests/unit/test_chaos_target.py: "
    "test_nothing_of_a_command_is_left; test_recovery.py: test_a_spent_budget_*"
)
def test_a_job_that_does_not_recover_fails_and_nothing_of_it_is_left(
    tmp_path: pathlib.Path,
) -> None:
    """With a budget of one restart the second fault ends the job."""
    with harness.job(tmp_path, STEPS="4000", SLEEP_S="0.05") as job:
        finished, verdict = chaos(
            job,
            "--seed=3",
            "--faults=3",
            "--every=0.5",
            "--kinds=kill",
            agent=("--max-restarts=1",),
        )
        assert finished.returncode == 1, finished.output
        assert not verdict["passed"]
        assert verdict["not_recovered"] == [2]
        assert re.search(r"ended with 1 after fault 2 \(kill\)", finished.output)
        assert job.leftovers() == set()


@pytest.mark.extended(
    "tests/unit/test_chaos_target.py: test_a_fault_has_happened_*; tests/unit/test_chaos.py: "
    "test_what_fails, also a job that is over too soon; test_hangs.py: a stopped rank; "
    "test_one_command.py: a killed manager"
)
def test_every_kind_and_a_job_that_is_too_short(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path, STEPS="600", SLEEP_S="0.05") as job:
        finished, verdict = chaos(job, "--seed=5", "--faults=8", "--every=0.3")
        assert finished.returncode == 0, finished.output
        check(verdict, {"kill": 2, "segv": 2, "stop": 2, "manager": 2})
    with harness.job(tmp_path / "short", STEPS="100", SLEEP_S="0.05") as job:
        finished, verdict = chaos(job, "--seed=5", "--faults=20", "--every=1", "--kinds=kill")
        assert finished.returncode == 1, finished.output
        assert "of 20 faults: give it more steps" in finished.output
        assert verdict["not_recovered"] == []
        assert verdict["exit_code"] == 0


@pytest.mark.extended(
    "nearest: tests/unit/test_chaos_target.py: test_nothing_of_a_command_is_left, without a signal"
)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
def test_whoever_ends_it_ends_the_job(tmp_path: pathlib.Path, number: int, status: int) -> None:
    with harness.job(tmp_path, STEPS="4000", SLEEP_S="0.05") as job:
        process = start(job, "--faults=100", "--every=100")
        try:
            process.wait_text(f"{RANKS} training processes", LIMIT_S)
            process.process.send_signal(number)
            assert process.wait(LIMIT_S).returncode == status, process.text
        finally:
            process.end()
        assert job.leftovers() == set()


@pytest.mark.extended(
    "tests/unit/test_chaos.py: commands, and what is judged; test_spares.py: a lost node; "
    "test_networks.py: test_a_link_that_is_lossy_and_then_cut_*"
)
def test_a_node_and_a_link_of_namespaces(tmp_path: pathlib.Path) -> None:
    """By the commands of benchmarks/chaos_hosts.py, which also compares the states."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    command = [sys.executable, str(harness.ROOT / "benchmarks" / "chaos_hosts.py"), "--seed=3",
               "--faults=2", "--kinds=node,link", f"--json={tmp_path / 'found.json'}"]  # fmt: skip
    env = harness.environment(TMPDIR=str(tmp_path))
    process = harness.Output(command, env, tmp_path / "out", tmp_path)
    try:
        finished = process.wait(2 * LIMIT_S)
    finally:
        process.end()
    assert finished.returncode == 0, finished.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["injected"] == {"node": 1, "link": 1}
    assert found["recovered_by"]["node"] == {"recover": 1}
    assert found["jobs_with_equal_digests"] == 1
    assert found["states_compared"] > 0
    assert found["replaced_without_need"] == 0
