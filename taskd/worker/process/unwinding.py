"""What `Interrupt` does to this process: groups are aborted, the main thread leaves the function.

Owns when, and how often it is tried. Runs in the runtime's thread. Which step is finished first is
decided by `taskd.core.policy.unwinding`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from taskd.core.policy.unwinding import Course, course_of
from taskd.threads import start_thread
from taskd.worker.process.orders import Where

if TYPE_CHECKING:
    from taskd.core import commands
    from taskd.worker.life import Life
    from taskd.worker.process.boundary import Boundary
    from taskd.worker.process.groups import Groups, Opened
    from taskd.worker.process.interrupt import MainThreadInterrupter
    from taskd.worker.process.orders import Orders

# Between an interrupt and the abort of the groups. What is on its way between survivors arrives:
# they finish a collective that the dead had completed, and gloo does not lose the operation that it
# begins to write to a socket while that fails (its waiter would never be woken, torch 2.13). Less
# than a fork of the replacement takes, so nothing is lost by it.
_QUIET_S = 0.03
# The same for a rank that is behind a committed version: the rest of its backward pass and its
# optimizer step.
_FINISH_S = 0.5
_AGAIN_S = 0.05  # between two tries of an abort
_TRIES = 5
# What the script does on its way out (puts weights back, closes files) is left alone for so long:
# copies of many gigabytes take less. It may as well wait for something that never comes, or be a
# loop in an `except`, and is to end before the rank is taken for one that does not leave its step.
_CLEANUP_S = 5.0
_LATE_S = 1.0  # between two interrupts of a main thread that five have not made leave
# Within this an abort has been carried out, if there is to be one.
ABORTED_S = 2 * _FINISH_S


@dataclass(frozen=True)
class PendingAbort:
    """An abort that is to be carried out at the monotonic time `due`."""

    opened: Opened
    generation: int
    reason: str
    due: float
    tries: int = _TRIES  # 0: the main thread alone is still to be made to leave
    urgent_at: float = math.inf  # from then on the script's cleaning up is interrupted, too


class Unwinding:
    """One per runtime."""

    def __init__(
        self,
        life: Life,
        orders: Orders,
        groups: Groups,
        boundary: Boundary,
        interrupter: MainThreadInterrupter,
    ) -> None:
        self._life, self._orders, self._groups = life, orders, groups
        self._boundary, self._interrupter = boundary, interrupter
        self._abort: PendingAbort | None = None
        self._stopped = -1  # the generation for which the device was stopped

    def begin(self, command: commands.Interrupt) -> None:
        """A newer generation begins: leave the present one."""
        life, orders = self._life, self._orders
        with orders.condition:
            if command.generation <= orders.generation:
                return
            # Before the main thread can notice: it retires these groups, and those it finds
            # afterwards are the next generation's.
            opened = self._groups.opened
            orders.generation = command.generation
            orders.resume = None
            orders.must_gate = True
            is_retired = orders.where is Where.WAITING and opened.is_empty
            if orders.is_inside:
                life.interrupts.pending = command.reason  # commit() raises it
            # after the line before: what is committed from here on sees it
            version = life.records.whole_version
            course = course_of(
                is_inside=orders.is_inside,
                is_voting=life.interrupts.is_voting,
                version=version,
                reach=command.reach,
                finish_step=command.finish_step,
            )
            orders.may_finish = course is Course.FINISH
            life.interrupts.is_urgent = False
            if orders.is_inside and course is Course.LEAVE:
                self._interrupter.interrupt(command.reason)
            orders.condition.notify_all()
        if course is Course.FINISH:
            self._boundary.ask()
        if self._abort is not None:  # of an earlier generation, not carried out or not repeated yet
            self._groups.abort(self._abort.opened)
        self._abort = None
        if course is not Course.FINISH and not is_retired:
            wait_s = _FINISH_S if course is Course.CATCH_UP else _QUIET_S
            due = time.monotonic() + wait_s
            self._abort = PendingAbort(
                opened, command.generation, command.reason, due, urgent_at=due + _CLEANUP_S
            )

    def until_due_s(self) -> float | None:
        """When `carry_out_if_due` has something to do; None: nothing is pending."""
        return None if self._abort is None else max(0.0, self._abort.due - time.monotonic())

    def carry_out_if_due(self) -> None:
        """Make collectives raise, then the main thread leave, if it has not yet."""
        abort, orders = self._abort, self._orders
        if abort is None or time.monotonic() < abort.due:
            return
        with orders.condition:
            is_inside = self._is_inside(abort)
        # the first try has aborted what can be: what keeps the main thread now is something else
        is_stuck = is_inside and abort.tries < _TRIES and not self._life.keeps_groups
        if abort.tries:
            self._groups.abort(abort.opened, with_store=is_stuck)
        # Under the lock, as in `begin`: the main thread must not have left the function in between,
        # or it would find an interrupt of an earlier generation pending when it is in again.
        with orders.condition:
            is_inside = self._is_inside(abort)
            if is_inside:
                self._life.interrupts.is_urgent = time.monotonic() >= abort.urgent_at
                self._interrupter.interrupt(abort.reason)
                self._stop_device(abort)
        # A thread that was just beginning to wait would sleep a quarter of a second longer.
        tries = max(0, abort.tries - 1)
        due = time.monotonic() + (_AGAIN_S if tries else _LATE_S)
        self._abort = replace(abort, due=due, tries=tries) if tries or is_inside else None

    def _is_inside(self, abort: PendingAbort) -> bool:
        """Whether the main thread is still in the step that is to be left. Under the condition."""
        orders = self._orders
        return orders.is_inside and orders.must_gate and orders.generation == abort.generation

    def _stop_device(self, abort: PendingAbort) -> None:
        """Once. An optimizer that is writing is finished, and its commit raises."""
        life = self._life
        if life.stop_device is None or self._stopped == abort.generation:
            return
        if not life.interrupts.is_held:
            self._stopped = abort.generation
            start_thread("taskd-stop", life.stop_device)
