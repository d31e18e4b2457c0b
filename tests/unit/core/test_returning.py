"""RecoveryMachine: what a lost node alone had comes back from mirrors to the one in its place."""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.phase import JobPhase
from tests.unit.core.answers import kinds, only, plan

HELD = ((2, (6, 9)), (3, (6, 9)))


def _sharded(manager, strategies: str = "recover", **options):
    """Two nodes of two ranks, each rank with a shard of its own; node 0 mirrors node 1."""
    job = manager(
        nodes=2, per_node=2, strategies=strategies, reschedule_s=270.0, **options
    ).joined()
    for node in (0, 1):
        job.send(ev.AgentMirrors, node, f"host{node}", f"address{node}:1")
    for rank in job.ranks:
        job.worker(ev.WorkerHolds, rank, f"s{rank}")
    return job


def _replaced(job, *, held=HELD, snapshots: tuple[int, ...] = (6, 9)) -> list[do.Command]:
    """Node 1 is lost, another agent has its place, and all have stopped: what that led to."""
    job.send(ev.AgentHeard, 0, at=115.0)
    job.tick(), job.tick()
    job.send(ev.MirrorsHeld, 0, held)
    job.pause(0, 10, snapshots=snapshots), job.pause(1, 10, snapshots=snapshots)
    return _comes(job, "another")


def _comes(job, agent: str) -> list[do.Command]:
    lives = [ev.WorkerReport(rank, job.incarnation(rank), "lost") for rank in (2, 3)]
    said = job.register(1, *lives, agent=agent)
    assert kinds(said)[1:] == ["ReplaceWorker", "ReplaceWorker"]
    assert job.pause(2, None) == []
    return job.pause(3, None)


def _answer(job, ranks: tuple[int, ...] = (2, 3), reason: str = "", **more) -> list[do.Command]:
    generation = more.get("generation", job.machine.generation)
    return job.send(ev.MirrorsReturned, 1, generation, 0, 9, ranks, reason)


def test_both_agents_are_told_and_all_go_back_to_that_version(manager) -> None:
    job = _sharded(manager)
    to_holder, to_owner = _replaced(job)
    assert (to_holder.node_rank, to_owner.node_rank) == (0, 1)
    for order in (to_holder, to_owner):
        assert (order.owner, order.incarnation) == (1, "another")
        assert (order.holder, order.holder_incarnation) == (0, "agent0")
        assert (order.address, order.version, order.ranks) == ("address0:1", 9, (2, 3))
    assert job.machine.phase is JobPhase.PAUSING
    resume = only(_answer(job), do.Resume)
    assert resume.version == 9
    assert plan(resume) == dict.fromkeys(job.ranks)
    assert {move.snapshot for move in resume.moves} == {9}
    record = only(job.recover_all(10), do.RecordRecovery).record
    assert (record.strategy, record.steps_redone) == ("recover", 1)
    assert record.reason.endswith(
        "version 9 of ranks 2, 3 came back from node 0, which mirrored it"
    )


def test_a_version_that_lives_elsewhere_needs_no_mirror(manager) -> None:
    job = _sharded(manager)
    for rank in (2, 3):
        job.worker(ev.WorkerHolds, rank, f"s{rank - 2}")
    resume = only(_replaced(job), do.Resume)
    assert (resume.version, plan(resume)) == (10, {2: 0, 3: 1})


@pytest.mark.parametrize("strategies", ["recover", "recover,dump"])
def test_without_whole_mirrors_nobody_is_asked(manager, strategies: str) -> None:
    job = _sharded(manager, strategies)
    ended = _replaced(job, held=((2, (9,)),))
    assert "ReturnMirrors" not in kinds(ended)
    assert job.machine.phase in (JobPhase.ENDING, JobPhase.RESTARTING)


def test_a_failure_is_told_and_what_is_left_is_dumped(manager) -> None:
    job = _sharded(manager, "recover,dump")
    assert kinds(_replaced(job)) == ["ReturnMirrors", "ReturnMirrors"]
    dump = only(_answer(job, (2,), "no memory"), do.Dump)
    assert (dump.version, set(dict(dump.orphaned))) == (9, {3})


def test_a_failure_without_a_dump_starts_all_anew_and_says_why(manager) -> None:
    job = _sharded(manager, "recover")
    _replaced(job)
    order = only(_answer(job, (2,), "no memory"), do.RestartGroup)
    assert "; the mirror of rank 3 has not come back from node 0: no memory" in order.reason


def test_it_does_not_take_for_ever(manager) -> None:
    job = _sharded(manager, "recover,dump")
    _replaced(job)
    deadline = job.machine.next_deadline(with_leases=False)
    assert deadline == pytest.approx(job.now + job.timeouts.dump_s, abs=0.1)
    for node in (0, 1):
        job.send(ev.AgentHeard, node, at=deadline)
    dump = only(job.send(ev.Tick, at=deadline), do.Dump)
    assert set(dict(dump.orphaned)) == {2, 3}


def test_an_answer_that_nobody_waits_for_changes_nothing(manager) -> None:
    job = _sharded(manager)
    assert _answer(job) == []
    _replaced(job)
    assert _answer(job, generation=0) == []
    assert job.machine.phase is JobPhase.PAUSING
    only(_answer(job), do.Resume)
    assert _answer(job) == []


@pytest.mark.parametrize(("node", "told"), [(0, 0), (1, 1)])
def test_an_agent_that_was_out_of_reach_is_told_again(manager, node: int, told: int) -> None:
    job = _sharded(manager)
    _replaced(job)
    lives = [
        ev.WorkerReport(rank, job.incarnation(rank), "paused", True, None, entered=True)
        for rank in (2 * node, 2 * node + 1)
    ]
    agent = "another" if node else "agent0"
    said = job.register(node, *lives, agent=agent, generation=job.machine.generation)
    assert [one.node_rank for one in said if isinstance(one, do.ReturnMirrors)] == [told]


def test_a_rank_that_dies_meanwhile_is_replaced_and_keeps_what_has_come(manager) -> None:
    job = _sharded(manager)
    _replaced(job)
    assert kinds(job.lose(3, version=None, snapshots=())) == ["ReplaceWorker"]
    assert _answer(job) == []
    resume = only(job.pause(3, None, snapshots=(9,)), do.Resume)
    assert {move.rank: move.snapshot for move in resume.moves} == dict.fromkeys(job.ranks, 9)


def test_the_node_that_is_lost_again_begins_again(manager) -> None:
    job = _sharded(manager)
    _replaced(job)
    job.send(ev.AgentHeard, 0, at=job.now + 15.0)
    job.tick(), job.tick()
    assert job.machine.lost_nodes == [1]
    orders = _comes(job, "third")
    assert [(one.node_rank, one.incarnation) for one in orders] == [(0, "third"), (1, "third")]
    only(_answer(job), do.Resume)


def test_the_node_that_keeps_them_is_lost_too(manager) -> None:
    """What the ranks of both had is nowhere any more."""
    job = _sharded(manager, "recover")
    _replaced(job)
    job.send(ev.AgentHeard, 1, at=job.now + 15.0)
    job.tick()
    assert job.machine.next_deadline() == pytest.approx(job.now, abs=2.1)
    ended = job.tick()
    assert only(ended, do.GiveUp).reason == "the agent of node 0 has been silent for 30 s"
    assert _answer(job) == []


def test_a_job_that_is_to_end_waits_for_no_mirror(manager) -> None:
    job = _sharded(manager, "recover,dump")
    _replaced(job)
    dump = only(job.send(ev.AgentDraining, 0, "SIGTERM", 20.0), do.Dump)
    assert dump.version == 9


class TestShardsThatNobodyHasNamed:
    """A manager that was started again has not heard which shards the ranks of a lost node had."""

    def _comes_later(self, manager, held, strategies: str = "recover") -> list[do.Command]:
        job = manager(nodes=2, per_node=2, strategies=strategies, reschedule_s=270.0)
        waiting = [
            ev.WorkerReport(
                rank, 0, "paused", True, 10, entered=True, snapshots=(6, 9), shard=f"s{rank}"
            )
            for rank in (0, 1)
        ]
        job.register(0, *waiting, generation=1)
        job.send(ev.AgentMirrors, 0, "host0", "address0:1")
        job.send(ev.MirrorsHeld, 0, held)
        lives = [ev.WorkerReport(rank, 1, "lost") for rank in (2, 3)]
        job.register(1, *lives, agent="another", generation=1)
        for rank in (0, 1):
            job.pause(rank, 10, snapshots=(6, 9))
        assert job.pause(2, None) == []
        return job.pause(3, None)

    def test_none_of_them_gets_what_another_one_had(self, manager) -> None:
        assert "Resume" not in kinds(self._comes_later(manager, ((2, (9,)),)))
        assert "ReturnMirrors" not in kinds(self._comes_later(manager, ((2, (9,)),)))

    def test_each_gets_its_own(self, manager) -> None:
        orders = self._comes_later(manager, HELD)
        assert [one.ranks for one in orders] == [(2, 3), (2, 3)]

    def test_each_is_saved(self, manager) -> None:
        job = _sharded(manager, "dump")
        for rank in (2, 3):
            job.worker(ev.WorkerHolds, rank, "")
        job.send(ev.AgentLeft, 1, "failed", "")
        job.send(ev.MirrorsHeld, 0, HELD)
        for rank in (2, 3):  # as a manager that was elected knows them
            job.machine.membership.members[rank].version = None
        job.pause(0, 10, snapshots=(6, 9))
        dump = only(job.pause(1, 10, snapshots=(6, 9)), do.Dump)
        assert (dump.version, set(dict(dump.orphaned))) == (9, {2, 3})


class TestNodeMemoryThatOutlivesItsAgent:
    """An agent that was lost is named to the one in its place, which may be on the same host."""

    def _lost(self, manager, strategies: str = "recover"):
        job = _sharded(manager, strategies)
        job.send(ev.AgentHeard, 0, at=115.0)
        job.tick(), job.tick()
        assert job.machine.lost_nodes == [1]
        job.pause(0, 10, snapshots=(6, 9)), job.pause(1, 10, snapshots=(6, 9))
        return job

    def _comes(self, job, agent: str) -> list[do.ReplaceWorker]:
        lives = [ev.WorkerReport(rank, job.incarnation(rank), "lost") for rank in (2, 3)]
        said = job.register(1, *lives, agent=agent)
        return [order for order in said if isinstance(order, do.ReplaceWorker)]

    def test_its_ranks_say_what_is_left_and_all_go_back_to_that(self, manager) -> None:
        job = self._lost(manager)
        orders = self._comes(job, "another")
        assert [(one.rank, one.former_agent) for one in orders] == [(2, "agent1"), (3, "agent1")]
        assert job.pause(2, None, snapshots=(6, 9)) == []
        resume = only(job.pause(3, None, snapshots=(9,)), do.Resume)
        assert (resume.version, {move.snapshot for move in resume.moves}) == (9, {9})
        record = only(job.recover_all(10), do.RecordRecovery).record
        assert (record.strategy, record.steps_redone) == ("recover", 1)
        assert record.reason.endswith("snapshots of ranks 2, 3 were left in the memory of node 1")

    def test_the_order_is_the_same_when_the_agent_comes_again(self, manager) -> None:
        job = self._lost(manager)
        self._comes(job, "another")
        missed = [ev.WorkerReport(rank, 0, "lost") for rank in (2, 3)]
        said = job.register(1, *missed, agent="another", generation=job.machine.generation)
        orders = [order for order in said if isinstance(order, do.ReplaceWorker)]
        assert [one.former_agent for one in orders] == ["agent1", "agent1"]

    def test_who_is_lost_in_between_is_the_former_one(self, manager) -> None:
        job = self._lost(manager)
        self._comes(job, "another")
        job.send(ev.AgentHeard, 0, at=job.now + 15.0)
        job.tick(), job.tick()
        assert [one.former_agent for one in self._comes(job, "third")] == ["another", "another"]

    def test_once_all_have_gone_on_it_is_not_named_any_more(self, manager) -> None:
        job = self._lost(manager)
        self._comes(job, "another")
        job.pause(2, None, snapshots=(9,))
        only(job.pause(3, None, snapshots=(9,)), do.Resume)
        job.recover_all(10)
        assert only(job.lose(2, version=11), do.ReplaceWorker).former_agent == ""

    def test_an_agent_that_was_cut_off_has_its_own(self, manager) -> None:
        job = self._lost(manager)
        assert [one.former_agent for one in self._comes(job, "agent1")] == ["", ""]

    def test_a_manager_that_was_started_again_names_nobody(self, manager) -> None:
        job = manager(nodes=2, per_node=2, strategies="recover", reschedule_s=270.0)
        waiting = [
            ev.WorkerReport(rank, 0, "paused", True, 10, entered=True, snapshots=(9,))
            for rank in (0, 1)
        ]
        job.register(0, *waiting, generation=1)
        lives = [ev.WorkerReport(rank, 1, "lost") for rank in (2, 3)]
        said = job.register(1, *lives, agent="another", generation=1)
        orders = [order for order in said if isinstance(order, do.ReplaceWorker)]
        assert orders and {one.former_agent for one in orders} == {""}

    def test_it_comes_before_mirrors(self, manager) -> None:
        job = self._lost(manager)
        job.send(ev.MirrorsHeld, 0, HELD)
        self._comes(job, "another")
        job.pause(2, None, snapshots=(9,))
        only(job.pause(3, None, snapshots=(9,)), do.Resume)

    def test_mirrors_are_asked_for_what_is_not_left(self, manager) -> None:
        job = self._lost(manager)
        job.send(ev.MirrorsHeld, 0, HELD)
        self._comes(job, "another")
        job.pause(2, None, snapshots=(9,))
        orders = job.pause(3, None, snapshots=(3,))
        assert [(one.version, one.ranks) for one in orders] == [(9, (3,)), (9, (3,))]
        resume = only(_answer(job, (3,)), do.Resume)
        assert {move.rank: move.snapshot for move in resume.moves} == dict.fromkeys(job.ranks, 9)
        record = only(job.recover_all(10), do.RecordRecovery).record
        assert "version 9 of ranks 3 came back from node 0" in record.reason
        assert record.reason.endswith("snapshots of rank 2 were left in the memory of node 1")

    def test_replicas_need_nothing_of_it(self, manager) -> None:
        job = self._lost(manager)
        for rank in (2, 3):
            job.machine.membership.members[rank].shard = f"s{rank - 2}"
        self._comes(job, "another")
        job.pause(2, None, snapshots=(9,))
        resume = only(job.pause(3, None, snapshots=(9,)), do.Resume)
        assert (resume.version, plan(resume)) == (10, {2: 0, 3: 1})
        assert "left" not in only(job.recover_all(10), do.RecordRecovery).record.reason

    def test_nothing_is_left_that_helps(self, manager) -> None:
        job = self._lost(manager)
        self._comes(job, "another")
        job.pause(2, None, snapshots=(9,))
        order = only(job.pause(3, None), do.RestartGroup)
        assert "no version of the state is complete" in order.reason
        assert "were left" not in order.reason
