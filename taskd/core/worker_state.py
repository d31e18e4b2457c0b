"""What is believed of one life of a worker.

The word for it in machines, registrations and stories.
"""

from enum import Enum


class WorkerState(str, Enum):
    """Where one life of a worker is.

    The values are those of `WorkerReport.state` on the wire and in stories.
    """

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    RETURNED = "returned"
    LOST = "lost"
    FINISHED = "finished"
