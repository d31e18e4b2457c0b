"""The manager as one node sees it: there, away or refusing.

And how long a node waits for one that is not there.
"""

from enum import Enum

from taskd.core.timeouts import Timeouts


class Link(Enum):
    """Whether the manager answers."""

    AWAY = "away"
    PRESENT = "present"
    REFUSED = "refused"


class ManagerLink:
    """Owns the patience of a node.

    A manager that had been there is waited for longer: its parent starts it again.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self.state = Link.AWAY
        self._timeouts = timeouts
        self._away_since: float | None = None  # None: there has never been a manager

    @property
    def is_present(self) -> bool:
        """Whether there is somebody to report to."""
        return self.state is Link.PRESENT

    def joined(self) -> None:
        """It accepted us."""
        self.state = Link.PRESENT

    def lost(self, now: float) -> None:
        """It has been silent for too long."""
        self.state, self._away_since = Link.AWAY, now

    def refused(self) -> None:
        """It will never answer us."""
        self.state = Link.REFUSED

    def patience_ends_at(self, needed_since: float) -> float | None:
        """When a node that has needed the manager since then goes on alone.

        None while the manager is there.
        """
        if self.state is Link.PRESENT:
            return None
        if self.state is Link.REFUSED:
            return needed_since
        if self._away_since is None:
            return needed_since + self._timeouts.fallback_never_connected_s
        return max(needed_since, self._away_since) + self._timeouts.fallback_connected_s
