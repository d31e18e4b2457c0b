"""Where a job is, as its manager sees it, and where one node of it is."""

from enum import Enum


class Phase(Enum):
    """See `taskd.core.recovery`."""

    JOINING = "joining"
    RUNNING = "running"
    SUSPECTING = "suspecting"
    PAUSING = "pausing"
    RESUMED = "resumed"
    RESTARTING = "restarting"
    DYING = "dying"
    RELEASED = "released"
    ENDING = "ending"
    ENDED = "ended"


class NodePhase(Enum):
    """See `taskd.core.node`."""

    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
