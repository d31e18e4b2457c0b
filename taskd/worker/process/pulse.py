"""Tells the black box four times a second that Python runs, and how far gloo's collectives are.

Runs in the runtime's thread. Every wake-up costs a training step more than it costs this thread, so
little is done while the main thread goes on: the counters of collectives are written once a second.
The calls themselves are written when it has stalled for a while (somebody may want to know what it
waits in), and while communication is profiled.

torch records no sending and receiving of gloo between two ranks, yet counts it with the
collectives. Where a program does that, the number of a group's last collective is taken from the
calls, and a main thread that may be in such a wait counts as waiting.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from taskd.native import collectives
from taskd.worker.process import flight
from taskd.worker.process.overdue import Overdue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskd.worker.life import Life
    from taskd.worker.process.groups import Groups, Opened

BEAT_S = 0.25
_STALLED_S = 0.4  # sooner than the agent begins to ask
_COUNT_EVERY_S = 1.0
_CALLS_EVERY_S = 0.5
_WAITING_MODULES = frozenset({"torch.distributed.distributed_c10d", "torch.distributed.rendezvous"})
_DEBUGGERS = frozenset({"pdb", "bdb"})
_FUTEX = frozenset({"202", "98"})  # x86-64, AArch64: where gloo waits; a sleep is another call


class Pulse:
    """One per process."""

    def __init__(self, life: Life, groups: Groups) -> None:
        self._life = life
        self._groups = groups
        self._overdue = Overdue(life, groups)
        self._next_at = 0.0
        self._count_at = 0.0
        self._calls_at = 0.0
        self._last_record = -1  # up to this one all are complete, and in the black box
        self._open: set[int] = set()  # later ones that are in the black box as begun
        self._is_waiting = self._is_debugged = False
        self._seen: dict[str, tuple[int, int]] = {}  # counters at the last beat
        # of the present generation's groups: number in torch -> identity
        self._listed: dict[str, int] = {}
        self._listed_of: Opened | None = None
        self._sends = False  # the counters contain more than collectives
        # by identity: counter, last collective begun, last one complete
        self._numbers: dict[int, tuple[int, int, int]] = {}

    def until_next_s(self) -> float:
        """When `beat` is due."""
        return max(0.0, self._next_at - time.monotonic())

    def beat(self) -> None:
        """Mark that Python runs, if it is time to."""
        now, box = time.monotonic(), self._life.box
        if now < self._next_at or box is None:
            return
        self._next_at = now + BEAT_S
        moved_at = box.progress_at
        is_stalled = moved_at is not None and now - moved_at > _STALLED_S
        if not is_stalled:
            self._is_waiting = self._is_debugged = False
        if is_stalled or now >= self._count_at:
            self._count_at = now + _COUNT_EVERY_S
            self._count()
        if (is_stalled or self._life.profiling.wants_calls) and now >= self._calls_at:
            self._calls_at = now + _CALLS_EVERY_S
            is_incomplete = self._add_calls(is_stalled=is_stalled)
            if is_stalled:
                modules = set(_modules_of_main())
                self._is_debugged = not modules.isdisjoint(_DEBUGGERS)
                self._is_waiting = (
                    is_incomplete
                    or not modules.isdisjoint(_WAITING_MODULES)
                    or (self._sends and _is_in_futex())
                )
        if is_stalled and moved_at is not None:
            self._overdue.look(now, moved_at)
        box.mark_python(waiting=self._is_waiting, debugged=self._is_debugged)

    def _count(self) -> None:
        """Write the counters of the present generation's groups.

        They do not tell whether all is complete: the second of two collectives may be complete
        first, and is then the last one begun and the first one not the last one complete.
        """
        names = dict(self._groups.gloo_names)
        self._forget_destroyed(names)
        seen = (
            {number: counts for number, counts in flight.counters().items() if number in names}
            if names
            else {}
        )
        for number, counts in seen.items():
            if self._seen.get(number) != counts and not self._sends:
                collectives.see(self.identity(names[number]), names[number], *counts)
        self._seen = seen

    def _forget_destroyed(self, names: dict[str, str]) -> None:
        """There is room for 64 groups: those that the script has destroyed leave it to others.

        Those of a generation that is left stay until the next one begins.
        """
        opened = self._groups.opened
        if opened is not self._listed_of:
            self._listed, self._listed_of = {}, opened
        for number in self._listed.keys() - names.keys():
            collectives.forget(self._listed.pop(number))
        for number in names.keys() - self._listed.keys():
            self._listed[number] = self.identity(names[number])

    def _add_calls(self, *, is_stalled: bool) -> bool:
        """Calls that are complete, once each and in order.

        Those that are not only when the main thread is stalled.

        Returns whether there is one that is not.
        """
        now_ns, names = time.monotonic_ns(), set(self._groups.gloo_names.values())
        is_gapless, is_waiting = True, False
        begun: dict[str, int] = {}
        complete: dict[str, int] = {}
        for call in flight.calls(self._last_record):
            # of groups that were aborted: some never complete
            if call.enter_ns < self._groups.began_ns:
                self._last_record = call.record
                continue
            begun[call.group] = max(begun.get(call.group, 0), call.number)
            if call.is_complete:
                complete[call.group] = max(complete.get(call.group, 0), call.number)
            is_gapless = is_gapless and call.is_complete
            is_waiting = is_waiting or (call.group in names and not call.is_complete)
            is_news = is_gapless or (
                is_stalled and not call.is_complete and call.record not in self._open
            )
            if is_news and call.group in names:
                leave_ns = now_ns if call.is_complete else 0
                collectives.add(
                    self.identity(call.group),
                    call.name,
                    call.number,
                    call.bytes,
                    call.enter_ns,
                    leave_ns,
                )
            if is_gapless:
                self._last_record = call.record
                self._open.discard(call.record)
            elif is_news:
                self._open.add(call.record)
        self._correct(begun, complete)
        return is_waiting

    def _correct(self, begun: dict[str, int], complete: dict[str, int]) -> None:
        """Write how far the groups of a program that sends and receives are, from its new calls.

        A group that went on, and whose calls have left torch's ring before they were seen, is 0:
        not known.
        """
        names = self._groups.gloo_names
        counters = {
            names[number]: counts[0] for number, counts in self._seen.items() if number in names
        }
        self._sends = self._sends or any(
            counters.get(name, 0) > number for name, number in begun.items()
        )
        numbers = {}
        for name, counter in counters.items():
            identity = self.identity(name)
            before, entered, left = self._numbers.get(identity, (0, 0, 0))
            if name in begun:
                entered, left = begun[name], max(complete.get(name, 0), left)
            elif counter != before:
                entered = left = 0
            numbers[identity] = (counter, entered, left)
            if self._sends:
                collectives.see(identity, name, entered, left)
        self._numbers = numbers

    def identity(self, name: str) -> int:
        """A number that all ranks of the group give it, and no other generation."""
        digest = hashlib.blake2b(
            f"{self._groups.generation}/{name}".encode(), digest_size=8
        ).digest()
        return int.from_bytes(digest, "little") >> 1


def _modules_of_main() -> Iterator[str]:
    """Modules whose functions the main thread is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back


def _is_in_futex() -> bool:
    """Whether the main thread waits for another thread, or for a lock.

    If the kernel does not say: perhaps.
    """
    try:
        with open(f"/proc/self/task/{os.getpid()}/syscall", encoding="ascii") as file:
            return file.read().split()[0] in _FUTEX
    except (OSError, LookupError):
        return True
