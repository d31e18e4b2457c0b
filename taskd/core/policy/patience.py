"""How long a process that needs its manager waits for one that is not there."""

from enum import Enum

from taskd.core.timeouts import Timeouts


class ManagerLink(Enum):
    """Whether the manager answers."""

    AWAY = "away"
    PRESENT = "present"
    REFUSED = "refused"  # it never will


def patience_ends_at(
    link: ManagerLink, lost_at: float | None, needed_since: float, timeouts: Timeouts
) -> float | None:
    """When a process that has needed the manager since then goes on alone, in seconds.

    None while the manager is there. One that had been there (`lost_at`) is waited for longer: its
    parent starts it again.
    """
    if link is ManagerLink.PRESENT:
        return None
    if link is ManagerLink.REFUSED:
        return needed_since
    if lost_at is None:
        return needed_since + timeouts.fallback_never_connected_s
    return max(needed_since, lost_at) + timeouts.fallback_connected_s
