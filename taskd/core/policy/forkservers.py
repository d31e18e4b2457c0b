"""How long a forkserver is waited for, and when another one is worth a try.

Owns the limits, and counts silence and deaths. Knows no process: the agent's `Spawner` asks it.

- One that owes an answer (a start, or the end of a worker that has ended) and is stopped gives
  none. After a second that is no accident of the kernel's.
- One that runs answers within milliseconds, even on a machine where hundreds of processes wait for
  each processor within a second.
- One that still imports what workers need may take minutes on a cold network disk. The first one
  has a quarter of an hour for that, as nothing trains meanwhile; a later one, for which the rest of
  the job waits, finds most of it in memory. Who has waited in vain starts without.
- One that dies again and again dies of something that another one will not cure; but a day later
  that says nothing any more.
"""

from collections import deque

STOPPED_S = 1.0
ANSWER_S = 10.0
PRELOAD_S = 900.0
PRELOAD_AGAIN_S = 300.0
DEATHS = 3
DEATHS_WITHIN_S = 600.0
_LONGEST_LOOK_S = (
    2.0  # longer between two looks: the agent did not run, and neither did it, perhaps
)


class Forkservers:
    """The forkservers of one agent, one after the other."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque()
        self._looked_at: float | None = None
        self._silent_s = 0.0
        self._stopped_s = 0.0
        self._was_ready = False
        self._preload_s = PRELOAD_S

    @property
    def is_late(self) -> bool:
        """It has had its time, and is not ready yet: what waits for it starts without."""
        return not self._was_ready and self._silent_s >= self._preload_s

    def heard(self) -> None:
        """It has answered, or is a new one."""
        self._silent_s = self._stopped_s = 0.0

    def why_replace(
        self, now: float, *, owes: bool, is_ready: bool, is_stopped: bool
    ) -> str | None:
        """Why it is not waited for any longer. None: it is, or `owes` nothing.

        To be asked about once a second, or more often.
        """
        elapsed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        if not owes or is_ready is not self._was_ready:
            self._was_ready = is_ready
            self.heard()
            return None
        self._silent_s += elapsed_s
        self._stopped_s = self._stopped_s + elapsed_s if is_stopped else 0.0
        if self._stopped_s >= STOPPED_S:
            return f"has been stopped for {self._stopped_s:.0f} s"
        limit_s = ANSWER_S if is_ready else self._preload_s
        if self._silent_s < limit_s:
            return None
        return f"has not {'answered' if is_ready else 'been ready'} for {self._silent_s:.0f} s"

    def died(self, now: float) -> None:
        """It is gone, by itself or by us; or could not be started."""
        self._deaths.append(now)
        self._preload_s = PRELOAD_AGAIN_S
        self.heard()

    def why_none(self, now: float) -> str | None:
        """Why no other one is started now. None: it may be."""
        while self._deaths and now - self._deaths[0] >= DEATHS_WITHIN_S:
            self._deaths.popleft()
        if len(self._deaths) <= DEATHS:
            return None
        return f"{len(self._deaths)} forkservers were lost within {DEATHS_WITHIN_S:.0f} s"
