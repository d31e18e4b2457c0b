"""How long a node that is to end (SIGTERM) waits for the job to be saved.

Owns the rule: the manager is told as soon as there is one; the node ends by itself when there is
none in time, when the grace period is over, or when the agent is signalled again, later.
"""

from enum import Enum

from taskd.core.policy.leaving import SAME_SIGNAL_S


class Step(Enum):
    """What is to be done now."""

    WAIT = "wait"
    TELL = "tell"  # the manager that this node is to end
    END = "end"


class Draining:
    """See the module. `grace_s`: seconds from the signal to the end, saved or not."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.is_told = False  # the manager knows
        self.detail = ""  # what has come, and to whom
        self.asked_at: float | None = None  # when the signal came; None: it has not

    @property
    def is_asked(self) -> bool:
        """Whether this node is to end."""
        return self.asked_at is not None

    @property
    def deadline(self) -> float | None:
        """When the grace period is over; None: the node is not to end."""
        return None if self.asked_at is None else self.asked_at + self.grace_s

    def ask(self, now: float, detail: str = "SIGTERM") -> bool:
        """The agent got a signal. False: it is another one, the node ends at once."""
        if self.asked_at is None:
            self.asked_at, self.detail = now, detail
        elif now - self.asked_at >= SAME_SIGNAL_S:
            self.asked_at = None
        return self.is_asked

    def hear(self, now: float, detail: str) -> None:
        """A worker got the signal. That its agent or others get it as well says nothing new."""
        if not self.is_asked:
            self.ask(now, detail)

    def cancel(self) -> None:
        """The node ends without having saved."""
        self.asked_at = None

    def meet_manager(self) -> None:
        """A manager has accepted this node: it may be another one, which has not been told."""
        self.is_told = False

    def step(self, now: float, patience_ends_at: float | None) -> Step:
        """What is to be done. TELL is said once to each manager.

        `patience_ends_at`: of a node that needs its manager since `asked_at`
        (`taskd.core.policy.patience`); None: there is a manager.
        """
        deadline = self.deadline
        if deadline is None:
            return Step.WAIT
        if not self.is_told and patience_ends_at is None:
            self.is_told = True
            return Step.TELL
        if not self.is_told and patience_ends_at is not None:
            deadline = min(deadline, patience_ends_at)
        return Step.END if now >= deadline else Step.WAIT
