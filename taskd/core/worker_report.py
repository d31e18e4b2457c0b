"""What a registration (`taskd.core.events.AgentRegistered`) says of each worker of the node."""

from dataclasses import dataclass

from taskd.core.faults import Fault
from taskd.core.worker_state import WorkerState


@dataclass(frozen=True, slots=True)
class ReportedFailure:
    """How (without the traceback) and how long ago a registered life failed.

    It is lost; or paused, because an exception left its function. `replaced`: it was the one
    before, whose place the registered life has taken in a recovery that is not over.
    """

    fault: Fault
    age_s: float
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What an agent knows of one of its workers when it registers.

    `clean` False: it is paused with an inconsistent copy, see `WorkerPaused`.
    `may_advance`: it is paused within its function, see `WorkerMayAdvance`.
    `failure`: see there.
    """

    rank: int
    incarnation: int
    state: WorkerState
    declared: bool = False
    version: int | None = None
    clean: bool = True
    entered: bool = False
    snapshots: tuple[int, ...] = ()
    shard: str = ""
    may_advance: bool = False
    failure: ReportedFailure | None = None
