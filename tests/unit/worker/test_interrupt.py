"""Where an interrupt is raised in the main thread, and where not."""

import contextlib
import functools
import gc
import signal
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from taskd.core import commands
from taskd.errors import Interrupted
from taskd.worker.life import Interrupts, Life
from taskd.worker.process import unwinding
from taskd.worker.process.interrupt import MainThreadInterrupter, forget
from taskd.worker.process.orders import Orders, Where
from taskd.worker.recoverable import _let_go


@pytest.fixture
def interrupter():
    interrupter = MainThreadInterrupter(Interrupts(in_recoverable=True))
    yield interrupter
    signal.signal(interrupter._signal, signal.SIG_DFL)


class Group:
    """A process group as torch's functions see it.

    Its work calls the main thread out while that waits.
    """

    def __init__(self, interrupter):
        self._interrupter, self.waits = interrupter, 0

    def allgather(self, *_):
        self._interrupter._interrupts.pending = "a fault"
        return self

    @property
    def wait(self):
        """A function in C, as the real one: the signal is handled in the frame that calls it."""
        self.waits += 1
        return functools.partial(
            signal.pthread_kill, threading.main_thread().ident, self._interrupter._signal
        )


def test_no_collective_is_left_between_its_beginning_and_its_end(interrupter):
    group = Group(interrupter)
    dist.all_gather([torch.ones(1)], torch.ones(1), group=group)
    assert group.waits == 1
    with pytest.raises(Interrupted, match="a fault"):
        interrupter.interrupt("a fault")  # again, behind it, as after each abort


def test_the_caller_of_a_collective_is_left_at_once(interrupter):
    with pytest.raises(Interrupted, match="a fault"):
        interrupter.interrupt("a fault")
    assert interrupter._interrupts.pending is None


def test_an_optimizer_that_writes_is_not_left(interrupter):
    interrupter._interrupts.is_held = True
    interrupter.interrupt("a fault")
    with pytest.raises(Interrupted, match="a fault"):
        interrupter._interrupts.release()


def by_finally(cleanup):
    try:
        yield
    finally:
        cleanup()


class ByExit:
    def __init__(self, cleanup):
        self._cleanup = cleanup

    def __enter__(self):
        pass

    def __exit__(self, *_):
        self._cleanup()


def fail():
    raise KeyError("no such backup") from None


def amid_another(cleanup):
    """What cleans up handles an error of its own meanwhile, whose context is not to be shown."""
    try:
        yield
    finally:
        try:
            fail()
        except KeyError:
            cleanup()


WAYS = {
    "finally": contextlib.contextmanager(by_finally),
    "exit": ByExit,
    "another": contextlib.contextmanager(amid_another),
}
BROKEN = "Connection closed by peer [127.0.0.1]:29500"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", ["an interrupt", "a broken collective"])
def test_cleaning_up_on_the_way_out_is_not_interrupted(interrupter, way: str, fault: str):
    """It was, by the same interrupt, after each abort: swapped weights were put back by half."""
    done = []

    def cleanup():
        interrupter.interrupt("a fault")
        done.append("all weights are put back")

    with pytest.raises((Interrupted, RuntimeError)), WAYS[way](cleanup):
        if fault == "an interrupt":
            interrupter.interrupt("a fault")
        raise RuntimeError(BROKEN)
    assert done
    assert interrupter._interrupts.pending == "a fault"
    with pytest.raises(Interrupted):
        interrupter.interrupt("a fault")  # it had been swallowed: that is over now


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("shape mismatch")])
def test_an_error_of_the_script_that_it_handles_keeps_no_interrupt_off(interrupter, error):
    with pytest.raises(Interrupted):
        try:
            raise error
        except type(error):
            interrupter.interrupt("a fault")


def test_cleaning_up_that_takes_too_long_is_interrupted(interrupter, caplog):
    """It waits for the dead, or trains in its `except`."""
    with pytest.raises(Interrupted, match="urgent"):
        try:
            interrupter.interrupt("a fault")
        except Interrupted:
            interrupter.interrupt("a fault")
            interrupter._interrupts.is_urgent = True
            interrupter.interrupt("urgent")
    life = Life(0, 2, 0, interrupts=interrupter._interrupts)
    for _ in range(2):
        forget(life)
    assert [record.getMessage()[:36] for record in caplog.records] == [
        "rank 0: what the script does on its "
    ]


def test_a_generator_that_has_handled_an_interrupt_keeps_off_none_of_its_users(interrupter):
    def samples():
        try:
            interrupter.interrupt("a fault")
        except Interrupted:
            yield "the last one"

    loader = samples()
    assert next(loader) == "the last one"
    with pytest.raises(Interrupted):
        interrupter.interrupt("a fault")
    loader.close()


class Groups:
    opened = None

    def __init__(self):
        self.aborts = 0

    def abort(self, _opened, **_):
        self.aborts += 1


class Interrupter:
    """Notes for each call whether it was urgent."""

    def __init__(self, life):
        self._life, self.calls = life, []

    def interrupt(self, _reason):
        self.calls.append(self._life.interrupts.is_urgent)


@pytest.fixture
def process(monkeypatch):
    """The thread of a process whose main thread is in a step: what it does in so many seconds."""
    now = [0.0]
    monkeypatch.setattr(unwinding.time, "monotonic", lambda: now[0])
    life, orders, groups = Life(0, 2, 0), Orders(0, must_gate=False), Groups()
    orders.where = Where.INSIDE
    interrupter = Interrupter(life)
    thread = unwinding.Unwinding(life, orders, groups, None, interrupter)

    def run(seconds: float) -> None:
        until = now[0] + seconds
        while (due := thread.until_due_s()) is not None and now[0] + due <= until:
            now[0] += due
            thread.carry_out_if_due()
        now[0] = until

    return SimpleNamespace(
        thread=thread, orders=orders, groups=groups, calls=interrupter.calls, run=run
    )


def test_who_does_not_leave_is_interrupted_again_and_after_some_seconds_urgently(process):
    process.thread.begin(commands.Interrupt("fault", 1, "rank 1 died"))
    process.run(4)
    assert process.groups.aborts == 5
    assert process.calls
    assert not any(process.calls)
    soon = len(process.calls)
    process.run(4)
    assert any(process.calls[soon:])
    assert process.groups.aborts == 5
    process.thread.begin(commands.Interrupt("fault", 2, "rank 2 died"))
    assert not process.calls[-1], "what is cleaned up in the next recovery has its own time"
    process.orders.where = Where.WAITING
    process.run(8)
    assert process.thread.until_due_s() is None


class Circle:
    """Refers to itself, as FSDP2's groups of parameters do with their modules.

    And to a process group.
    """

    def __init__(self):
        self.own = self


def test_what_an_entry_leaves_in_circles_goes_with_its_frames(interrupter):
    """Python would look for it after hundreds of recoveries.

    Until then each kept its process groups, with their threads and sockets.
    """
    left = []

    def entry():
        circle = Circle()
        left.append(weakref.ref(circle))
        interrupter.interrupt("a fault")

    gc.disable()
    try:
        try:
            entry()
        except Interrupted as interrupt:
            error = interrupt
        assert left[0]() is not None
        _let_go(error)
        assert left[0]() is None
    finally:
        gc.enable()
