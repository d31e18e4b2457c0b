"""When a manager leaves that is not told so by the end of its job.

A signal asks it to (`Leaving`). SIGTERM comes to all containers of a pod. Where the job is saved on
SIGTERM, the agent of this pod has got it as well, and the emergency checkpoint needs the manager:
it stays until the job is over, at most for the grace period. Any other signal, or one that
comes later, ends it at once: training goes on, and a manager that is started again takes over.

Nobody has ever joined it (`NotJoined`): torchrun could not start, or looks for its manager
elsewhere. Pods of a slow cluster may start long after the first one, which has the manager. Whoever
starts both in one script, and has ended, will start no torchrun any more.
"""

from collections.abc import Iterable

from taskd.core.policy.ladder import Strategy, allowed

# 5 minutes of 30: a torchrun that was started elsewhere may import torch from a slow file system.
ORPHAN_SHARE = 6
GRACE_IS_OVER = "the grace period is over"
# A platform may signal a process in several ways at once: by a hook of its pod, by its group, by
# its parent. A person who wants the end now has waited for longer.
SAME_SIGNAL_S = 5.0


class Leaving:
    """One per manager."""

    def __init__(self, strategies: Iterable[str], grace_s: float) -> None:
        """`strategies`: names of the `recover-strategy` list."""
        self.grace_s = grace_s
        self.deadline: float | None = None  # the end of the grace period, once it has begun
        self._saves = Strategy.DUMP in allowed(strategies)

    def stays(self, reason: str, now: float) -> bool:
        """Whether the manager stays although `reason`, the name of a signal, asks it to end."""
        if reason != "SIGTERM" or not self._saves:
            return False
        if self.deadline is None:
            self.deadline = now + self.grace_s
        return now < self.deadline - self.grace_s + SAME_SIGNAL_S

    def overdue(self, now: float) -> str | None:
        """Why the manager leaves now, if its time has come."""
        return GRACE_IS_OVER if self.deadline is not None and now >= self.deadline else None


class NotJoined:
    """How long a manager waits for the first one to join. One that was joined stays."""

    def __init__(self, limit_s: float, now: float) -> None:
        """`limit_s`: an orphan has a sixth of it, from then on."""
        self._orphan_limit_s = limit_s / ORPHAN_SHARE
        self._reason = f"nobody has joined it within {limit_s:g} s"
        self._is_orphan = False
        self.deadline: float | None = now + limit_s

    def joined(self) -> None:
        """Somebody is there, or was."""
        self.deadline = None

    def orphaned(self, now: float) -> None:
        """The process that has started the manager is gone. May be told again."""
        is_news, self._is_orphan = not self._is_orphan, True
        sooner = now + self._orphan_limit_s
        if is_news and self.deadline is not None and sooner < self.deadline:
            self.deadline = sooner
            self._reason = (
                f"nobody has joined it within {self._orphan_limit_s:g} s of the end of the process "
                "that started it"
            )

    def overdue(self, now: float) -> str | None:
        """Why the manager leaves now, if its time has come."""
        return self._reason if self.deadline is not None and now >= self.deadline else None
