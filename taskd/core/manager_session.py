"""The registration of one process (an agent, a worker without one) with its manager.

Owns when to register again, and when the manager counts as lost. The shell that has the connection
tells what it heard, and asks at each heartbeat. Knows no messages and no clock.
"""

from taskd.core.manager_link import Link, ManagerLink
from taskd.core.timeouts import Timeouts


class ManagerSession:
    """See the module. `link`: whether the manager is there, and how long to wait for it."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.link = ManagerLink(timeouts)
        self.is_registered = False  # it accepted us, and has not said that it forgot us
        self._silence_s = timeouts.manager_silence_s
        self._heard_at = 0.0
        self._manager_incarnation: str | None = None

    @property
    def is_refused(self) -> bool:
        """Whether the manager does not want us: it is not spoken to any more."""
        return self.link.state is Link.REFUSED

    def heard(self, now: float) -> None:
        """It said something, whatever it was."""
        self._heard_at = now

    def accepted(self, manager_incarnation: str) -> None:
        """It has our registration; it may be another manager than the last one."""
        self.is_registered, self._manager_incarnation = True, manager_incarnation
        self.link.joined()

    def refused(self) -> None:
        """It does not want us."""
        self.is_registered = False
        self.link.refused()

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
        if not self.link.is_present or now - self._heard_at <= self._silence_s:
            return False
        self.is_registered = False
        self.link.lost(now)
        return True
