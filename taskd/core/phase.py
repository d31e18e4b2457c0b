"""Where a job is, as its manager sees it, and where one node of it is."""

from enum import Enum


class JobPhase(Enum):
    """See `taskd.core.job.machine`."""

    JOINING = "joining"
    RUNNING = "running"
    SUSPECTING = "suspecting"
    PAUSING = "pausing"
    RESUMED = "resumed"
    RESTARTING = "restarting"
    CONFIRMING = "confirming"
    SAVING = "saving"
    PUBLISHING = "publishing"
    DISCARDING = "discarding"
    RELEASED = "released"
    ENDING = "ending"
    ENDED = "ended"


TRAINING = frozenset(
    {JobPhase.RUNNING, JobPhase.SUSPECTING, JobPhase.PAUSING, JobPhase.RESUMED, JobPhase.RESTARTING}
)
DUMPING = frozenset(
    {JobPhase.CONFIRMING, JobPhase.SAVING, JobPhase.PUBLISHING, JobPhase.DISCARDING}
)
OVER = frozenset({JobPhase.ENDING, JobPhase.ENDED})


class NodePhase(Enum):
    """See `taskd.core.node`."""

    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
