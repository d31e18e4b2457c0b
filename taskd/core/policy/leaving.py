"""When a manager that a signal asks to end leaves.

SIGTERM comes to all containers of a pod. Where the job is saved on SIGTERM, the agent of this pod
has got it as well, and the emergency checkpoint needs the manager: it stays until the job is over,
at most for the grace period. Any other signal, or a second one, ends it at once: training goes on,
and a manager that is started again takes over.
"""

from collections.abc import Iterable

from taskd.core.policy.ladder import Strategy, allowed

GRACE_IS_OVER = "the grace period is over"


class Leaving:
    """One per manager."""

    def __init__(self, strategies: Iterable[str], grace_s: float) -> None:
        """`strategies`: names of the `recover-strategy` list."""
        self.grace_s = grace_s
        self.deadline: float | None = None  # the end of the grace period, once it has begun
        self._saves = Strategy.DUMP in allowed(strategies)

    def stays(self, reason: str, now: float) -> bool:
        """Whether the manager stays although `reason`, the name of a signal, asks it to end."""
        if reason != "SIGTERM" or not self._saves or self.deadline is not None:
            return False
        self.deadline = now + self.grace_s
        return True

    def overdue(self, now: float) -> str | None:
        """Why the manager leaves now, if its time has come."""
        return GRACE_IS_OVER if self.deadline is not None and now >= self.deadline else None
