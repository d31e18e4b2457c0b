"""The gate, and a second fault while the process passes it."""

import time
from types import SimpleNamespace

import pytest

from taskd.core import commands
from taskd.worker.life import Life, Plan
from taskd.worker.process import world
from taskd.worker.process.gate import Gate
from taskd.worker.process.groups import Groups
from taskd.worker.process.orders import Orders, Where
from taskd.worker.process.unwinding import Unwinding


class Uplink:
    """Says to the agent what nobody hears; `answer` follows upon it."""

    def tell(self, kind, _cause, **fields) -> None:
        self.told = (kind.__name__, fields["generation"])
        self.answer()


class Process:
    """A process that waits at the gate, with the thread that hears the agent."""

    def __init__(self, *, keeps_groups: bool) -> None:
        self.life = Life(0, 2, 0, job_id="x", plan=Plan(0))
        self.life.keeps_groups = keeps_groups
        self.orders, self.uplink, self.groups = Orders(0, must_gate=False), Uplink(), Groups(0, 0)
        self.gate = Gate(self.life, self.orders, self.uplink, self.groups)
        self.unwinding = Unwinding(
            self.life, self.orders, self.groups, None, SimpleNamespace(interrupt=lambda _: None)
        )
        self.orders.where = Where.WAITING

    def interrupt(self, generation: int) -> None:
        self.unwinding.begin(commands.Interrupt("fault", generation, "rank 1 died"))

    def resume(self, generation: int) -> None:
        self.orders.take(commands.Resume("resume", generation, 1, (), 0))

    def carry_out(self) -> None:
        due_s = self.unwinding.until_due_s()
        if due_s is not None:
            time.sleep(due_s)
            self.unwinding.carry_out_if_due()


@pytest.mark.parametrize("keeps_groups", [False, True])
def test_a_fault_while_the_process_leaves_the_gate_aborts_what_it_makes_next(
    monkeypatch, *, keeps_groups: bool
) -> None:
    """It counted as one that still waited: it made groups with ranks that had left them."""
    process = Process(keeps_groups=keeps_groups)
    process.interrupt(1)
    process.uplink.answer = lambda: process.resume(1)
    enter = world.enter

    def interrupted(*given) -> None:
        process.interrupt(2)
        enter(*given)

    monkeypatch.setattr(world, "enter", interrupted)
    assert process.gate.wait(version=1, clean=True)
    assert process.life.plan.generation == 1
    assert process.orders.must_gate
    assert not process.groups.opened.is_aborted
    process.carry_out()
    assert process.groups.opened.is_aborted, "whoever makes a group in it comes back at once"


def test_a_fault_just_after_resume_aborts_the_groups_of_the_generation_it_began(
    monkeypatch,
) -> None:
    """Also where torch keeps the old groups until then."""
    process = Process(keeps_groups=True)
    process.interrupt(1)
    process.uplink.answer = lambda: process.resume(1)
    begin = process.gate._begin

    def interrupted(resume) -> None:
        process.interrupt(2)
        begin(resume)

    monkeypatch.setattr(process.gate, "_begin", interrupted)
    assert process.gate.wait(version=1, clean=True)
    process.carry_out()
    assert process.groups.opened.is_aborted


def test_a_fault_while_the_process_waits_at_the_gate_has_nothing_to_abort() -> None:
    process = Process(keeps_groups=False)
    process.interrupt(1)

    def again() -> None:
        process.uplink.answer = lambda: process.resume(2)
        process.groups.set_aside()  # as the gate does before it waits
        process.interrupt(2)
        assert process.unwinding.until_due_s() is None

    process.uplink.answer = again
    assert process.gate.wait(version=1, clean=True)
    assert process.uplink.told == ("WorkerPaused", 2)
    assert not process.groups.opened.is_aborted
