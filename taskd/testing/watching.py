"""Which invariants of the manager's machine are asserted after which event.

All of them, or, in a world of thousands of ranks, those that the event can have touched: what is
true of the job as a whole, and of the members that the event names. Everything is asserted whenever
more may have changed (another phase, another generation, any command), and now and then besides,
for what an event changes without naming it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from taskd.core import events as ev
from taskd.core.job.machine import RecoveryMachine
from taskd.core.transitions import Commands

# To look at all members takes about as long as to handle so many events for each thousand of them.
_EVENTS_BETWEEN = 10_000
_OF_A_NODE = (ev.AgentRegistered, ev.AgentLeft, ev.AgentMirrors, ev.MirrorsHeld)  # and its ranks


@dataclass(slots=True)
class Checks:
    """How many events a manager handled, and what was asserted after them."""

    events: int = 0
    whole: int = 0  # times that all members were looked at
    partial: int = 0  # times that only those were that the event names


class Watch:
    """Hands events to one machine, and asserts every invariant after each."""

    def __init__(self, machine: RecoveryMachine, checks: Checks) -> None:
        self.machine, self.checks = machine, checks

    def handle(self, event: ev.Event) -> Commands:
        """Take in one event. Raises AssertionError if an invariant is broken then."""
        commands = self.machine.handle(event)
        self.checks.events += 1
        self._check_all()
        return commands

    def _check_all(self) -> None:
        self.checks.whole += 1
        self.machine.check()


class PartialWatch(Watch):
    """As `Watch`, in time that does not depend on the size of the world after most events."""

    def __init__(self, machine: RecoveryMachine, checks: Checks) -> None:
        super().__init__(machine, checks)
        self._since = 0  # events since all members were looked at

    def handle(self, event: ev.Event) -> Commands:
        """Take in one event. Raises AssertionError if an invariant is seen to be broken then."""
        machine = self.machine
        deadline = machine.next_deadline() if isinstance(event, ev.Tick) else None
        is_early = isinstance(event, ev.Tick) and (deadline is None or deadline > event.now)
        before = machine.phase, machine.generation
        commands = machine.handle(event)
        self.checks.events += 1
        self._since += 1
        ranks = () if is_early else self._named(event)
        is_same = before == (machine.phase, machine.generation) and not commands
        if ranks is None or not is_same or self._since >= _EVENTS_BETWEEN:
            self._since = 0
            self._check_all()
        else:
            self.checks.partial += 1
            machine.check(ranks)
        return commands

    def _named(self, event: ev.Event) -> Iterable[int] | None:
        """The ranks that this event can change if nothing follows from it; None: any."""
        if isinstance(event, ev.AgentHeard):
            return ()
        if isinstance(event, ev.WorkerEvent):
            return (event.rank,)
        if isinstance(event, ev.SharedReport):
            return [rank for rank, _ in event.lives]
        if isinstance(event, _OF_A_NODE):
            node = self.machine.membership.nodes.get(event.node_rank)
            return () if node is None else node.ranks
        return None
