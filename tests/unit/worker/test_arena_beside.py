"""Other threads of Python go on while memory for snapshots is made and given back.

The runtime's thread is one of them: a rank in which it stands still, with the interpreter lock
held, is taken for one that hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from taskd.native import node_memory
from taskd.native.arena import PAGE_BYTES, Arena, capacity_for
from taskd.native.arena_memory import Memory
from taskd.native.copying import copier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARD_BYTES = 48 << 20  # about 100 MB of memory: 30 ms and more
HELD_US = 50_000
NEVER_S = 600.0  # after which a thread asks for the interpreter lock: not within a test
ATTEMPTS = 20  # on a busy machine the other thread may have to wait for its processor, too


class Turns:
    """Those of another thread, which takes the interpreter lock again for each."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over:
            self._times.append(time.perf_counter())
            time.sleep(0)

    def _await_turn(self) -> None:
        count = len(self._times)
        while len(self._times) < count + 2:
            time.sleep(0)

    def has_waited_for(self, call: Callable[[], object]) -> bool:
        """Whether there was no turn in more than half of the time that the call took.

        Meanwhile no thread asks for the interpreter lock. Otherwise this one might have to give it
        up between the reading of the clock and the call, and wait for a processor: the turns that
        the other thread takes then would count as if it had taken them during the call.
        """
        interval = sys.getswitchinterval()
        sys.setswitchinterval(NEVER_S)
        try:
            self._await_turn()  # so that the other thread has read the new interval
            begin = time.perf_counter()
            call()
            end = time.perf_counter()
        finally:
            sys.setswitchinterval(interval)
        times = [begin, *(at for at in self._times if begin < at < end), end]
        longest = max(after - before for before, after in itertools.pairwise(times))
        return longest > (end - begin) / 2


@pytest.fixture
def turns() -> Iterator[Turns]:
    turns = Turns()
    turns.start()
    yield turns
    turns.stop()


@contextlib.contextmanager
def made() -> Iterator[Arena]:
    arena = Arena.create(SHARD_BYTES)
    try:
        yield arena
    finally:
        arena.close()


def fill(turns: Turns) -> bool:
    descriptor = node_memory.empty_file("taskd-arena")
    try:
        return turns.has_waited_for(lambda: node_memory.fill(descriptor, 2 * SHARD_BYTES))
    finally:
        os.close(descriptor)


def form(turns: Turns) -> bool:
    """The pages are there: they are mapped, and a header is written."""
    capacity = capacity_for(SHARD_BYTES)
    descriptor = node_memory.empty_file("taskd-arena")
    node_memory.fill(descriptor, PAGE_BYTES + 2 * capacity)
    found: list[Memory] = []
    try:
        return turns.has_waited_for(
            lambda: found.append(Memory.format(descriptor, capacity, copier()))
        )
    finally:
        os.close(descriptor)


def discard(turns: Turns) -> bool:
    with made() as arena:
        return turns.has_waited_for(arena.discard)


def close(turns: Turns) -> bool:
    with made() as arena:
        return turns.has_waited_for(arena.close)


def empty(turns: Turns) -> bool:
    """As it is done with what a life has left that was killed while it made an arena."""
    with made() as arena:
        return turns.has_waited_for(lambda: node_memory.empty(arena.fd))


@pytest.mark.parametrize("what", [fill, form, discard, close, empty])
def test_another_thread_takes_turns_meanwhile(turns: Turns, what: Callable[[Turns], bool]) -> None:
    hold = ctypes.PyDLL(None).usleep
    assert turns.has_waited_for(lambda: hold(HELD_US)), "it can be seen"
    assert not all(what(turns) for _ in range(ATTEMPTS))
