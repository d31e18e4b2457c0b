"""Each start of all processes has a store of its own, and all ranks belong to the same start."""

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.phase import JobPhase
from tests.unit.core.answers import acts, only


class TestANode:
    def test_a_start_that_waits_for_the_old_process_stays_one_of_all(self, node) -> None:
        """The next recovery begins meanwhile: it waits at the gate, with nothing of before."""
        agent = node(1)
        agent.command(do.RestartGroup, 1, 1, "all", ((0, 1),))
        agent.command(do.Interrupt, 2, "another fault")
        spawn = only(agent.exit(0, -15, incarnation=0), do.SpawnWorker)
        assert (spawn.gated, spawn.generation, spawn.start) == (True, 2, 1)

    def test_so_does_one_that_is_ordered_in_its_place(self, node) -> None:
        agent = node(1)
        agent.command(do.RestartGroup, 1, 1, "all", ((0, 1),))
        agent.command(do.KillWorker, 2, 0, 0, 1, "it did not come")
        spawn = only(agent.replace(0, 2, 2), do.SpawnWorker)
        assert (spawn.incarnation, spawn.gated, spawn.start) == (2, True, 1)
        agent.worker(ev.WorkerStarted, 0, 1001)
        agent.exit(0)
        assert only(agent.replace(0, 3, 2), do.SpawnWorker).start is None, "it replaces that"

    def test_it_tells_the_newest_start_that_it_has_heard_of(self, node) -> None:
        agent = node(1)
        assert agent.machine.registration(1.0).start == 0
        agent.command(do.RestartGroup, 2, 1, "all", ((0, 2),))
        agent.command(do.Interrupt, 3, "another fault")
        assert agent.machine.registration(1.0).start == 2

    def test_one_that_came_later_does_not_know(self, node) -> None:
        agent = node(1, started=False, substitute_until=1000.0)
        assert agent.machine.registration(1.0).start is None


def _reports(*ranks: int, incarnation: int = 0, state: str = "paused") -> list[ev.WorkerReport]:
    return [ev.WorkerReport(rank, incarnation, state, True, 5, False, True) for rank in ranks]


def _restarted(job) -> do.RestartGroup:
    """Every copy of the state is inconsistent."""
    job.lose(0)
    for rank in (1, 2, 3):
        said = job.pause(rank, 5, clean=False)
    said = job.pause(0, None)
    return only(said, do.RestartGroup)


class TestAManager:
    def test_a_node_that_missed_the_restart_has_all_started_once_more(self, manager) -> None:
        """Another recovery has begun since, in which its ranks would meet the others in vain."""
        job = manager(nodes=2, per_node=2).joined()
        assert _restarted(job).generation == 2
        for rank in (0, 1):
            job.worker(ev.WorkerStarted, rank, 2000)
            job.worker(ev.WorkerDeclared, rank, True)
        assert acts(job.lose(0, version=None)) == ["Interrupt", "ReplaceWorker"]
        order = only(job.register(1, *_reports(2, 3), generation=1, start=0), do.RestartGroup)
        assert order.generation == 4
        assert order.incarnations == tuple((rank, 4) for rank in range(4))
        assert order.reason == "node 1 has missed the restart of all in generation 2"

    def test_so_has_one_that_took_the_place_of_another(self, manager) -> None:
        """It does not tell of starts: there may have been some before its time."""
        job = manager(nodes=2, per_node=2).joined()
        _restarted(job)
        for rank in (0, 1):
            job.worker(ev.WorkerStarted, rank, 2000)
            job.worker(ev.WorkerDeclared, rank, True)
        assert acts(job.lose(0, version=None)) == ["Interrupt", "ReplaceWorker"]
        order = only(job.register(1, *_reports(2, 3), generation=1), do.RestartGroup)
        assert order.generation == 4

    def test_one_that_missed_nothing_else_hears_it_again(self, manager) -> None:
        job = manager(nodes=2, per_node=2).joined()
        order = _restarted(job)
        assert acts(job.register(1, *_reports(2, 3), generation=1, start=0)) == ["RestartGroup"]
        assert job.machine.generation == order.generation

    def test_one_that_is_in_the_newest_start_goes_on(self, manager) -> None:
        job = manager(nodes=2, per_node=2).joined()
        lives = dict(_restarted(job).incarnations)
        for rank in job.ranks:
            job.worker(ev.WorkerStarted, rank, 2000)
            job.worker(ev.WorkerDeclared, rank, True)
        assert acts(job.lose(0, version=None)) == ["Interrupt", "ReplaceWorker"]
        waiting = _reports(2, 3, incarnation=lives[2])
        said = job.register(1, *waiting, generation=3, start=2)
        assert "RestartGroup" not in acts(said)
        assert job.machine.phase is JobPhase.PAUSING


class TestAManagerThatWasStartedAgain:
    def test_it_starts_all_once_more_if_some_have_missed_the_restart(self, manager) -> None:
        job = manager(nodes=2, per_node=2)
        job.register(0, *_reports(0, 1, incarnation=2, state="running"), generation=2, start=2)
        said = job.register(1, *_reports(2, 3, state="running"), generation=2, start=0)
        order = only(said, do.RestartGroup)
        assert order.reason == "node 1 has missed the restart of all in generation 2"
        assert order.incarnations == tuple((rank, 3) for rank in range(4))

    def test_agents_that_do_not_tell_are_believed(self, manager) -> None:
        job = manager(nodes=2, per_node=2)
        job.register(0, *_reports(0, 1, incarnation=2, state="running"), generation=2, start=2)
        assert job.register(1, *_reports(2, 3, state="running"), generation=2) == []
        assert job.machine.phase is JobPhase.RUNNING
