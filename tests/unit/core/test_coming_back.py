"""Both machines.

A rank that waits within its function, when the connection of its node breaks just then.

What a node says at its registration must be what its ranks do, and what the manager says again must
be what they wait for: no other deadline would ever end their wait.
"""

from dataclasses import replace

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.job.machine import RecoveryMachine
from taskd.core.phase import JobPhase
from tests.unit.core.answers import kinds, only, passed_on, told


def ask(job, rank: int, version: int = 7) -> list[do.Command]:
    return job.worker(ev.WorkerMayAdvance, rank, job.machine.generation, version)


@pytest.fixture
def asking(node):
    """A node, both of whose ranks were called out and ask how far to go."""
    agent = node()
    agent.command(do.Interrupt, 1, "rank 2 is gone")
    for rank in (0, 1):
        assert kinds(agent.worker(ev.WorkerMayAdvance, rank, 1, 7, (6, 7))) == ["TellManager"]
    return agent


@pytest.fixture
def voting(manager):
    """Two nodes with two ranks each, of which 0 and 2 hold one part and 1 and 3 another.

    Rank 0 has died. Node 1 is called out.
    """
    job = manager(nodes=2, per_node=2).joined()
    for rank in job.ranks:
        job.worker(ev.WorkerHolds, rank, f"shard {rank % 2}")
    job.lose(0, FaultKind.KILLED, "SIGKILL", version=7)
    job.pause(0, None)
    return job


def comes_back(job, asking) -> list[do.Command]:
    """The node registers as number 1 of the job."""
    reports = [
        replace(report, rank=report.rank + 2)
        for report in asking.machine.registration(asking.now).workers
    ]
    return job.register(1, *reports, generation=asking.machine.generation)


class TestANodeThatRegistersAgain:
    def test_it_says_that_its_ranks_wait_and_with_what(self, asking) -> None:
        for report in asking.machine.registration(asking.now).workers:
            assert (report.state, report.version, report.may_advance, report.snapshots) == (
                "paused",
                7,
                True,
                (6, 7),
            )

    def test_a_vote_that_broke_before_anybody_called_is_an_offer(self, node, make_fault) -> None:
        agent = node()
        broken = make_fault(FaultKind.COMMUNICATION, 0, 0, "reset", version=7)
        agent.worker(ev.WorkerRaised, 0, 0, broken, True, 0.0, (), True)
        assert [
            (report.state, report.may_advance)
            for report in agent.machine.registration(agent.now).workers
        ] == [("paused", True), ("running", False)]

    def test_an_offer_is_void_with_the_next_interrupt(self, asking) -> None:
        asking.command(do.Interrupt, 2, "rank 3 is gone, too")
        assert [report.state for report in asking.machine.registration(asking.now).workers] == [
            "running",
            "running",
        ]
        assert told(asking.command(do.Interrupt, 2, "rank 3 is gone, too")) == []

    def test_without_a_manager_it_does_not_wait_for_ever(self, asking) -> None:
        asking.send(ev.ManagerLost)
        commands = asking.tick()
        assert kinds(commands) == ["TellWorker", "TellWorker", "FallBack"]
        assert passed_on(commands) == [(0, "GiveUp"), (1, "GiveUp")]


class TestAManagerThatHearsOfIt:
    def test_resume_was_lost(self, voting, asking) -> None:
        voting.pause(1, 7)
        ask(voting, 2)
        resume = only(ask(voting, 3), do.Resume)
        assert comes_back(voting, asking) == [resume]
        assert passed_on(asking.send(ev.CommandReceived, resume)) == [(0, "Resume"), (1, "Resume")]

    def test_its_offers_were_lost(self, voting, asking) -> None:
        voting.pause(1, 7)
        assert kinds(comes_back(voting, asking)) == ["Interrupt", "Resume"]

    def test_advance_was_lost(self, voting, asking) -> None:
        ask(voting, 2), ask(voting, 3)
        advance = only(voting.pause(1, 8), do.Advance)
        assert advance.ranks == (2, 3)
        assert comes_back(voting, asking) == [advance]
        assert ask(voting, 2) == ask(voting, 3) == [], "what it registered with is said once more"
        assert passed_on(asking.send(ev.CommandReceived, replace(advance, ranks=(0, 1)))) == [
            (0, "Advance"),
            (1, "Advance"),
        ]
        voting.pause(2, 8)
        assert only(voting.pause(3, 8), do.Resume).version == 8

    def test_advance_and_its_registration_cross(self, voting, asking) -> None:
        """Rank 1, which had passed, dies meanwhile: that changes no order that was given."""
        ask(voting, 2), ask(voting, 3)
        advance = only(voting.pause(1, 8), do.Advance)
        assert kinds(voting.lose(1, FaultKind.KILLED, "SIGKILL", version=8)) == ["ReplaceWorker"]
        assert comes_back(voting, asking) == [advance]
        assert voting.pause(1, None) == [], "nobody is resumed who does his step just now"
        voting.pause(2, 8)
        assert only(voting.pause(3, 8), do.Resume).version == 8

    def test_a_new_manager_calls_them_out_again(self, asking) -> None:
        machine = RecoveryMachine("job", asking.timeouts)
        report = asking.machine.registration(asking.now)
        interrupt = only(machine.handle(report), do.Interrupt)
        assert machine.phase is JobPhase.PAUSING
        assert interrupt.generation == 2
        assert passed_on(asking.send(ev.CommandReceived, interrupt)) == [
            (0, "Interrupt"),
            (1, "Interrupt"),
        ]


class TestWhatWasCommittedBeforeTheAnswer:
    """An agent that comes back tells what its ranks held before it was cut off.

    What was decided since counts.
    """

    def test_a_life_that_the_restart_ended(self, manager) -> None:
        job = manager(nodes=2, per_node=1).joined(declared=False)
        only(job.lose(1, version=4), do.RestartGroup)
        job.register(1, ev.WorkerReport(1, 0, "lost", version=4))
        for rank in job.ranks:
            job.worker(ev.WorkerStarted, rank, 1)
            job.worker(ev.WorkerDeclared, rank, True)
        job.raise_(0, version=0)
        job.pause(0, 0)
        assert only(job.pause(1, 0), do.Resume).version == 0
        assert [
            command.record.steps_redone for rank in job.ranks for command in job.recover(rank, 1)
        ] == [0]

    def test_a_rank_that_has_been_told_to_go_on(self, manager) -> None:
        job = manager(nodes=2, per_node=1).joined()
        for rank in job.ranks:
            job.worker(ev.WorkerHolds, rank, f"shard {rank}")
        job.lose(0, FaultKind.KILLED, "SIGKILL", version=7, snapshots=(5,))
        job.pause(1, 7, snapshots=(5,))
        resume = only(job.pause(0, None, snapshots=(5,)), do.Resume)
        assert resume.version == 5
        assert job.register(
            1, ev.WorkerReport(1, 0, "paused", version=7, snapshots=(5,)), generation=1
        ) == [resume]
        assert [
            command.record.steps_redone for rank in job.ranks for command in job.recover(rank, 6)
        ] == [2]
        job.raise_(0, version=6)
        job.pause(0, 6)
        job.pause(1, 6)
        assert [
            command.record.steps_redone for rank in job.ranks for command in job.recover(rank, 7)
        ] == [0]

    def test_a_node_that_was_told_to_go_on_from_an_older_version(self, node) -> None:
        agent = node()
        agent.command(do.Interrupt, 1, "rank 2 is gone")
        for rank in (0, 1):
            agent.worker(ev.WorkerPaused, rank, 1, 7, True, "", (5,))
        moves = tuple(do.Move(rank, None, 5) for rank in range(3))
        agent.command(do.Resume, 1, 5, moves, 1)
        assert [report.version for report in agent.machine.registration(agent.now).workers] == [
            5,
            5,
        ]
