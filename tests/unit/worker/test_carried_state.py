"""A state whose content another library carries: its steps, its copies, its dump."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from job import Stop

from taskd.core import commands
from taskd.core.commands import Move
from taskd.core.events import FAILED, PUBLISHED, WITHDRAWN, WRITTEN, WorkerRaised
from taskd.core.faults import FaultKind
from taskd.errors import Interrupted, StateError
from taskd.native.black_box import Phase
from taskd.worker import life as life_module
from taskd.worker.carried_state import CarriedState, ask_all, on_stop, report_overdue
from taskd.worker.life import Life
from taskd.worker.process.orders import Orders, Where
from taskd.worker.process.unwinding import PendingAbort, Unwinding
from taskd.worker.saving.dumping import Dumping
from taskd.worker.train_state import TrainState


class Memory:
    """A carrier that notes what it is asked for."""

    def __init__(self, fails_at=""):
        self.calls, self.fails_at, self.damage = [], fails_at, ""

    def _note(self, *call):
        self.calls.append(call)
        if call[0] == self.fails_at:
            raise RuntimeError(f"{call[0]} has failed")

    def move(self, step, moves):
        self._note("move", step, {rank: move.source for rank, move in moves.items()})

    def write(self, step, writers):
        self._note("write", step, writers)

    def publish(self, step):
        self._note("publish", step)
        return "somewhere"


def entry(carrier, *steps, then=None, **settings):
    """An entry that finishes these steps, and then does something with its state, and stops."""

    def function():
        state = CarriedState("carried", carrier, **settings)
        restored = state.restore()
        for step in steps:
            state.begin_update()
            state.end_update(step)
        if then is not None:
            then(state)
        return restored, state.step

    return function


def test_what_does_not_come_back_is_told_as_a_hang_of_a_rank_that_has_not_stopped(job):
    told = []
    job.life.supervisor.tell = lambda kind, cause, **fields: told.append((kind, fields))
    job.resume(None)
    job.enter(entry(Memory(), 4, then=lambda _: report_overdue(job.life, "the repair handler")))
    ((kind, fields),) = told
    assert kind is WorkerRaised
    assert (fields["generation"], fields["may_advance"]) == (job.life.plan.generation, True)
    fault = fields["fault"]
    assert (fault.kind, fault.detail, fault.version) == (FaultKind.HANG, "the repair handler", 4)


def test_what_takes_long_beside_a_step_is_not_taken_for_one(job):
    phases = []

    def slow(state):
        with state.outside_steps():
            phases.append(job.life.box.phase)
        phases.append(job.life.box.phase)

    job.resume(None)
    job.enter(entry(Memory(), then=slow))
    assert phases == [Phase.ENTERED, Phase.STEP]


def stop(_state):
    raise Stop


def test_the_version_is_the_number_of_the_step_and_is_kept(job):
    memory = Memory()
    job.resume(None)
    (restored, step), report = job.enter(entry(memory, 1001, 1002))
    assert (restored.source, step, report.version, report.clean) == ("nothing", 1002, 1002, True)
    assert job.life.box.version == 1002
    job.resume(1002)
    (restored, step), report = job.enter(entry(memory, 1003))
    assert (restored.source, step, report.version) == ("memory", 1003, 1003)
    assert memory.calls == [("move", 1002, {0: None})]


def test_a_script_that_goes_back_has_versions_that_grow(job):
    job.resume(None)
    (_, step), report = job.enter(entry(Memory(), 7, 3, 3))
    assert (step, report.version) == (3, 9)
    job.resume(9)
    (_, step), _ = job.enter(entry(Memory()))
    assert step == 3


def test_before_the_first_finished_step_nobody_knows_where_the_script_was(job):
    job.resume(None)
    _, report = job.enter(entry(Memory(), then=stop))
    assert (report.version, report.clean) == (0, False)
    assert "no step has been finished" in report.reason


def test_a_fault_while_the_optimizer_writes_costs_this_copy(job):
    def interrupted(state):
        state.begin_update()
        raise Stop

    job.resume(None)
    _, report = job.enter(entry(Memory(), 1, then=interrupted))
    assert (report.version, report.clean) == (1, False)
    assert "between optimizer.step() and commit()" in report.reason


def test_an_interrupt_waits_for_the_end_of_the_update(job):
    def interrupted(state):
        state.begin_update()
        job.life.interrupts.pending = "a fault"
        with pytest.raises(Interrupted):
            state.end_update(2)
        raise Stop

    job.resume(None)
    _, report = job.enter(entry(Memory(), 1, then=interrupted))
    assert (report.version, report.clean) == (2, True)


def test_what_is_spoiled_or_refused_is_no_copy_until_it_is_made_whole(job):
    job.resume(None)
    memory = Memory()
    _, report = job.enter(entry(memory, 1, then=lambda state: state.spoil("memory fault")))
    assert (report.version, report.clean) == (1, False)
    assert "memory fault" in report.reason

    def refused():
        state = CarriedState("carried", memory)
        state.refuse("not asked for")
        state.begin_update()
        state.end_update(2)

    _, report = job.enter(refused)
    assert (report.version, report.clean) == (2, False)
    assert "not asked for" in report.reason


def test_no_step_mends_what_is_damaged(job):
    job.resume(None)
    memory = Memory()

    def damaged(state):
        memory.damage = "memory fault"
        state.begin_update()
        state.end_update(2)

    _, report = job.enter(entry(memory, 1, then=damaged))
    assert (report.version, report.clean) == (2, False)
    assert "memory fault" in report.reason


def test_one_that_is_damaged_and_was_not_to_receive_is_not_gone_on_with(job):
    """It was said too late for the plan: behind the word with which this rank has stopped."""
    job.resume(None)
    memory = Memory()
    job.enter(entry(memory, 1))
    memory.damage = "memory fault"
    job.resume(1)

    def kept():
        with pytest.raises(RuntimeError, match=r"rank 0: memory fault.*is not to receive"):
            entry(memory, 2)()

    _, report = job.enter(kept)
    assert (report.version, report.clean) == (1, False)


def test_a_torn_copy_stays_torn_when_the_next_entry_is_interrupted_before_it_is_restored(job):
    def tear(state):
        state.begin_update()
        raise Stop

    def interrupted():
        raise Stop

    job.resume(None)
    _, report = job.enter(entry(Memory(), 1, then=tear))
    assert not report.clean
    job.resume(1)
    _, report = job.enter(interrupted)
    assert (report.version, report.clean) == (1, False)


def test_it_is_the_only_state_of_a_function(job):
    def two():
        CarriedState("carried", Memory())
        TrainState()
        CarriedState("other", Memory())

    job.resume(None)
    with pytest.raises(StateError, match="the only state"):
        job.enter(two)
    with pytest.raises(StateError, match="the only state"):
        CarriedState("carried", Memory())


def dump(job, version, writers=(0,)):
    return commands.Dump("cause", 1, version, writers, 1, "reason", "attempt")


def publish(*, withdraw=False):
    return commands.Publish("cause", 1, 0, 0, 0, withdraw=withdraw)


def test_the_carrier_writes_and_names_the_dump_and_no_file_of_ours_is_made(
    job, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    memory = Memory()
    job.resume(None)
    job.enter(entry(memory, 5, then=stop))
    dumping = Dumping(job.life, "job")
    assert dumping.obey(dump(job, 5)) == (WRITTEN, "")
    assert dumping.obey(publish()) == (PUBLISHED, "somewhere")
    assert memory.calls == [("write", 5, (0,)), ("publish", 5)]
    assert list(tmp_path.iterdir()) == []


def test_a_carrier_that_fails_ends_the_dump_with_its_words(job):
    memory = Memory(fails_at="write")
    job.resume(None)
    job.enter(entry(memory, 5, then=stop))
    dumping = Dumping(job.life, "job")
    assert dumping.obey(dump(job, 5)) == (FAILED, "RuntimeError: write has failed")
    assert dumping.obey(publish(withdraw=True)) == (WITHDRAWN, "")
    memory.fails_at = "publish"
    dumping = Dumping(job.life, "job")
    assert dumping.obey(dump(job, 5)) == (WRITTEN, "")
    assert dumping.obey(publish()) == (FAILED, "RuntimeError: publish has failed")


def test_a_carrier_that_cannot_move_leaves_what_was_kept(job):
    memory = Memory(fails_at="move")
    job.resume(None)
    job.enter(entry(memory, 5, then=stop))
    job.resume(5)

    def fails():
        with pytest.raises(RuntimeError, match="move has failed"):
            entry(memory)()
        raise Stop

    _, report = job.enter(fails)
    assert (report.version, report.clean) == (5, True)


def test_ranks_that_do_not_come_are_waited_for_no_longer_than_is_said(job):
    assert ask_all(job.life, "subject", "text", within_s=0.1) == ["text"]
    # the store knows nothing of how many ranks the job has
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job.life.world_size = 3
        dist.distributed_c10d._get_default_store().set("taskd/subject/0/2/1/1", "a text")
        with pytest.raises(TimeoutError, match=r"rank 0 has waited 0.1 s for ranks 2 "):
            ask_all(job.life, "subject", "text", within_s=0.1)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def ask():
    """What each of three ranks is answered: ask(rank, within_s). They share a store."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def ask(rank, within_s):
        life = Life(rank=rank, world_size=3, incarnation=0)
        try:
            return ask_all(life, "subject", f"text {rank}", within_s=within_s)
        except TimeoutError as error:
            return str(error)

    yield ask
    dist.destroy_process_group()


def at_once(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result(60) for one in [pool.submit(*call) for call in calls]]


def test_ranks_that_come_together_are_told_what_all_have_said(ask):
    assert at_once((ask, 0, 60), (ask, 1, 60), (ask, 2, 60)) == [["text 0", "text 1", "text 2"]] * 3


@pytest.mark.parametrize("late", [0, 2])
def test_who_comes_late_gives_up_as_the_others_did(ask, late):
    """All texts are there then; whoever believed in them would wait for the others for ever."""
    early = [rank for rank in range(3) if rank != late]
    store = dist.distributed_c10d._get_default_store()
    for rank in early:  # whichever of the two threads runs first
        store.set(f"taskd/subject/0/1/1/{rank}", f"text {rank}")
    (first, second) = at_once(*((ask, rank, 0.1) for rank in early))
    assert first == second == ask(late, 60)
    assert f"has waited 0.1 s for ranks {late} " in first


def test_without_a_limit_of_its_own_it_is_that_of_a_start(ask, monkeypatch):
    monkeypatch.setenv("TASKD_FAULT_TIMEOUT", "0.01")
    assert ask(1, None).startswith("rank 1 has waited 0.2 s for ranks 0, 2 ")


def test_who_has_no_time_left_follows_what_is_agreed(ask):
    store = dist.distributed_c10d._get_default_store()
    for rank in (1, 2):
        store.set(f"taskd/subject/0/1/1/{rank}", f"text {rank}")
    assert ask(0, 0.0) == ask(1, 0.0) == ask(2, 0.0) == ["text 0", "text 1", "text 2"]


class NoGroups:
    """Nothing to abort."""

    def abort(self, opened, *, with_store):
        pass


class NoInterrupter:
    def interrupt(self, reason):
        pass


@pytest.mark.parametrize(("where", "must_gate", "is_held", "count"), [
    (Where.INSIDE, True, False, 1),
    (Where.INSIDE, True, True, 0),  # the end of the update raises
    (Where.WAITING, True, False, 0),  # the main thread has left
    (Where.INSIDE, False, False, 0),  # it has left, and is in the next entry
])  # fmt: skip
def test_a_device_is_stopped_once_where_the_main_thread_may_wait_for_it(
    where, must_gate, is_held, count
):
    life = Life(rank=0, world_size=1, incarnation=0)
    stopped = []
    threads = []
    on_stop(life, lambda: (stopped.append(1), threads.append(threading.current_thread())))
    orders = Orders(1, must_gate=must_gate)
    orders.where, life.interrupts.is_held = where, is_held
    unwinding = Unwinding(life, orders, NoGroups(), None, NoInterrupter())
    unwinding._abort = PendingAbort(None, 1, "a fault", due=0.0)
    for _ in range(3):
        unwinding.carry_out_if_due()
        if unwinding._abort is not None:
            unwinding._abort = PendingAbort(None, 1, "a fault", due=time.monotonic())
    for thread in threads:
        thread.join(10)
    assert len(stopped) == count
    assert threading.main_thread() not in threads


def test_outside_a_job_it_cannot_be_made():
    assert life_module.current() is None
    with pytest.raises(StateError):
        CarriedState("carried", Memory())


def test_a_move_names_who_sends_to_whom(job):
    memory = Memory()
    job.resume(None)
    job.enter(entry(memory, 3, then=stop))
    job.resume(3, {0: Move(0)})
    job.enter(entry(memory))
    assert memory.calls[-1] == ("move", 3, {0: None})
    assert job.life.box.phase is Phase.STEP


def test_a_memory_that_is_damaged_before_it_is_restored_is_no_source_any_more(job):
    job.resume(None)
    job.enter(entry(Memory(), 3, then=stop))
    job.resume(3)

    def damaged():
        CarriedState("carried", Memory()).spoil("memory fault")
        raise Stop

    _, report = job.enter(damaged)
    assert (report.version, report.clean) == (3, False)
