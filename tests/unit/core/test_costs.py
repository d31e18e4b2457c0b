"""Reports that change nothing, or only what is known of one rank, cost no look at all ranks.

Thousands of ranks say such a thing at the same time, and each look at all would cost a large job
minutes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.phase import JobPhase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.core.conftest import ManagerDriver


class Looks(set[int]):
    """Ranks that are waited for; counts how often they are gone through."""

    count = 0

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        return super().__iter__()


def offer(job: ManagerDriver, rank: int, generation: int) -> None:
    job.worker(ev.WorkerMayAdvance, rank, generation, 5)


REPEATED: dict[str, Callable[[ManagerDriver, int], object]] = {
    "an offer": lambda job, rank: offer(job, rank, job.machine.generation),
    "a stop": lambda job, rank: job.pause(rank),
    "an exception of the generation before": lambda job, rank: job.raise_(rank, generation=0),
}


@pytest.mark.parametrize("what", REPEATED)
def test_what_was_said_before_all_went_on(manager, what: str) -> None:
    """An order that is repeated has those who hear it say again that they wait."""
    job, waiting = resumed(manager)
    for rank in (0, 2, 3):
        REPEATED[what](job, rank)
    assert (job.machine.phase, waiting.count) == (JobPhase.RESUMED, 0)


def test_those_whose_communication_broke_when_not_all_had_gone_on(manager) -> None:
    job, waiting = resumed(manager)
    for rank in (0, 2, 3):
        job.raise_(rank, "Connection closed by peer", kind=FaultKind.COMMUNICATION)
    assert (job.machine.phase, waiting.count) == (JobPhase.SUSPECTING, 0)


def resumed(manager) -> tuple[ManagerDriver, Looks]:
    """A job that goes on, and the ranks of which a new step is waited for."""
    job = manager(nodes=2, per_node=2).joined()
    job.lose(1)
    for rank in job.ranks:
        job.pause(rank, None if rank == 1 else 5)
    attempt = job.machine._state.attempt
    waiting = attempt.waiting = Looks(attempt.waiting)
    assert job.machine.phase is JobPhase.RESUMED
    return job, waiting


def test_a_report_that_is_not_over_is_followed_by_all_that_it_calls_for(manager) -> None:
    """An earlier manager has interrupted this rank, and nobody else will resume it."""
    job, _ = resumed(manager)
    job.recover_all()
    assert job.machine.phase is JobPhase.RUNNING
    job.machine._state.resumed_generation = -1  # as one that was started again
    assert [type(one).__name__ for one in job.pause(0)] == ["Interrupt"]
