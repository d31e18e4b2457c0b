"""The registration of one process (an agent, a worker without one) with its manager.

Owns when to register again, and when the manager counts as lost. The shell that has the connection
tells what it heard, and asks at each heartbeat. Knows no messages and no clock.

A registration is said on a connection that is there: what waits for one would be read, minutes old,
before anything else. It is said once more on each new connection, as what was said on the one
before may be lost, and with each heartbeat as long as the manager says that it does not take this
process yet. One that says nothing has what was said, or is stopped and will read it: it is asked
after 1, 3 and 7 heartbeats, and then ever more seldom.
"""

from taskd.core.policy.patience import ManagerLink, patience_ends_at
from taskd.core.timeouts import Timeouts

_MOST_BEATS = 16  # between two registrations on one connection


class Registration:
    """See the module. `link`: whether the manager is there."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.link = ManagerLink.AWAY
        self.is_registered = False  # it accepted us, and has not said that it forgot us
        self._timeouts = timeouts
        self._heard_at = 0.0
        self._lost_at: float | None = None
        self._manager_incarnation: str | None = None
        self._asked_on = 0  # the connection
        self._begin()

    def _begin(self) -> None:
        """The next heartbeat is due to ask, the one after it, too, and then ever fewer of them."""
        self._waits, self._pause = 0, 1

    @property
    def is_refused(self) -> bool:
        """Whether the manager does not want us: it is not spoken to any more."""
        return self.link is ManagerLink.REFUSED

    def heard(self, now: float) -> None:
        """It said something, whatever it was."""
        self._heard_at = now
        self._begin()

    def asks(self, connection: int) -> bool:
        """Whether to register now. To be called with each heartbeat of one that is not registered.

        `connection`: the number of the one that is there; 0: none.
        """
        if not connection:
            return False
        if connection != self._asked_on:
            self._asked_on = connection
            self._begin()
        if self._waits > 1:
            self._waits -= 1
            return False
        self._waits, self._pause = self._pause, min(2 * self._pause, _MOST_BEATS)
        return True

    def accepted(self, manager_incarnation: str) -> None:
        """It has our registration; it may be another manager than the last one."""
        self.is_registered, self._manager_incarnation = True, manager_incarnation
        self.link = ManagerLink.PRESENT

    def refused(self) -> None:
        """It does not want us."""
        self.is_registered = False
        self.link = ManagerLink.REFUSED

    def acknowledged(self, *, is_known: bool, manager_incarnation: str) -> bool:
        """It answered a heartbeat. Whether to register again: it does not know us, or is new."""
        if is_known and manager_incarnation == self._manager_incarnation:
            return False
        self.is_registered = False
        return True

    def loses_manager(self, now: float) -> bool:
        """Whether the manager has been silent for too long. True once, until it accepts us again.

        One that has forgotten us and never answers the new registration is lost, too.
        """
        is_silent = now - self._heard_at > self._timeouts.manager_silence_s
        if self.link is not ManagerLink.PRESENT or not is_silent:
            return False
        self.is_registered = False
        self.link, self._lost_at = ManagerLink.AWAY, now
        self._begin()
        return True

    def patience_ends_at(self, needed_since: float) -> float | None:
        """As the function of this name: of this manager."""
        return patience_ends_at(self.link, self._lost_at, needed_since, self._timeouts)
