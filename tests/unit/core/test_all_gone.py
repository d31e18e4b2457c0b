"""RecoveryMachine: every process is gone, and node memory may have the state."""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from tests.unit.core.answers import acts, only, plan

NOTHING_LEFT = "every process is gone, and node memory has no snapshot"


@pytest.fixture
def sharded(manager):
    """Each rank has a shard of its own."""

    def make(nodes: int = 1, per_node: int = 2, **settings):
        job = manager(nodes=nodes, per_node=per_node, **settings).joined()
        for rank in job.ranks:
            job.worker(ev.WorkerHolds, rank, f"shard {rank}")
        return job

    return make


def lose_all(job, *snapshots: tuple[int, ...]) -> list[do.Command]:
    """All ranks die, one report after the other. `snapshots`: of each; what came last."""
    left = snapshots or ((5,),) * len(job.ranks)
    return [job.lose(rank, snapshots=kept) for rank, kept in zip(job.ranks, left, strict=True)][-1]


def all_come(job, *snapshots: tuple[int, ...]) -> list[do.Command]:
    """The new processes wait at the gate."""
    left = snapshots or ((5,),) * len(job.ranks)
    return [
        command
        for rank, kept in zip(job.ranks, left, strict=True)
        for command in job.pause(rank, None, snapshots=kept)
    ]


def test_all_go_on_in_place_from_node_memory(sharded) -> None:
    job = sharded()
    assert acts(lose_all(job)) == ["ReplaceWorker"]
    resume = only(all_come(job), do.Resume)
    assert (resume.version, plan(resume)) == (5, {0: None, 1: None})
    record = only(job.recover_all(), do.RecordRecovery).record
    assert (record.strategy, record.version, record.steps_redone) == ("recover-in-place", 5, 0)
    assert record.sources == ((0, "snapshot"), (1, "snapshot"))
    assert record.reason == "every process is gone, node memory has snapshots"


def test_the_newest_version_that_all_have_counts(sharded) -> None:
    job = sharded()
    lose_all(job, (4, 5), (3, 4))
    assert only(all_come(job, (4, 5), (3, 4)), do.Resume).version == 4
    assert only(job.recover_all(), do.RecordRecovery).record.steps_redone == 1


def test_a_world_of_one_too(manager) -> None:
    job = manager(per_node=1).joined()
    assert acts(job.lose(0, snapshots=(4, 5))) == ["Interrupt", "ReplaceWorker"]
    resume = only(job.pause(0, None, snapshots=(4, 5)), do.Resume)
    assert (resume.version, plan(resume)) == (5, {0: None})


def test_and_when_the_new_processes_die_as_well(sharded) -> None:
    job = sharded()
    lose_all(job)
    assert acts(job.lose(0, version=None, snapshots=(5,))) == ["ReplaceWorker"]
    assert acts(job.lose(1, version=None, snapshots=(5,))) == ["ReplaceWorker"]
    assert only(all_come(job), do.Resume).version == 5


def test_new_processes_that_have_not_come_to_the_decorator_again_are_known_to(sharded) -> None:
    """They wait at the process group, above it."""
    job = sharded()
    lose_all(job)
    assert acts(all_come(job)) == ["Resume"]
    assert acts(job.lose(0, version=None, snapshots=(5,))) == ["Interrupt", "ReplaceWorker"]
    assert acts(job.lose(1, version=None, snapshots=(5,))) == ["ReplaceWorker"]
    assert only(all_come(job), do.Resume).version == 5


def test_a_replacement_that_dies_early_costs_the_others_nothing(manager) -> None:
    """None of them has come to the decorator, and none is replaced."""
    job = manager().joined(declared=False)
    job.worker(ev.WorkerDeclared, 1, True)
    assert acts(job.lose(1, version=None)) == ["Interrupt", "ReplaceWorker"]
    assert acts(job.lose(1, version=None)) == ["ReplaceWorker"]


def test_what_was_killed_by_order_has_left_they_say_at_the_gate(sharded) -> None:
    """Nobody has looked into its memory when the other one dies."""
    job = sharded()
    job.raise_(1)
    job.hear_all_until(job.now + 20)
    assert "KillWorker" in acts(job.tick(at=job.now + 15)), "rank 0 does not leave its step"
    assert acts(job.lose(1, snapshots=(5,))) == ["ReplaceWorker"]
    assert only(all_come(job), do.Resume).version == 5


def test_a_shard_without_a_snapshot_is_named_when_all_have_said_what_there_is(sharded) -> None:
    job = sharded()
    assert acts(lose_all(job, (5,), ())) == ["ReplaceWorker"]
    restart = only(all_come(job, (5,), ()), do.RestartGroup)
    assert "shard shard 1 (rank 1) has no live copy and no snapshot" in restart.reason


def test_without_snapshots_all_start_anew_at_once_with_the_true_reason(manager) -> None:
    job = manager(per_node=2).joined()
    job.lose(0)
    assert only(job.lose(1), do.RestartGroup).reason == NOTHING_LEFT


def test_what_was_kept_before_a_restart_of_all_is_void(sharded) -> None:
    job = sharded()
    lose_all(job, (), ())
    for rank in job.ranks:
        job.worker(ev.WorkerStarted, rank, 4711)
    restart = only(job.lose(0, version=None), do.RestartGroup)
    assert restart.reason == "no live worker uses taskd.recoverable"


def test_memory_of_a_job_that_never_declared_itself_is_its_own_affair(manager) -> None:
    """Under msrun agents keep memory for scripts that start anew from it themselves."""
    job = manager(per_node=1).joined(declared=False)
    restart = only(job.lose(0, snapshots=(4, 5)), do.RestartGroup)
    assert restart.reason == "no live worker uses taskd.recoverable"


def test_a_lost_node_is_waited_for_while_all_others_are_dead(sharded) -> None:
    job = sharded(nodes=2, per_node=1, strategies="recover", reschedule_s=270.0)
    assert acts(job.lose(0, snapshots=(5,))) == ["Interrupt", "ReplaceWorker"]
    job.send(ev.AgentLeft, 1, "lost", "")
    assert job.machine.phase.value == "pausing"
    assert job.machine.lost_nodes


def test_a_manager_that_came_later_hears_of_it_from_the_registration(manager) -> None:
    job = manager(per_node=2)
    commands = job.register(0, *(
        ev.WorkerReport(
            rank, 0, "lost", True, 5, entered=True, snapshots=(5,), shard=f"shard {rank}"
        )
        for rank in job.ranks
    ), generation=3)  # fmt: skip
    assert acts(commands) == ["Interrupt", "ReplaceWorker", "ReplaceWorker"]
    assert only(all_come(job), do.Resume).version == 5


def test_an_agent_that_comes_back_says_what_the_dead_have_left(sharded) -> None:
    job = sharded()
    commands = job.register(0, *(
        ev.WorkerReport(rank, 0, "lost", True, 5, entered=True, snapshots=(5,))
        for rank in job.ranks
    ))  # fmt: skip
    assert acts(commands) == ["Interrupt", "ReplaceWorker", "ReplaceWorker"]
    assert only(all_come(job), do.Resume).version == 5


def test_an_agent_repeats_what_the_dead_have_left(node) -> None:
    agent = node(2)
    agent.worker(ev.AlarmRang, 0, agent.now, 5, "step", (5,), (4, 5))
    reports = agent.machine.registration(agent.now).workers
    assert [report.snapshots for report in reports] == [(4, 5), ()]


def test_a_failure_that_comes_back_still_ends_the_job(sharded) -> None:
    job = sharded()
    for number in range(3):
        ends = job.lose(0, FaultKind.EXITED, "exit 3", snapshots=(5,))
        if number < 2:
            job.lose(1, FaultKind.KILLED, "SIGKILL", snapshots=(5,))
            assert only(all_come(job), do.Resume).version == 5
    assert only(ends, do.GiveUp).reason.startswith("the same failure came 3 times: rank 0 ended")


class TestDump:
    """Nobody is left to write what node memory has: ranks start anew for that alone."""

    @pytest.fixture
    def dying(self, sharded):
        """All are dead in a job that may only dump."""

        def make(**settings):
            job = sharded(strategies="dump", **settings)
            for rank in job.ranks:
                said = job.lose(rank, FaultKind.KILLED, "SIGKILL", snapshots=(5,))
            return job, said

        return make

    def saved(self, job) -> do.GiveUp:
        for rank in job.ranks:
            said = job.worker(ev.WorkerDumped, rank, job.machine.generation, "written", "")
        assert acts(said) == ["Publish"]
        published = (job.machine.generation, "published", "/c/dump-5")
        return only(job.worker(ev.WorkerDumped, 0, *published), do.GiveUp)

    def test_each_rank_starts_once_more_and_writes_its_own(self, dying) -> None:
        job, said = dying()
        assert acts(said) == ["ReplaceWorker", "ReplaceWorker"]
        dump = only(all_come(job), do.Dump)
        assert (dump.version, dump.writers, dump.orphaned) == (5, (0, 1), ())
        end = self.saved(job)
        assert end.reason.endswith("step 5 was saved in /c/dump-5")
        assert end.dump == "/c/dump-5"

    def test_when_it_is_known_how_they_died(self, sharded, make_fault) -> None:
        job = sharded(strategies="dump")
        assert acts(job.lose(0, snapshots=(5,))) == ["Interrupt"]
        assert acts(job.lose(1, snapshots=(5,))) == []
        for rank in job.ranks:
            how = make_fault(FaultKind.KILLED, rank, 0, "SIGKILL")
            said = job.worker(ev.WorkerExitKnown, rank, how)
        assert acts(said) == ["ReplaceWorker", "ReplaceWorker"]
        assert only(all_come(job), do.Dump).reason.startswith("rank 0 ended with SIGKILL")

    def test_all_go_on_from_it_if_that_is_wanted(self, dying) -> None:
        job, _ = dying(restarts_after_dump=True)
        all_come(job)
        for rank in job.ranks:
            job.worker(ev.WorkerDumped, rank, job.machine.generation, "written", "")
        published = (job.machine.generation, "published", "/c/dump-5")
        assert acts(job.worker(ev.WorkerDumped, 0, *published)) == ["RestartGroup"]

    def test_on_a_node_where_nobody_is_left(self, sharded) -> None:
        job = sharded(nodes=2, per_node=1, strategies="dump")
        job.lose(1, FaultKind.KILLED, "SIGKILL", snapshots=(4, 5))
        assert only(job.pause(0, 5, snapshots=(4, 5)), do.ReplaceWorker).rank == 1
        dump = only(job.pause(1, None, snapshots=(4, 5)), do.Dump)
        assert (dump.version, dump.writers, dump.orphaned) == (5, (0, 1), ())

    def test_not_where_others_of_the_node_can_write_it(self, sharded) -> None:
        job = sharded(strategies="dump")
        job.lose(1, FaultKind.KILLED, "SIGKILL", snapshots=(5,))
        dump = only(job.pause(0, 5, snapshots=(5,)), do.Dump)
        assert (dump.writers, dump.orphaned) == ((0,), ((1, 0),))

    def test_the_last_writer_dies_while_it_writes(self, sharded) -> None:
        job = sharded(strategies="dump")
        job.lose(1, FaultKind.KILLED, "SIGKILL", snapshots=(5,))
        job.pause(0, 5, snapshots=(5,))
        said = job.lose(0, FaultKind.KILLED, "SIGKILL", snapshots=(5,))
        assert acts(said) == ["ReplaceWorker", "ReplaceWorker"]
        assert only(all_come(job), do.Dump).writers == (0, 1)

    def test_one_of_them_that_dies_does_not_stop_the_others(self, dying) -> None:
        job, _ = dying()
        assert acts(job.lose(0, FaultKind.EXITED, "exit 1", version=None, snapshots=(5,))) == []
        dump = only(job.pause(1, None, snapshots=(5,)), do.Dump)
        assert (dump.writers, dump.orphaned) == ((1,), ((0, 1),))

    def test_they_start_once(self, dying) -> None:
        job, _ = dying()
        for rank in job.ranks:
            end = job.lose(rank, FaultKind.EXITED, "exit 1", version=None, snapshots=(5,))
        assert "and no dump: version 5 cannot be written: no live rank reaches a copy of" in (
            only(end, do.GiveUp).reason
        )

    def test_those_that_do_not_start_in_time_are_not_waited_for(self, dying) -> None:
        job, _ = dying()
        job.pause(0, None, snapshots=(5,))
        moment = job.now
        while job.now < moment + job.timeouts.start_s - 5:
            job.hear_all_until(job.now + 4)
        assert acts(job.tick(at=moment + job.timeouts.start_s)) == ["KillWorker"]
        job.lose(1, FaultKind.KILLED, "SIGKILL", version=None, snapshots=(5,))
        assert job.machine.phase.value == "saving"

    def test_not_if_a_node_is_to_end(self, sharded) -> None:
        job = sharded(strategies="dump")
        job.send(ev.AgentDraining, 0, "SIGTERM", 30.0)
        for rank in job.ranks:
            end = job.lose(rank, FaultKind.KILLED, "SIGKILL", snapshots=(5,))
        assert "and no dump: version 5 cannot be written" in only(end, do.GiveUp).reason

    def test_without_snapshots_the_reason_is_true(self, manager) -> None:
        job = manager(per_node=1, strategies="dump").joined()
        end = only(job.lose(0, FaultKind.KILLED, "SIGKILL"), do.GiveUp)
        assert end.reason.endswith(f"; and no dump: {NOTHING_LEFT}")

    def test_when_no_restart_is_left(self, sharded) -> None:
        job = sharded(strategies="recover-in-place,dump", max_restarts=1)
        job.lose(0, FaultKind.KILLED, "SIGKILL", snapshots=(5,))
        said = job.lose(1, FaultKind.KILLED, "SIGKILL", snapshots=(5,))
        assert acts(said) == ["ReplaceWorker", "ReplaceWorker"]
        dump = only(all_come(job), do.Dump)
        assert dump.writers == (0, 1)
        assert dump.reason.startswith("restart budget spent")
