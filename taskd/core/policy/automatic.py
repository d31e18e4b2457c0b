"""When the agent of the first node starts a manager of its own: where nobody else has one.

Whoever starts a manager himself keeps it: once one that is not ours has accepted this node, none is
started any more. Knows no process and no clock; the shell that has them tells what happened.
"""

from collections import deque

# Of the manager that an agent has started:
EXIT_LEFT = 0  # the job is over, or it was asked to leave
EXIT_WRONG_SETTINGS = 2
EXIT_PORT_TAKEN = 3  # somebody was quicker
# In a row, of one that dies before it has accepted the node: more is not bad luck.
MAX_STARTS_IN_VAIN = 10
# One that has served is started again for as long as the job lasts: a job of months may well lose
# more than ten. But no manager that fails at what it hears fills the log: after so many starts
# within so many seconds the next ones are that far apart.
MAX_AT_ONCE, WINDOW_S, SPACING_S = 60, 3600.0, 60.0


class AutomaticManager:
    """See the module. Times are seconds of the caller's clock."""

    def __init__(self, now: float, *, is_wanted: bool, is_alone: bool) -> None:
        """`is_alone`: no other node has to know the address."""
        self.due_at = now if is_wanted else None  # when to start it
        self.is_elsewhere = False  # on any free port, as its own is taken
        self.in_vain = 0  # starts since the last one that served
        self._is_wanted = is_wanted
        self._is_alone = is_alone
        self._is_running = self._has_served = False
        self._ends: deque[float] = deque(maxlen=MAX_AT_ONCE)  # of those that had served

    def started(self) -> None:
        """It runs."""
        self.due_at, self._is_running, self._has_served = None, True, False

    def port_is_taken(self) -> None:
        """Somebody listens there: what it is will be heard."""
        self.due_at, self._is_running = None, False

    def joined(self) -> None:
        """A manager has accepted this node."""
        if self._is_running:
            self._has_served, self.in_vain = True, 0
        else:
            self.stop()

    def moves(self, now: float) -> bool:
        """Who listens there does not serve this node. Whether ours is started elsewhere."""
        is_ours = self._is_running or self.due_at is not None  # nobody else listens there
        if not self._is_wanted or not self._is_alone or is_ours or self.is_elsewhere:
            return False
        self.due_at, self.is_elsewhere = now, True
        return True

    def ended(self, status: int, now: float) -> bool:
        """It has ended. Whether it is to be started again."""
        self._is_running = False
        if status == EXIT_PORT_TAKEN:
            self.port_is_taken()
            return False
        if status in (EXIT_LEFT, EXIT_WRONG_SETTINGS) or self.in_vain == MAX_STARTS_IN_VAIN:
            self.stop()
            return False
        if self._has_served:
            is_often = len(self._ends) == MAX_AT_ONCE and now - self._ends[0] < WINDOW_S
            self._ends.append(now)
            self.due_at = now + SPACING_S if is_often else now
        else:
            self.due_at = now + self.in_vain  # the first at once
            self.in_vain += 1
        return True

    def stop(self) -> None:
        """None is started here any more."""
        self.due_at, self._is_wanted = None, False
