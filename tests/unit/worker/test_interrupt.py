"""Where an interrupt is raised in the main thread, and where not."""

import functools
import gc
import signal
import threading
import weakref

import pytest
import torch
import torch.distributed as dist

from taskd.errors import Interrupted
from taskd.worker.life import Interrupts
from taskd.worker.process.interrupt import MainThreadInterrupter
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
