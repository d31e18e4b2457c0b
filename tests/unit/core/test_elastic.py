"""Elastic training: the job goes on without a lost node, and with it again when it is back."""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.phase import JobPhase
from tests.unit.core.answers import acts, kinds, only, plan

_SILENT = "the agent of node {} has been silent for 30 s"


def _job(manager, nodes: int = 3, per_node: int = 2, strategies: str = "elastic-training", **more):
    job = manager(nodes=nodes, per_node=per_node, strategies=strategies, **more).joined()
    for node in range(nodes):
        job.machine._state.meeting.ready[node] = f"agent {node}:1"
    return job


def _silence(job, *lost: int) -> list[do.Command]:
    """These nodes have been silent for a lease, the others not. What the manager said of it."""
    heard_at = job.now + 15
    for node in range(job.nodes):
        if node not in lost:
            job.send(ev.AgentHeard, node, at=heard_at)
    said: list[do.Command] = []
    while any(job.machine.is_present(node) for node in lost):
        assert job.now < heard_at + 25
        said += job.tick()
    return said


def _lose(job, *lost: int) -> list[do.Command]:
    said = _silence(job, *lost)
    assert "Interrupt" in kinds(said), kinds(said)
    return said + job.send(ev.Tick, at=job.now)


def _pause_rest(job, version: int = 7) -> list[do.Command]:
    said: list[do.Command] = []
    for member in job.machine.membership.ordered():
        if member.is_live and member.state.value != "paused":
            said += job.pause(member.rank, None if member.replaced else version)
    return said


def _shrunk(job, *lost: int, version: int = 7) -> do.Resume:
    _lose(job, *lost)
    return only(_pause_rest(job, version), do.Resume)


def _recover_all(job, version: int) -> do.RecoveryRecord:
    said = [
        command
        for member in job.machine.membership.ordered()
        for command in job.recover(member.rank, version)
    ]
    return only(said, do.RecordRecovery).record


def _come_back(job, node: int, agent: str = "another") -> list[do.Command]:
    first = node * job.per_node
    lives = [ev.WorkerReport(rank, 0, "lost") for rank in range(first, first + job.per_node)]
    return job.register(node, *lives, agent=agent)


def _refusal(job, agent: str) -> str | None:
    """Why the job does not let in this agent of node 1, whose rank is lost; None: it does."""
    lost = (ev.WorkerReport(1, 0, "lost"),)
    return job.machine.refusal(ev.AgentRegistered(job.now, "ask", 1, agent, 3, 3, 3, 0, 0, lost))


class TestALostNode:
    def test_the_others_go_on_without_it_in_the_same_step(self, manager) -> None:
        job = _job(manager)
        said = _lose(job, 1)
        assert acts(said) == ["Interrupt"]
        said = _pause_rest(job)
        resume = only(said, do.Resume)
        assert (resume.version, resume.active) == (7, (0, 1, 4, 5))
        assert plan(resume) == {}
        report = only(said, do.ReportWorld)
        assert report.text == "the job goes on with 2 of 3 nodes (ranks 0, 1, 4, 5)"
        assert report.is_smaller
        record = _recover_all(job, 8)
        assert (record.strategy, record.code, record.steps_redone) == ("elastic-training", 0, 0)
        assert record.reason == "node 1 is lost: the job goes on without it"
        assert [fault.kind for fault in record.faults] == [FaultKind.NODE_LOST]
        assert record.restarts_used == 1

    def test_whoever_is_behind_receives_the_newest_version(self, manager) -> None:
        job = _job(manager, per_node=1)
        _lose(job, 0)
        job.pause(1, 7)
        assert plan(only(job.pause(2, 8), do.Resume)) == {1: 2}

    def test_with_a_process_that_was_to_be_replaced_for_its_exception(self, manager) -> None:
        """The second time its process counts as broken. That its node is gone says more."""
        job = _job(manager, strategies="retry,recover-in-place,elastic-training")
        job.raise_(2, version=7)
        assert only(_pause_rest(job), do.Resume).version == 7
        assert job.raise_(2, version=7) == []
        assert acts(job.tick()) == ["Interrupt"]
        _silence(job, 1)
        resume = only(_pause_rest(job), do.Resume)
        assert (resume.version, resume.active) == (7, (0, 1, 4, 5))

    def test_it_is_waited_for_first_where_that_is_allowed(self, manager) -> None:
        job = _job(manager, strategies="recover,elastic-training", reschedule_s=100.0)
        assert acts(_lose(job, 2)) == ["Interrupt"]
        assert _pause_rest(job) == []
        job.hear_all_until(job.now + 20)
        until = job.now
        while job.now < until + 75:
            job.hear_all_until(job.now + 15)
        resume = only(job.tick(), do.Resume)
        assert resume.active == (0, 1, 2, 3)
        record = _recover_all(job, 8)
        assert dict(record.skipped)["recover"] == "nobody took its place within 100 s (node 2)"

    def test_a_second_one(self, manager) -> None:
        job = _job(manager)
        assert _shrunk(job, 1).active == (0, 1, 4, 5)
        _recover_all(job, 8)
        assert _shrunk(job, 0, 1, version=9).active == (4, 5)
        assert _recover_all(job, 10).strategy == "elastic-training"

    def test_the_last_one_ends_the_job(self, manager) -> None:
        job = _job(manager, nodes=2)
        _shrunk(job, 1)
        _recover_all(job, 8)
        assert "GiveUp" in kinds(_silence(job, 0, 1))

    def test_not_unless_somebody_asks_for_it(self, manager) -> None:
        job = _job(manager, strategies="")
        assert only(_silence(job, 1), do.GiveUp).reason == _SILENT.format(1)

    def test_half_of_the_nodes_must_be_there_where_others_may_elect_a_manager(
        self, manager
    ) -> None:
        job = _job(manager, strategies="recover,elastic-training,dump", reschedule_s=10.0)
        _lose(job, 1, 2)
        job.pause(0, 7), job.pause(1, 7)
        job.send(ev.AgentHeard, 0)
        dump = only(job.tick(at=job.now + 11), do.Dump)
        assert "more than half of the nodes are out of reach" in dump.reason


class TestShardedState:
    def _hold(self, job, *shards: str) -> None:
        for rank, shard in enumerate(shards):
            job.worker(ev.WorkerHolds, rank, shard)

    @pytest.mark.parametrize("lost", [0, 1])
    def test_whole_replicas_can_be_done_without(self, manager, lost: int) -> None:
        job = _job(manager, nodes=2)
        self._hold(job, "a", "b", "a", "b")
        resume = _shrunk(job, lost)
        assert resume.active == ((2, 3) if lost == 0 else (0, 1))

    @pytest.mark.parametrize("strategies", ["elastic-training", "elastic-training,dump"])
    def test_a_shard_that_nobody_else_has_cannot(self, manager, strategies: str) -> None:
        job = _job(manager, nodes=2, strategies=strategies)
        self._hold(job, "a", "b", "c", "d")
        said = _silence(job, 1)
        if "dump" in strategies:
            job.pause(0, 7)
            said = job.pause(1, 7)
        end = only(said, do.GiveUp)
        cannot = (
            "the job cannot go on without it: the state is sharded, and nobody else has shard c"
        )
        assert cannot in end.reason
        record = only(said, do.RecordRecovery).record
        assert record.code == 499
        why = dict(record.skipped)["elastic-training"]
        assert why == "the state is sharded, and nobody else has shard c"

    def test_whoever_would_have_another_one_than_its_place_cannot(self, manager) -> None:
        """Of 3 replicas of 2 shards, spread over nodes of 3 ranks, node 0 takes half of one."""
        job = _job(manager, nodes=2, per_node=3)
        self._hold(job, "a", "b", "a", "b", "a", "b")
        end = only(_silence(job, 0), do.GiveUp)
        assert (
            "rank 3 would be rank 0 of the smaller world with shard b in place of a" in end.reason
        )


class TestANodeIsBack:
    def test_the_world_is_whole_again(self, manager) -> None:
        job = _job(manager)
        _shrunk(job, 1)
        _recover_all(job, 8)
        assert job.machine.lost_nodes == [1]
        said = _come_back(job, 1)
        assert acts(said) == ["Interrupt", "ReplaceWorker", "ReplaceWorker"]
        assert only(said, do.Interrupt).reason == "node 1 is back"
        assert {order.rank for order in said[1:]} == {2, 3}
        said = _pause_rest(job, 20)
        resume = only(said, do.Resume)
        assert (resume.version, resume.active) == (20, ())
        sources = plan(resume)
        assert set(sources) == {2, 3}
        assert set(sources.values()) <= {0, 1, 4, 5}
        assert only(said, do.ReportWorld).text == "the world is whole again: all 3 nodes, 6 ranks"
        record = _recover_all(job, 21)
        assert (record.strategy, record.reason) == ("elastic-training", "node 1 is back")
        assert (record.faults, record.restarts_used, record.code) == ((), 1, 0)
        assert record.skipped == ()
        assert job.machine.lost_nodes == []

    def test_one_of_two(self, manager) -> None:
        job = _job(manager, per_node=1)
        assert _shrunk(job, 1, 2).active == (0,)
        _recover_all(job, 8)
        _come_back(job, 2)
        said = _pause_rest(job, 9)
        assert only(said, do.Resume).active == (0, 2)
        assert not only(said, do.ReportWorld).is_smaller

    def test_in_the_recovery_that_leaves_it_out(self, manager) -> None:
        """Nobody trains in the smaller world: no word of it."""
        job = _job(manager, per_node=1)
        _lose(job, 1)
        said = _come_back(job, 1)
        assert acts(said) == ["Interrupt", "ReplaceWorker"]
        said = _pause_rest(job)
        assert only(said, do.Resume).active == ()
        assert not [one for one in said if isinstance(one, do.ReportWorld)]

    def test_what_its_agent_has_left_in_node_memory_is_older_than_the_others_are(
        self, manager
    ) -> None:
        job = _job(manager, per_node=1)
        _shrunk(job, 1)
        _recover_all(job, 8)
        orders = [one for one in _come_back(job, 1) if isinstance(one, do.ReplaceWorker)]
        assert [one.former_agent for one in orders] == [""]

    def test_its_process_fails_at_the_start(self, manager) -> None:
        """The others go on without it once more; the second time it gets no other chance."""
        job = _job(manager, per_node=1)
        _shrunk(job, 1)
        _recover_all(job, 8)
        for number in (1, 2):
            _come_back(job, 1, f"agent {number}")
            job.pause(0, 8 + number)
            job.lose(1, FaultKind.EXITED, "exit 1", version=None)
            assert only(job.pause(2, 8 + number), do.Resume).active == (0, 2)
            record = _recover_all(job, 9 + number)
            assert (record.strategy, record.restarts_used) == ("elastic-training", 1)
        assert job.machine.lost_nodes == []
        assert _refusal(job, "agent 3") == "node 1 has failed 2 times while it came back"

    def test_it_is_lost_while_it_comes_back(self, manager) -> None:
        job = _job(manager, per_node=1)
        _shrunk(job, 1)
        _recover_all(job, 8)
        _come_back(job, 1)
        job.pause(0, 9), job.pause(2, 9)
        assert only(_silence(job, 1), do.Resume).active == (0, 2)

    def test_a_rank_dies_meanwhile(self, manager) -> None:
        job = _job(manager, per_node=1, strategies="recover-in-place,elastic-training")
        _shrunk(job, 1)
        _recover_all(job, 8)
        _come_back(job, 1)
        assert acts(job.lose(0, FaultKind.KILLED, "SIGKILL", version=9)) == ["ReplaceWorker"]
        job.pause(2, 9), job.pause(1, None)
        resume = only(job.pause(0, None), do.Resume)
        assert (resume.active, plan(resume)) == ((), {0: 2, 1: 2})
        assert _recover_all(job, 10).restarts_used == 2

    def test_not_when_the_job_ends(self, manager) -> None:
        job = _job(manager, per_node=1)
        _shrunk(job, 1)
        _recover_all(job, 8)
        for rank in (0, 2):
            said = job.return_(rank)
        assert kinds(said) == ["Release"]
        assert job.machine.lost_nodes == []
        assert _refusal(job, "late") == "the job goes on without node 1, and is ending"

    def test_what_its_old_agent_says_meanwhile_changes_nothing(self, manager) -> None:
        job = _job(manager, per_node=1)
        _shrunk(job, 1)
        _recover_all(job, 8)
        assert job.send(ev.AgentLeft, 1, "fallback", "no manager") == []
        assert job.send(ev.AgentDraining, 1, "SIGTERM", 30.0) == []
        assert job.machine.phase is JobPhase.RUNNING
        alive = ev.WorkerReport(1, 0, "running", True, 5, entered=True)
        assert acts(job.register(1, alive)) == ["Interrupt", "ReplaceWorker"], "it is of the past"


class TestAFaultInASmallerWorld:
    def test_a_process_is_replaced(self, manager) -> None:
        job = _job(manager, strategies="recover-in-place,elastic-training")
        _shrunk(job, 1)
        _recover_all(job, 8)
        job.lose(5, FaultKind.KILLED, "SIGKILL", version=9)
        resume = only(_pause_rest(job, 9), do.Resume)
        assert (resume.active, plan(resume)[5]) == ((0, 1, 4, 5), 0)
        assert _recover_all(job, 10).strategy == "recover-in-place"

    def test_an_exception_is_tried_again(self, manager) -> None:
        job = _job(manager, strategies="retry,elastic-training")
        _shrunk(job, 1)
        _recover_all(job, 8)
        job.raise_(4, version=9)
        resume = only(_pause_rest(job, 9), do.Resume)
        assert resume.active == (0, 1, 4, 5)

    def test_all_cannot_start_anew_without_a_node(self, manager) -> None:
        job = _job(manager, strategies="recover-in-place,elastic-training")
        _shrunk(job, 1)
        _recover_all(job, 8)
        job.raise_(4, version=9, clean=False)
        for rank in (0, 1):
            job.pause(rank, 9, clean=False)
        end = only(job.pause(5, 9, clean=False), do.GiveUp)
        assert end.reason.endswith(", and all processes cannot start anew without node 1")

    def test_it_is_saved_as_what_it_is(self, manager) -> None:
        job = _job(manager, strategies="elastic-training,dump")
        _shrunk(job, 1)
        _recover_all(job, 8)
        job.lose(5, FaultKind.KILLED, "SIGKILL", version=9)
        dump = only(_pause_rest(job, 9), do.Dump)
        assert (dump.writers, dump.world_size) == ((0, 1, 4), 4)

    def test_its_dump_ends_it_as_all_cannot_start_anew_without_a_node(self, manager) -> None:
        strategies = "elastic-training,dump"
        job = _job(manager, per_node=1, strategies=strategies, restarts_after_dump=True)
        _shrunk(job, 1)
        _recover_all(job, 8)
        job.lose(2, FaultKind.KILLED, "SIGKILL", version=8, box=(8,))
        writers = only(_pause_rest(job, 8), do.Dump).writers
        assert writers == (0,)
        generation = job.machine.generation
        job.worker(ev.WorkerDumped, 0, generation, "written", "")
        said = job.worker(ev.WorkerDumped, 0, generation, "published", "/saved/dump-8")
        assert "RestartGroup" not in kinds(said)
        assert only(said, do.GiveUp).dump == "/saved/dump-8"

    def test_a_broken_process_whose_part_nobody_has_ends_the_job(self, manager) -> None:
        job = _job(manager, nodes=2, strategies="recover-in-place,elastic-training")
        for rank in range(4):
            job.worker(ev.WorkerHolds, rank, f"s{rank % 2}")
        _shrunk(job, 1)
        _recover_all(job, 8)
        job.raise_(0, version=8)
        assert only(_pause_rest(job, 8), do.Resume).active == (0, 1)
        job.raise_(0, version=8)
        said = job.tick() + _pause_rest(job, 8)
        assert "RestartGroup" not in kinds(said)
        assert only(said, do.GiveUp).reason.endswith(
            "only it holds its part of the state, and all processes cannot start anew without "
            "node 1"
        )


class TestAManagerThatWasStartedAgain:
    def _register(self, job, node: int, active: tuple[int, ...], generation: int = 1):
        return job.send(
            ev.AgentRegistered, node, f"agent{node}", 3, 3, 100, generation, 1,
            (ev.WorkerReport(node, 0, "running", True, 9, entered=True),), active=active,
        )  # fmt: skip

    def test_it_hears_of_the_smaller_world(self, manager) -> None:
        job = manager(nodes=3, per_node=1, strategies="elastic-training")
        assert self._register(job, 0, (0, 2)) == []
        assert job.machine.phase is JobPhase.JOINING
        assert self._register(job, 2, (0, 2)) == []
        assert job.machine.phase is JobPhase.RUNNING
        assert job.machine.lost_nodes == [1]
        assert acts(_come_back(job, 1)) == ["Interrupt", "ReplaceWorker"]
        said = _pause_rest(job, 9)
        assert only(said, do.Resume).active == ()
        assert only(said, do.ReportWorld).text.startswith("the world is whole again")

    def test_ranks_that_there_are_not_are_refused(self, manager) -> None:
        job = manager(nodes=3, per_node=1, strategies="elastic-training")
        report = (ev.WorkerReport(0, 0, "running"),)
        asks = ev.AgentRegistered(100.0, "ask", 0, "agent0", 3, 3, 3, 1, 0, report, active=(0, 3))
        assert job.machine.refusal(asks) == "the active ranks are among those of a world of 3"

    def test_the_newest_generation_tells(self, manager) -> None:
        job = manager(nodes=3, per_node=1, strategies="elastic-training")
        self._register(job, 0, (0, 2), generation=1)
        self._register(job, 2, (), generation=2)
        assert job.machine.phase is JobPhase.JOINING, "node 1 was back in generation 2"

    def test_it_does_not_know_what_shards_a_node_had(self, manager) -> None:
        job = manager(nodes=3, per_node=1, strategies="elastic-training")
        self._register(job, 0, (0, 2)), self._register(job, 2, (0, 2))
        job.worker(ev.WorkerHolds, 0, "a"), job.worker(ev.WorkerHolds, 2, "a")
        asks = ev.AgentRegistered(
            job.now, "ask", 1, "late", 3, 3, 3, 0, 0, (ev.WorkerReport(1, 0, "lost"),)
        )
        assert "does not know which shards node 1 had" in job.machine.refusal(asks)


def test_a_node_that_was_cut_off_does_not_follow_a_world_without_it(node) -> None:
    """Its agent stood still, and reads what was said meanwhile."""
    driver = node(ranks=2)
    driver.command(do.Interrupt, 1, "the agent of node 0 has been silent for 30 s")
    for rank in (0, 1):
        driver.worker(ev.WorkerPaused, rank, 1, 7, True)
    assert driver.command(do.Resume, 1, 7, (), 1, "", (2, 3)) == []
    assert [life.state.value for life in driver.machine.lives.present.values()] == ["paused"] * 2


def test_a_node_says_of_which_ranks_the_world_consists(node) -> None:
    driver = node(ranks=2)
    driver.command(do.Resume, 1, 7, (), 1, "", (0, 1, 4, 5))
    assert driver.machine.registration(1.0).active == (0, 1, 4, 5)
    driver.command(do.RestartGroup, 2, 1, "anew", ())
    assert driver.machine.registration(1.0).active == ()
