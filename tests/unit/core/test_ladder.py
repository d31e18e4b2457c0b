"""What a record says of the ladder: which strategy, why none of the cheaper ones, what came of it.

And that a strategy which was tried in vain leaves a dump, where one is allowed.
"""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from tests.unit.core.answers import acts, only

_BARRED = "not allowed (recover-strategy)"
_KILLED = "rank 1 ended with SIGKILL at step 5"


def _record(said) -> do.RecoveryRecord:
    return only(said, do.RecordRecovery).record


def _kill(job, **more):
    return job.lose(1, FaultKind.KILLED, "SIGKILL", **more)


def _retried(job):
    job.raise_(0)
    job.pause_all()
    return job.recover_all()


def _replaced(job):
    _kill(job)
    job.pause_all()
    return job.recover_all()


def _nobody_recoverable(job):
    return only(_kill(job), do.RestartGroup) and [
        command for rank in job.ranks for command in job.worker(ev.WorkerStarted, rank, 1)
    ]


def _killed_again(job):
    _kill(job)
    job.pause_all()
    return _kill(job)


def _dumped(job):
    _kill(job)
    job.pause_all()
    for rank in (0, 2, 3):
        job.worker(ev.WorkerDumped, rank, job.machine.generation, "written", "")
    return job.worker(ev.WorkerDumped, 0, job.machine.generation, "published", "/c/dump-5")


def _nothing_to_dump(job):
    _kill(job, version=0)
    return job.pause_all(0)


@pytest.mark.parametrize(
    ("strategies", "story", "strategy", "code", "skipped"),
    [
        ("", _retried, "retry", 0, {}),
        ("", _replaced, "recover-in-place", 0, {"retry": "1 process is gone"}),
        ("", _killed_again, "recover-in-place", 405, {"retry": "1 process is gone"}),
        (
            "retry,dump", _dumped, "dump", 406,
            {
                "retry": "1 process is gone", "recover-in-place": _BARRED,
                "recover": "no node is lost", "elastic-training": "no node is lost",
                "restart": _BARRED,
            },
        ),
        (
            "retry", _kill, "exit", 499,
            {
                "retry": "1 process is gone", "recover-in-place": _BARRED,
                "recover": "no node is lost", "elastic-training": "no node is lost",
                "restart": _BARRED, "dump": _BARRED,
            },
        ),
        (
            "dump", _nothing_to_dump, "exit", 499,
            {
                "retry": "1 process is gone", "recover-in-place": _BARRED,
                "recover": "no node is lost", "elastic-training": "no node is lost",
                "restart": _BARRED,
                "dump": "no step was committed yet",
            },
        ),
    ],
)  # fmt: skip
def test_a_record_says_why_no_cheaper_strategy_and_what_came_of_it(
    manager, strategies: str, story, strategy: str, code: int, skipped: dict[str, str]
) -> None:
    record = _record(story(manager(strategies=strategies).joined()))
    assert (record.strategy, record.code, dict(record.skipped)) == (strategy, code, skipped)
    assert bool(record.not_completed) == bool(code)


def test_of_a_restart_of_all(manager) -> None:
    job = manager().joined(declared=False)
    _nobody_recoverable(job)
    why = "no live worker uses taskd.recoverable"
    skipped = _record(_kill(job)).skipped
    assert dict(skipped) == dict.fromkeys(
        ("retry", "recover-in-place", "recover", "elastic-training"), why
    )


def test_what_no_choice_has_told_is_the_reason_of_the_end(manager) -> None:
    """No restart is left: nothing was chosen at all."""
    job = manager(strategies="recover,dump", max_restarts=0).joined()
    said = _dumped(job)
    spent = f"restart budget spent: 0 of 0 restarts used (--max_restarts) when {_KILLED}"
    assert _record(said).code == 406
    assert {why.partition("; ")[0] for _, why in _record(said).skipped} == {spent}


def test_an_exception_that_came_back_is_the_reason_not_to_keep_the_process(manager) -> None:
    job = manager().joined()
    job.raise_(1)
    job.pause_all()
    job.raise_(1)
    assert acts(job.tick()) == ["Interrupt"], "it was waited for a cause"
    assert acts(job.pause_all()) == ["ReplaceWorker"]
    assert acts(job.pause_all()) == ["Resume"]
    record = _record(job.raise_(0, "another"))
    (why,) = dict(record.skipped).values()
    assert why.startswith("the same exception came back: the process of rank 1 is replaced")


class TestWithADumpInReserve:
    """What a strategy tried in vain leaves is still dumped."""

    def test_a_rank_does_not_leave_its_step_for_a_retry(self, manager) -> None:
        job = manager(strategies="retry,dump").joined()
        job.raise_(0)
        job.pause(1), job.pause(2)
        job.hear_all_until(job.now + 15)
        assert acts(job.tick()) == ["KillWorker"]
        assert only(job.lose(3, FaultKind.KILLED, "SIGKILL"), do.Dump).writers == (0, 1, 2)

    def test_a_replacement_dies_at_its_start_until_nobody_may_try_again(self, manager) -> None:
        job = manager(strategies="recover-in-place,dump").joined()
        _kill(job)
        for rank in (0, 2, 3):
            job.pause(rank)
        for _ in range(2):
            said = job.lose(1, FaultKind.EXITED, "exit 3", version=None)
            assert acts(said) == ["ReplaceWorker"]
        dump = only(job.lose(1, FaultKind.EXITED, "exit 3", version=None), do.Dump)
        assert dump.writers == (0, 2, 3)
        assert dump.reason.startswith("the same failure came 3 times")

    def test_a_fault_comes_before_all_have_gone_on(self, manager) -> None:
        job = manager(strategies="recover-in-place,dump", max_restarts=1).joined()
        _kill(job)
        job.pause_all()
        job.lose(2, FaultKind.KILLED, "SIGKILL")
        job.pause(0), job.pause(1, None)
        assert only(job.pause(3), do.Dump).writers == (0, 3)

    def test_a_new_node_finds_nobody_who_has_its_shards_but_as_mirrors(self, manager) -> None:
        """A restart of all would throw them away."""
        said = _replaced_node_whose_shards_are_mirrored(manager, "recover,dump")
        dump = only(said, do.Dump)
        assert (dump.version, dump.writers, dump.orphaned) == (6, (0,), ((1, 0),))

    def test_without_one_all_start_anew(self, manager) -> None:
        said = _replaced_node_whose_shards_are_mirrored(manager, "recover")
        assert acts(said) == ["RestartGroup"]
        assert only(said, do.RestartGroup).reason.endswith(
            "; mirrors have version 6: with dump in recover-strategy and "
            "TASKD_AFTER_DUMP=restart all would go on from it"
        )

    def test_all_go_on_from_it_if_that_is_wanted(self, manager) -> None:
        job, said = _replaced_node(manager, "recover,dump", restarts_after_dump=True)
        assert only(said, do.Dump).version == 6
        generation = job.machine.generation
        job.worker(ev.WorkerDumped, 0, generation, "written", "")
        said = job.worker(ev.WorkerDumped, 0, generation, "published", "/c/dump-6")
        assert only(said, do.RestartGroup).reason == (
            "step 6 was saved in /c/dump-6: all processes go on from it"
        )

    def test_a_lost_node_is_not_waited_for_without_taskd_recoverable(self, manager) -> None:
        job = manager(nodes=2, per_node=1, strategies="recover", reschedule_s=270.0)
        job.joined(declared=False)
        job.hear_all_until(101.0)
        job.send(ev.AgentHeard, 0, at=115.0)
        job.tick()
        assert only(job.tick(), do.GiveUp).reason.endswith(
            "; only a job that uses taskd.recoverable can wait for another one in its place"
        )


def _replaced_node_whose_shards_are_mirrored(manager, strategies: str):
    """What is done when a new node is at the gate, and node 0 has the mirrors of the lost one."""
    return _replaced_node(manager, strategies)[1]


def _replaced_node(manager, strategies: str, **more: bool):
    """The same, with the job."""
    job = manager(nodes=2, per_node=1, strategies=strategies, reschedule_s=270.0, **more).joined()
    for rank in job.ranks:
        job.worker(ev.WorkerHolds, rank, f"s{rank}")
    job.hear_all_until(101.0)
    job.send(ev.AgentHeard, 0, at=115.0)
    job.tick(), job.tick()
    job.send(ev.MirrorsHeld, 0, ((1, (4, 6)),))
    job.pause(0, 7, snapshots=(4, 6))
    job.register(1, ev.WorkerReport(1, 0, "lost"), agent="another")
    return job, job.pause(1, None)
