"""Where a job is, as its manager sees it, and where one node of it is."""

from enum import Enum


class Phase(Enum):
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
    {Phase.RUNNING, Phase.SUSPECTING, Phase.PAUSING, Phase.RESUMED, Phase.RESTARTING}
)
DUMPING = frozenset({Phase.CONFIRMING, Phase.SAVING, Phase.PUBLISHING, Phase.DISCARDING})
OVER = frozenset({Phase.ENDING, Phase.ENDED})


class NodePhase(Enum):
    """See `taskd.core.node`."""

    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
