"""Whether an interrupted rank finishes its step, where others have to say so.

After a vote that broke, whether it has passed for somebody: then that rank has stepped, and this
one does so, too. And at the end of a step that it was let finish, whether that was the last: ranks
may be one step apart. The manager knows when it has heard from all (`taskd.core.job.stopped`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.core import events
from taskd.worker.exceptions.communication import is_communication_error

if TYPE_CHECKING:
    from taskd.worker.life import Life
    from taskd.worker.process.orders import Orders
    from taskd.worker.process.uplink import Uplink
    from taskd.worker.process.verdict import Verdict


class Boundary:
    """One per runtime."""

    def __init__(self, life: Life, orders: Orders, uplink: Uplink, verdict: Verdict) -> None:
        self._life, self._orders, self._uplink, self._verdict = life, orders, uplink, verdict

    def ask(self) -> None:
        """Tell the manager that this rank could do one step more."""
        self._uplink.tell(
            events.WorkerMayAdvance,
            "may-advance",
            generation=self._orders.present_generation,
            version=self._life.records.version or 0,
            snapshots=self._life.saving.versions(),
        )

    def wants_more(self) -> bool:
        """At the end of a step of an interrupted rank: whether it does another one.

        Waits for the manager's answer.
        """
        orders = self._orders
        with orders.condition:
            goal = orders.await_goal(orders.generation) if orders.may_finish else None
        return goal is not None and (self._life.records.version or 0) < goal

    def has_passed(self, error: RuntimeError) -> bool:
        """A vote ended with `error` here: whether it has passed for somebody. Waits for that.

        Raises the error if it says nothing of the vote, or if the job was given up because of it.
        """
        orders = self._orders
        if not orders.must_gate and not is_communication_error(error):
            raise error
        self._verdict.await_on(error, clean=True, may_advance=True)
        while True:
            with orders.condition:
                # an answer would be of the step's end, which will be called off
                while orders.may_finish and not orders.is_leaving():
                    orders.condition.wait()
                generation = orders.generation
            self.ask()
            with orders.condition:
                goal = orders.await_goal(generation)
                if orders.generation == generation:
                    return goal is not None
