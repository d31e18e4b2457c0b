"""Both machines and their parts: refusals, and reports that concern nobody any more."""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import Fault, FaultKind
from taskd.core.job.invariants import check
from taskd.core.job.state import Job
from taskd.core.leases import Leases
from taskd.core.membership import Membership
from taskd.core.phase import Phase
from taskd.core.profiling import Domain, Domains
from taskd.core.record import TimedFault
from taskd.core.stagnation import DEATH_LIMIT, Stagnation
from taskd.core.timeouts import Timeouts
from tests.unit.core.answers import only, passed_on, told


@pytest.mark.parametrize(
    "limits", [(0.0, 10.0), (-1.0, 10.0), (10.0, 10.0), (11.0, 10.0), (1.0, float("inf"))]
)
def test_limits_of_hangs_that_are_not_in_order_are_refused(limits: tuple[float, float]) -> None:
    floor_s, ceiling_s = limits
    with pytest.raises(ValueError, match="must be positive and in order"):
        Timeouts.derive(30.0, hang_floor_s=floor_s, hang_ceiling_s=ceiling_s)


def test_domains_are_shown_in_words() -> None:
    shown = str(Domains(Domain.ON, Domain.EXCEPTION))
    assert shown == "default on, communication exception"


def test_a_change_of_phase_that_no_table_knows_is_written_down_and_breaks_the_invariants() -> None:
    timeouts = Timeouts.derive(30.0)
    job = Job(timeouts, Membership(), Leases(timeouts))
    job.phase = Phase.RUNNING
    check(job)
    job.declare("a rank started", Phase.JOINING, frozenset({Phase.RUNNING}))
    assert job.undeclared == []
    job.declare("a rank started", Phase.JOINING, frozenset({Phase.PAUSING}))
    assert job.undeclared == ["a rank started: joining to running"]
    assert "no table knows that a rank started" in job.story.last()
    with pytest.raises(AssertionError):
        check(job)


def test_no_whole_copy_ends_a_job_that_may_only_retry(manager) -> None:
    job = manager(per_node=2, strategies="retry").joined()
    job.raise_(0, clean=False)
    end = only(job.pause(1, 5, clean=False), do.GiveUp)
    assert end.reason.startswith("no clean copy of the state is left")
    assert job.machine.phase is Phase.ENDING


def test_a_fault_that_progress_has_forgotten_is_forgotten_once() -> None:
    """It was a consequence, which is known after new commits only: later deaths still count."""
    stagnation = Stagnation()

    def death(make_rank: int, generation: int, version: int) -> TimedFault:
        fault = Fault(FaultKind.KILLED, make_rank, 0, "SIGKILL", version)
        known = TimedFault(fault, float(generation), float(generation))
        known.generation = generation
        stagnation.saw(float(generation), generation, version)
        stagnation.take(known)
        return known

    old = death(1, 1, 5)
    for generation in range(2, DEATH_LIMIT + 1):
        death(1, generation, 6)
        stagnation.forget(old)
    assert stagnation.verdict() is None
    death(1, DEATH_LIMIT + 1, 6)
    stagnation.forget(old)
    assert stagnation.verdict() is not None


def test_a_node_that_has_nothing_of_a_rank_is_no_source(manager) -> None:
    job = manager(nodes=2, per_node=1, strategies="dump").joined()
    for rank in job.ranks:
        job.worker(ev.WorkerHolds, rank, f"s{rank}")
    job.send(ev.MirrorsHeld, 0, ((1, (4, 5)),))
    assert job.machine.membership.mirrors == {1: {0: (4, 5)}}
    job.send(ev.MirrorsHeld, 0, ((1, ()),))
    assert job.machine.membership.mirrors == {1: {}}
    job.send(ev.AgentLeft, 1, "stopped", "")
    assert "no dump: " in only(job.pause(0, 5, snapshots=(4, 5)), do.GiveUp).reason


class TestNode:
    def test_what_an_earlier_life_held_is_not_taken_for_what_this_one_has(self, node) -> None:
        agent = node()
        agent.worker(ev.WorkerHolds, 0, "a")
        agent.exit(0)
        agent.replace(0)
        (event,) = told(agent.worker(ev.WorkerHolds, 0, "b", incarnation=0))
        assert (event.incarnation, event.shard) == (0, "b"), (
            "the manager knows itself that it is late"
        )
        reports = agent.machine.registration(agent.now).workers
        assert [report.shard for report in reports] == ["a", ""]

    @pytest.mark.parametrize("kind", [do.Dump, do.Publish])
    def test_an_order_for_the_checkpoint_goes_to_every_live_worker(self, node, kind) -> None:
        agent = node(3)
        agent.command(do.Interrupt, 1, "x")
        agent.exit(1)
        details = {do.Dump: (5, (0, 2), 3, "reason", "1-1"), do.Publish: (0, 0, 0, False)}[kind]
        commands = agent.command(kind, 1, *details)
        assert passed_on(commands) == [(0, kind.__name__), (2, kind.__name__)]
