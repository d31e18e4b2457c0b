"""When the agent of the first node starts a manager of its own: where nobody else has one.

Whoever starts a manager himself keeps it: once one that is not ours has accepted this node, none is
started any more. Knows no process and no clock; the shell that has them tells what happened.
"""

# Of the manager that an agent has started:
EXIT_LEFT = 0  # the job is over, or it was asked to leave
EXIT_WRONG_SETTINGS = 2
EXIT_PORT_TAKEN = 3  # somebody was quicker
MAX_RESTARTS = 10  # of one that dies: more is not bad luck


class AutomaticManager:
    """See the module. Times are seconds of the caller's clock."""

    def __init__(self, now: float, *, is_wanted: bool, is_alone: bool) -> None:
        """`is_alone`: no other node has to know the address."""
        self.due_at = now if is_wanted else None  # when to start it
        self.is_elsewhere = False  # on any free port, as its own is taken
        self.restarts = 0
        self._is_wanted = is_wanted
        self._is_alone = is_alone
        self._is_running = False

    def started(self) -> None:
        """It runs."""
        self.due_at, self._is_running = None, True

    def port_is_taken(self) -> None:
        """Somebody listens there: what it is will be heard."""
        self.due_at, self._is_running = None, False

    def joined(self) -> None:
        """A manager has accepted this node."""
        if not self._is_running:
            self.stop()

    def moves(self, now: float) -> bool:
        """Who listens there does not serve this node. Whether ours is started elsewhere."""
        is_ours = self._is_running or self.due_at is not None  # nobody else listens there
        if not self._is_wanted or not self._is_alone or is_ours or self.is_elsewhere:
            return False
        self.due_at, self.is_elsewhere = now, True
        return True

    def ended(self, status: int, now: float) -> bool:
        """It has ended. Whether it is to be started again, later each time."""
        self._is_running = False
        if status == EXIT_PORT_TAKEN:
            self.port_is_taken()
            return False
        if status in (EXIT_LEFT, EXIT_WRONG_SETTINGS) or self.restarts == MAX_RESTARTS:
            self.stop()
            return False
        self.due_at = now + self.restarts  # the first at once
        self.restarts += 1
        return True

    def stop(self) -> None:
        """None is started here any more."""
        self.due_at, self._is_wanted = None, False
