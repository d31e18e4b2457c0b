"""How a worker's process ended, beyond its exit status.

What its script said, what is in its black box, what the kernel counts.

Owns what was heard before the process was reaped. Decides nothing: the result goes into
`WorkerExited`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.agent.spawning import processes
from taskd.agent.vitals.memory_kills import MemoryKills
from taskd.core.exits import SIGKILL, exit_fault
from taskd.native import last_words
from taskd.native.last_words import Kind

if TYPE_CHECKING:
    from taskd.core.faults import Fault
    from taskd.native.black_box import BlackBox

Life = tuple[int, int]  # rank, incarnation
_NO_SCRIPT = 2  # how an interpreter ends that cannot open its script; and argparse


class Endings:
    """One per agent, made before its workers can die."""

    def __init__(self, memory_kills: MemoryKills | None = None) -> None:
        self._memory_kills = memory_kills or MemoryKills()
        self._said: dict[Life, Fault] = {}
        self._killed: set[Life] = set()
        self._notes: dict[Life, str] = {}

    def started(self, life: Life, note: str) -> None:
        """It lives.

        `note`: why it is not a fork of the warm process, which may be why it ends, too: its script
        is missing.
        """
        if note:
            self._notes[life] = note

    def said(self, life: Life, fault: Fault) -> None:
        """The script ends by an exception, as it told itself."""
        self._said[life] = fault

    def signalled(self, life: Life, number: int) -> None:
        """We send a signal: a death by SIGKILL is no riddle then."""
        if number == SIGKILL:
            self._killed.add(life)

    def words(self, life: Life, status: int, box: BlackBox, now: float) -> Fault | None:
        """What is known besides the status of a life that is over; None: nothing.

        Forgets the life.
        """
        said, note = self._said.pop(life, None), self._notes.pop(life, "")
        was_killed_by_us = life in self._killed
        self._killed.discard(life)
        written = last_words.read_of_end(box) if status != 0 else None
        if said is not None and (status >= 0 or written is None or written.kind is not Kind.SIGNAL):
            return said
        if written is not None:
            return exit_fault(
                *life, status, detail=_detail(status, written), traceback=written.text() or None
            )
        if status == -SIGKILL and not was_killed_by_us:
            reason = self._memory_kills.reason(box.pid, now)
            return (
                None if reason is None else exit_fault(*life, status, detail=f"SIGKILL, {reason}")
            )
        if status == _NO_SCRIPT and note and written is None:
            return exit_fault(*life, status, detail=f"exit {status} of a fresh interpreter: {note}")
        return said

    def close(self) -> None:
        """Twice is once."""
        self._memory_kills.close()


def _detail(status: int, written: last_words.LastWords) -> str:
    """What was written, and the status if that says something else.

    A handler may have made an exit of a crash.
    """
    is_same = status == (-written.number if written.kind is Kind.SIGNAL else written.number & 0xFF)
    unfinished = "" if written.complete else ", while it wrote its last words"
    return (
        written.summary()
        if is_same
        else f"{processes.describe_status(status)} after {written.summary()}"
    ) + unfinished


def last_state(box: BlackBox) -> tuple[int | None, str, tuple[int, ...]]:
    """What a black box says at the end of a life: version, phase, versions of the extras."""
    return box.version, box.phase.name.lower(), tuple(sorted(box.read_extras()))
