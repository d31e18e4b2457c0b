"""Ranks that stand still while the others wait for them.

Found, named, killed with their stacks taken, and replaced.
"""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed

from tests.process import harness
from tests.process.harness import wait_for_step
from tests.process.test_recovery import check_recovered, reference  # noqa: F401

if TYPE_CHECKING:
    import pathlib

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"),
        reason="the flight recorder of this torch does not know gloo: nobody sees who waits in it",
    ),
]

STEP_S = "0.05"


@pytest.mark.parametrize(
    ("how", "detail"),
    [
        ("stop", "stopped by a signal"),
        ("spin", "with the interpreter lock held"),
        ("sleep", "asleep"),
    ],
)
@pytest.mark.parametrize("place", ["step", "forward"])
def test_a_rank_that_stands_still_is_replaced(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
    how: str,
    detail: str,
    place: str,
) -> None:
    with harness.job(tmp_path, FAULTS=f"2@20:{place}:{how}", STEPS="30", SLEEP_S=STEP_S) as job:
        finished = job.run()
        check_recovered(
            job, finished, reference(STEPS="30", SLEEP_S=STEP_S), faults=1, replaced={2}
        )
        (record,) = job.recoveries()
        (fault,) = record["faults"]
        assert (fault["rank"], fault["kind"]) == (2, "hang")
        assert detail in fault["detail"]
        assert f'File "{harness.SCRIPTS / "train.py"}"' in fault["traceback"]
        assert "Native stack" in fault["traceback"]
        assert "the stacks of rank 2, which hangs" in job.manager.text
        assert record["steps_redone"] == 0


def test_what_ranks_said_before_the_manager_answered_is_known(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    """The agent's registration is on its way while they begin to train.

    A rank that was not known to would never be judged.
    """
    with harness.job(tmp_path, FAULTS="2@60:step:sleep", STEPS="70", SLEEP_S=STEP_S) as job:
        manager = job.start_manager()
        manager.wait_text("listens on", 30)
        manager.process.send_signal(signal.SIGSTOP)
        agent = job.start_agent("train.py")
        wait_for_step(job, 5)
        assert "registered" not in manager.text
        manager.process.send_signal(signal.SIGCONT)
        check_recovered(
            job, agent.wait(90), reference(STEPS="70", SLEEP_S=STEP_S), faults=1, replaced={2}
        )
        (record,) = job.recoveries()
        assert [fault["rank"] for fault in record["faults"]] == [2]
        assert record["total_s"] < 20


def test_one_that_gave_its_state_to_another_is_found_like_any_other(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    """What it has sent is no collective, and makes nobody look further than the others."""
    with harness.job(
        tmp_path,
        FAULTS="2@10:step:kill;3@20:step:sleep;0@24:forward:sleep;1@28:step:sleep",
        STEPS="32",
        SLEEP_S=STEP_S,
    ) as job:
        finished = job.run()
        check_recovered(
            job, finished, reference(STEPS="32", SLEEP_S=STEP_S), faults=4, replaced={0, 1, 2, 3}
        )
        assert [record["faults"][0]["rank"] for record in job.recoveries()] == [2, 3, 0, 1]
        assert all(record["total_s"] < 20 for record in job.recoveries())


def test_slow_steps_a_long_checkpoint_and_a_slow_start_are_no_hangs(tmp_path: pathlib.Path) -> None:
    """A small version of `benchmarks/hangs.py --steps 10000`."""
    with harness.job(
        tmp_path,
        STEPS="300",
        STEP_S="0.02",
        SLOW_SHARE="0.02",
        FIRST_S="6",
        SAVE_AT="50,150",
        SAVE_S="5",
    ) as job:
        finished = job.run("slow.py")
        assert finished.returncode == 0, finished.output
        assert len(job.facts("slow")) >= 3
        assert len(job.facts("saved")) == 2
        assert sorted(fact["rank"] for fact in job.facts("done")) == [0, 1, 2, 3]
        assert job.recoveries() == []


@pytest.mark.extended(
    "tests/unit/core/test_hangs.py: test_a_rank_that_stays_at_the_gate_is_replaced"
)
def test_a_rank_that_is_stuck_at_the_gate_is_replaced(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    """The others wait for it in no collective: they make their groups anew, for half an hour."""
    env = {"STEPS": "30", "SLEEP_S": STEP_S, "TASKD_FAULT_TIMEOUT": "6"}
    with harness.job(tmp_path, FAULTS="1@10:forward:kill", **env) as job:
        finished = job.run("stuck_at_gate.py")
        check_recovered(
            job, finished, reference(STEPS="30", SLEEP_S=STEP_S), faults=2, replaced={1, 3}
        )
        last = job.recoveries()[-1]["faults"]
        assert [fault["rank"] for fault in last] == [3]
        assert last[0]["kind"] == "hang"
        assert last[0]["detail"].startswith("still paused after")
        assert "destroy_process_group" in last[0]["traceback"]


def test_a_rank_that_is_stopped_at_the_gate_is_replaced_as_soon_as_in_a_step(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    """At the floor of the limits for hangs, not when the time for a pause is over, at 30 s."""
    env = {"STEPS": "30", "SLEEP_S": STEP_S, "TASKD_HANG_FLOOR": "2", "STUCK": "stopped"}
    with harness.job(tmp_path, FAULTS="1@10:forward:kill", **env) as job:
        finished = job.run("stuck_at_gate.py")
        check_recovered(
            job, finished, reference(STEPS="30", SLEEP_S=STEP_S), faults=2, replaced={1, 3}
        )
        (fault,) = job.recoveries()[-1]["faults"]
        assert (fault["rank"], fault["kind"]) == (3, "hang")
        found = re.fullmatch(r"stopped by a signal for (\S+) s in paused", fault["detail"])
        assert found is not None, fault["detail"]
        assert 2 <= float(found[1]) < 25
