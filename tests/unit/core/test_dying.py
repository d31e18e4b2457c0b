"""RecoveryMachine: the dying gasp.

Who is called, who writes what, and every way in which it can fail.
"""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.job.record import Attempt
from taskd.core.phase import JobPhase
from taskd.core.policy.ladder import STRATEGY_NAMES, Strategy, allowed
from tests.unit.core.answers import acts, kinds, only


@pytest.fixture
def dying(manager):
    """Four ranks of a job that may only dump; rank 1 is dead, the others are called out."""
    job = manager(strategies="dump").joined()
    assert kinds(job.lose(1, FaultKind.KILLED, "SIGKILL")) == ["Interrupt"]
    return job


def dumped(
    job, rank: int, stage: str = "written", detail: str = "", *, generation: int | None = None
) -> list[do.Command]:
    return job.worker(
        ev.WorkerDumped,
        rank,
        job.machine.generation if generation is None else generation,
        stage,
        detail,
    )


def pause_all(job, *versions: int) -> list[do.Command]:
    commands: list[do.Command] = []
    live = [member.rank for member in job.machine.membership.live()]
    for rank, version in zip(live, versions or [5] * len(live), strict=True):
        assert commands == []
        commands = job.pause(rank, version)
    return commands


class TestAfterIt:
    """`restarts_after_dump`: the job goes on from what was saved because of a fault."""

    @pytest.fixture
    def saved(self, manager):
        """Everything but the last word of the publisher."""

        def until_then(**settings):
            job = manager(strategies="dump", restarts_after_dump=True, **settings).joined()
            job.lose(1, FaultKind.KILLED, "SIGKILL")
            pause_all(job)
            for rank in (0, 2, 3):
                dumped(job, rank)
            assert job.machine.phase is JobPhase.PUBLISHING
            return job

        return until_then

    def test_all_processes_start_anew_and_no_step_is_redone(self, saved) -> None:
        job = saved()
        restart = only(dumped(job, 0, "published", "/c/dump-5"), do.RestartGroup)
        assert restart.incarnations == tuple((rank, 2) for rank in range(4))
        assert (restart.restarts_used, restart.generation) == (1, 2)
        assert restart.reason == "step 5 was saved in /c/dump-5: all processes go on from it"
        for rank in range(4):
            assert job.worker(ev.WorkerStarted, rank, 4711) == []
        record = only(job.recover_all(), do.RecordRecovery).record
        assert (record.strategy, record.steps_redone) == ("dump", 0)
        assert job.machine.phase is JobPhase.RUNNING
        end = only(job.lose(1, FaultKind.KILLED, "SIGKILL", incarnation=2), do.GiveUp)
        assert end.reason.endswith("; and no dump: no live process uses taskd.recoverable")

    @pytest.mark.parametrize(("saved_version", "redone"), [(5, 0), (3, 2)])
    def test_what_an_older_snapshot_lacks_is_redone(self, saved_version: int, redone: int) -> None:
        attempt = Attempt("c", 0.0)
        attempt.restarted([0], 5, saved_version)
        assert attempt.steps_redone == redone
        attempt.went_on_from(saved_version)
        assert (attempt.version, attempt.steps_redone) == (saved_version, redone)

    def test_not_if_a_node_is_to_end_meanwhile(self, saved) -> None:
        job = saved()
        assert job.send(ev.AgentDraining, 0, "SIGTERM", 30.0) == []
        assert only(dumped(job, 0, "published", "/c/dump-5"), do.GiveUp).dump == "/c/dump-5"

    def test_not_if_that_was_the_reason(self, manager) -> None:
        job = manager(strategies="dump", restarts_after_dump=True).joined()
        job.send(ev.AgentDraining, 0, "SIGTERM", 30.0)
        pause_all(job)
        for rank in range(4):
            dumped(job, rank)
        assert only(dumped(job, 0, "published", "/c/dump-5"), do.GiveUp)

    def test_not_if_no_restart_is_left(self, manager) -> None:
        job = manager(strategies="dump", restarts_after_dump=True, max_restarts=0).joined()
        job.lose(1, FaultKind.KILLED, "SIGKILL")
        pause_all(job)
        for rank in (0, 2, 3):
            dumped(job, rank)
        end = only(dumped(job, 0, "published", "/c/dump-5"), do.GiveUp)
        assert end.reason.startswith("restart budget spent")


class TestWhoWrites:
    def test_those_who_are_left_write_and_one_publishes_and_then_the_job_ends(self, dying) -> None:
        dump = only(pause_all(dying), do.Dump)
        assert (dump.version, dump.writers, dump.world_size, dump.generation) == (
            5,
            (0, 2, 3),
            4,
            1,
        )
        assert dump.reason == "rank 1 ended with SIGKILL at step 5"
        assert dying.machine.phase is JobPhase.SAVING
        assert dumped(dying, 2) == dumped(dying, 0) == []
        publish = only(dumped(dying, 3), do.Publish)
        assert (publish.rank, publish.node_rank) == (0, 0)
        end = only(dumped(dying, 0, "published", "/c/dump-5"), do.GiveUp)
        assert (end.dump, end.culprit) == ("/c/dump-5", 1)
        assert end.reason == "rank 1 ended with SIGKILL at step 5; step 5 was saved in /c/dump-5"
        assert dying.machine.phase is JobPhase.ENDING
        assert not only(dying.send(ev.AgentLeft, 0, "dumped", ""), do.EndJob).succeeded

    def test_the_newest_version_that_somebody_holds_whole(self, dying) -> None:
        assert only(pause_all(dying, 5, 6, 5), do.Dump).writers == (2,)

    def test_whoever_is_torn_writes_nothing(self, dying) -> None:
        dying.pause(0, 5, clean=False)
        dying.pause(2, 5)
        assert only(dying.pause(3, 5), do.Dump).writers == (2, 3)

    def test_what_only_the_dead_had_is_taken_from_the_memory_of_their_node(self, manager) -> None:
        job = manager(strategies="dump").joined()
        for rank in range(4):
            assert job.worker(ev.WorkerHolds, rank, f"s{rank}") == []
        job.lose(1, FaultKind.KILLED, "SIGKILL", snapshots=(3, 4))
        job.pause(0, 5, snapshots=(3, 4))
        job.pause(2, 5, snapshots=(3, 4))
        dump = only(job.pause(3, 6, snapshots=(4, 6)), do.Dump)
        assert (dump.version, dump.writers, dump.orphaned) == (4, (0, 2, 3), ((1, 2),))
        for rank in (0, 2, 3):
            dumped(job, rank)
        end = dumped(job, 0, "published", "/c/dump-4")
        assert only(end, do.GiveUp).dump == "/c/dump-4"
        end += job.tick()  # how the dead rank died is waited for
        record = only(end, do.RecordRecovery).record
        assert (record.strategy, record.steps_redone) == ("dump", 2)

    def test_what_a_rank_leaves_that_had_to_be_killed_is_waited_for(self, manager) -> None:
        job = manager(strategies="dump").joined()
        for rank in range(4):
            job.worker(ev.WorkerHolds, rank, f"s{rank}")
        job.raise_(0, snapshots=(3, 4))
        job.pause(1, 5, snapshots=(3, 4))
        job.pause(2, 5, snapshots=(3, 4))
        job.hear_all_until(job.now + 15)
        assert kinds(job.tick()) == ["KillWorker"]
        dump = only(job.lose(3, FaultKind.KILLED, "SIGKILL", snapshots=(4,)), do.Dump)
        assert (dump.version, dump.orphaned) == (4, ((3, 0),))

    def test_it_is_not_waited_for_for_ever(self, manager) -> None:
        job = manager(strategies="dump").joined()
        job.raise_(0)
        job.pause(1), job.pause(2)
        job.hear_all_until(job.now + 15)
        assert kinds(job.tick()) == ["KillWorker"]
        assert only(job.tick(), do.Dump).writers == (0, 1, 2)

    def test_a_part_that_is_nowhere_ends_the_job_without_a_dump(self, manager) -> None:
        job = manager(strategies="dump").joined()
        for rank in range(4):
            job.worker(ev.WorkerHolds, rank, f"s{rank}")
        job.lose(1, FaultKind.KILLED, "SIGKILL", snapshots=(3,))
        job.pause(0, 5, snapshots=(3, 4))
        job.pause(2, 5, snapshots=(4,))
        end = only(job.pause(3, 5, snapshots=(3, 4)), do.GiveUp)
        assert "no dump: no version of the state is complete" in end.reason

    def test_a_fault_that_leaves_all_alive_dumps_too(self, manager) -> None:
        job = manager(strategies="dump").joined()
        assert kinds(job.raise_(0)) == ["Interrupt"]
        job.pause(1), job.pause(2)
        assert only(job.pause(3), do.Dump).writers == (0, 1, 2, 3)

    def test_whoever_has_returned_writes_too(self, manager) -> None:
        job = manager(per_node=2, strategies="dump").joined()
        job.return_(0, 10)
        assert kinds(job.lose(1, FaultKind.KILLED, "SIGKILL", version=9)) == ["Interrupt"]
        assert only(job.pause(0, 10), do.Dump).writers == (0,)


class TestWhenItIsChosen:
    def test_replacing_comes_first_if_it_is_allowed(self, manager) -> None:
        job = manager(strategies="recover-in-place,dump").joined()
        assert kinds(job.lose(1)) == ["Interrupt", "ReplaceWorker"]

    def test_when_the_restarts_are_used_up(self, manager) -> None:
        job = manager(strategies="recover-in-place,dump", max_restarts=1).joined()
        job.lose(1)
        job.pause_all()
        for rank in job.ranks:
            job.recover(rank)
        assert kinds(job.lose(2, version=6)) == ["Interrupt"]
        dump = only(pause_all(job, 6, 6, 6), do.Dump)
        assert dump.writers == (0, 1, 3)
        assert "restart budget spent" in dump.reason

    def test_a_second_death_that_is_one_too_many_while_the_first_is_being_replaced(
        self, manager
    ) -> None:
        job = manager(strategies="recover-in-place,dump", max_restarts=1).joined()
        assert kinds(job.lose(1)) == ["Interrupt", "ReplaceWorker"]
        job.pause(0)
        assert job.lose(2) == []
        assert only(job.pause(3), do.Dump).writers == (0, 3), (
            "the replacement that was to come is not waited for"
        )

    def test_when_an_exception_comes_back(self, manager) -> None:
        job = manager(strategies="retry,dump").joined()
        job.raise_(0)
        job.pause_all()
        for rank in job.ranks:
            job.recover(rank, 5)
        job.raise_(0)
        assert kinds(job.tick()) == ["Interrupt"]
        assert "the same exception came back" in only(pause_all(job), do.Dump).reason

    def test_a_node_that_is_lost(self, manager) -> None:
        job = manager(nodes=2, per_node=2, strategies="recover-in-place,dump").joined()
        assert kinds(job.send(ev.AgentLeft, 1, "stopped", "torchrun was interrupted")) == [
            "Interrupt"
        ]
        assert only(pause_all(job), do.Dump).writers == (0, 1)

    def test_not_allowed(self, manager) -> None:
        job = manager(strategies="exit").joined()
        assert only(job.lose(1, FaultKind.KILLED, "SIGKILL"), do.GiveUp).dump == ""

    def test_a_script_that_is_not_recoverable_has_nothing_to_save(self, manager) -> None:
        job = manager(strategies="dump").joined(declared=False)
        assert acts(job.lose(1, FaultKind.KILLED, "SIGKILL")) == ["GiveUp"]

    def test_a_drain_lets_everybody_finish_the_step(self, manager) -> None:
        job = manager(nodes=2, per_node=1, strategies="recover-in-place,dump").joined()
        assert only(job.send(ev.AgentDraining, 1, "SIGTERM", 30.0), do.Interrupt).finish_step
        assert job.send(ev.AgentDraining, 0, "SIGTERM", 30.0) == [], (
            "the other node's pod is evicted as well"
        )
        dump = only(pause_all(job), do.Dump)
        assert (dump.reason, dump.writers) == ("node 1 is to end (SIGTERM)", (0, 1))
        assert job.send(ev.AgentDraining, 0, "SIGTERM", 30.0) == []

    def test_a_drain_without_the_strategy_ends_the_job(self, manager) -> None:
        assert kinds(
            manager(strategies="recover-in-place")
            .joined()
            .send(ev.AgentDraining, 0, "SIGTERM", 30.0)
        ) == ["GiveUp", "RecordRecovery"]


class TestTheReason:
    """The alarm rings before the kernel says how a process died."""

    def test_the_exit_status_is_waited_for(self, manager, make_fault) -> None:
        job = manager(strategies="dump").joined()
        job.lose(1)
        assert pause_all(job) == []
        how = make_fault(FaultKind.KILLED, 1, 0, "SIGKILL", version=5)
        assert only(job.worker(ev.WorkerExitKnown, 1, how), do.Dump).reason == (
            "rank 1 ended with SIGKILL at step 5"
        )

    def test_of_each_that_died(self, manager, make_fault) -> None:
        job = manager(strategies="dump").joined()
        job.lose(1), job.lose(3)
        assert pause_all(job) == []
        known = [make_fault(FaultKind.KILLED, rank, 0, "SIGKILL", version=5) for rank in (1, 3)]
        assert job.worker(ev.WorkerExitKnown, 3, known[1]) == []
        assert only(job.worker(ev.WorkerExitKnown, 1, known[0]), do.Dump).reason == (
            "rank 1 ended with SIGKILL at step 5; rank 3 ended with SIGKILL at step 5"
        )

    def test_whoever_ended_because_of_another_death_is_not_blamed(self, manager) -> None:
        """The kernel closes the sockets of a dead process before anybody hears of it."""
        job = manager(strategies="exit").joined(declared=False)
        reset = "exit 1 after RuntimeError: [gloo] Connection reset by peer"
        assert job.lose(0, FaultKind.EXITED, reset, version=None) == []
        assert job.lose(2, FaultKind.EXITED, reset, version=None) == []
        end = only(job.lose(1, FaultKind.KILLED, "SIGKILL", version=None), do.GiveUp)
        why = "rank 1 ended with SIGKILL; no restart is allowed (recover-strategy)"
        assert (end.reason, end.culprit) == (why, 1)

    def test_even_where_its_status_comes_later(self, manager, make_fault) -> None:
        job = manager(strategies="exit").joined(declared=False)
        job.lose(0, FaultKind.EXITED, "exit 1 after RuntimeError: Broken pipe", version=None)
        assert job.lose(1, version=None) == []
        how = make_fault(FaultKind.CRASHED, 1, 0, "SIGSEGV")
        end = only(job.worker(ev.WorkerExitKnown, 1, how), do.GiveUp)
        assert end.reason.startswith("rank 1 ended with SIGSEGV")

    def test_unless_there_is_none(self, manager) -> None:
        job = manager(strategies="exit").joined(declared=False)
        reset = "exit 1 after RuntimeError: Connection reset by peer"
        assert job.lose(0, FaultKind.EXITED, reset, version=None) == []
        end = only(job.tick(), do.GiveUp)
        assert end.reason.startswith(f"rank 0 ended with {reset}; no restart")
        assert job.now < 101 + job.timeouts.communication_grace_s

    def test_it_may_be_known_first(self, manager, make_fault) -> None:
        job = manager(strategies="dump").joined()
        job.lose(1)
        job.worker(ev.WorkerExitKnown, 1, make_fault(FaultKind.KILLED, 1, 0, "SIGKILL", version=5))
        assert only(pause_all(job), do.Dump).reason == "rank 1 ended with SIGKILL at step 5"

    def test_but_not_for_long(self, manager) -> None:
        job = manager(strategies="dump").joined()
        job.lose(1)
        assert pause_all(job) == []
        assert only(job.tick(), do.Dump).reason == "rank 1 ended at step 5"
        assert job.now < 101 + job.timeouts.lost_grace_s

    def test_nor_where_nothing_is_saved(self, manager, make_fault) -> None:
        job = manager(strategies="exit").joined()
        assert job.lose(1) == []
        how = make_fault(FaultKind.KILLED, 1, 0, "SIGKILL", version=5)
        end = only(job.worker(ev.WorkerExitKnown, 1, how), do.GiveUp)
        assert end.reason == (
            "rank 1 ended with SIGKILL at step 5; no restart is allowed (recover-strategy)"
        )
        assert end.fault == how

    def test_another_one_dies_meanwhile(self, manager) -> None:
        job = manager(strategies="dump").joined()
        job.lose(1)
        pause_all(job)
        assert job.lose(2) == []
        assert only(job.tick(), do.Dump).writers == (0, 3)


class TestWhatGoesWrong:
    def test_no_copy_is_whole(self, dying) -> None:
        for rank in (0, 2):
            dying.pause(rank, 5, clean=False)
        end = only(dying.pause(3, 5, clean=False), do.GiveUp)
        assert end.dump == ""
        assert end.reason.startswith(
            "rank 1 ended with SIGKILL at step 5; and no dump: no clean copy of the state is left"
        )

    def test_nothing_was_committed(self, manager) -> None:
        job = manager(strategies="dump").joined()
        job.lose(1, FaultKind.KILLED, "SIGKILL", version=None)
        assert only(pause_all(job, 0, 0, 0), do.GiveUp).reason.endswith(
            "; and no dump: no step was committed yet"
        )

    def test_nobody_is_left(self, manager) -> None:
        job = manager(per_node=2, strategies="dump").joined()
        job.lose(0, FaultKind.KILLED, "SIGKILL")
        assert ("no live rank holds the state") in only(
            job.lose(1, FaultKind.KILLED, "SIGKILL"), do.GiveUp
        ).reason

    def test_a_writer_that_cannot_write(self, dying) -> None:
        pause_all(dying)
        dumped(dying, 0)
        assert dumped(dying, 2, "failed", "no space left on /c") == []
        withdraw = only(dumped(dying, 3), do.Publish)
        assert (withdraw.rank, withdraw.withdraw) == (0, True)
        end = only(dumped(dying, 0, "withdrawn"), do.GiveUp)
        assert end.reason.endswith("; and no dump: rank 2: no space left on /c")
        assert end.dump == ""

    @pytest.mark.parametrize("has_written", [False, True])
    def test_a_writer_that_dies_is_done_without(self, dying, has_written: bool) -> None:
        pause_all(dying)
        if has_written:
            dumped(dying, 2)
        again = only(dying.lose(2), do.Dump)
        assert (again.writers, again.generation) == ((0, 3), 2)
        assert dumped(dying, 3) == []
        assert dumped(dying, 0, generation=1) == [], "what it wrote for the void one does not count"
        assert kinds(dumped(dying, 0)) == ["Publish"]

    def test_the_publisher_dies(self, dying) -> None:
        pause_all(dying)
        for rank in (0, 2, 3):
            answer = dumped(dying, rank)
        assert only(answer, do.Publish).rank == 0
        assert only(dying.lose(0), do.Dump).writers == (2, 3)
        dumped(dying, 2)
        assert only(dumped(dying, 3), do.Publish).rank == 2

    def test_a_node_goes_while_it_is_written(self, manager) -> None:
        job = manager(nodes=2, per_node=2, strategies="dump").joined()
        job.lose(1, FaultKind.KILLED, "SIGKILL")
        pause_all(job)
        assert only(job.send(ev.AgentLeft, 1, "stopped", ""), do.Dump).writers == (0,)
        dumped(job, 0)
        assert acts(dumped(job, 0, "published", "/c")) == ["GiveUp"]

    def test_a_writer_that_never_ends(self, dying) -> None:
        pause_all(dying)
        dumped(dying, 0), dumped(dying, 3)
        deadline = dying.now + dying.timeouts.dump_s
        while dying.now < deadline - 2:
            dying.hear_all_until(dying.now + 1)
        dying.hear_all_until(deadline)
        assert only(dying.send(ev.Tick, at=deadline + 0.1), do.Publish).withdraw
        assert only(dying.lose(0), do.GiveUp).reason.endswith(
            "; and no dump: rank 2 was not done after 1800 s"
        )

    def test_the_publisher_cannot_write_and_others_may_be_about_to(self, dying) -> None:
        """Whoever comes to the folder after the publisher has removed it makes it again.

        It is removed when all are done.
        """
        pause_all(dying)
        assert dumped(dying, 0, "failed", "read-only") == []
        assert dumped(dying, 2, "failed", "gone") == []
        withdraw = only(dumped(dying, 3), do.Publish)
        assert (withdraw.rank, withdraw.withdraw) == (0, True)
        assert only(dumped(dying, 0, "withdrawn"), do.GiveUp).reason.endswith(
            "; and no dump: rank 0: read-only"
        )

    def test_the_others_are_not_waited_for_long(self, dying) -> None:
        pause_all(dying)
        dumped(dying, 0, "failed", "read-only")
        assert only(dying.tick(), do.Publish).withdraw
        assert only(dying.tick(), do.GiveUp).reason.endswith("; and no dump: rank 0: read-only")

    def test_the_publisher_cannot_publish(self, dying) -> None:
        pause_all(dying)
        for rank in (0, 2, 3):
            dumped(dying, rank)
        assert only(dumped(dying, 0, "failed", "not whole"), do.GiveUp).reason.endswith(
            "; and no dump: rank 0: not whole"
        )

    def test_an_agent_that_was_away_hears_the_order_again(self, dying) -> None:
        dump = only(pause_all(dying), do.Dump)
        reports = [
            ev.WorkerReport(rank, 0, "lost" if rank == 1 else "paused", True, 5, True, True)
            for rank in range(4)
        ]
        assert dying.register(0, *reports, generation=1) == [dump]

    def test_how_the_first_one_died_is_learnt_late(self, dying, make_fault) -> None:
        dying.lose(2)
        assert pause_all(dying) == []
        assert kinds(dying.tick()) == ["Dump"]
        assert (
            dying.worker(
                ev.WorkerExitKnown, 2, make_fault(FaultKind.EXITED, 2, 0, "exit 3"), incarnation=0
            )
            == []
        )
        assert dying.machine.phase is JobPhase.SAVING


class TestNames:
    def test_every_name_of_the_list_allows_what_it_says(self) -> None:
        assert set(STRATEGY_NAMES) == {
            "retry",
            "recover",
            "recover-in-place",
            "elastic-training",
            "dump",
            "exit",
        }
        assert allowed(["dump"]) == {Strategy.DUMP, Strategy.EXIT}
        assert Strategy.DUMP not in allowed([])
        assert allowed([]) == allowed(["recover"]) > allowed(["retry"])
        with pytest.raises(KeyError):
            allowed(["reboot"])
