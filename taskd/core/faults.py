"""What can go wrong with a worker or a node, as data."""

from dataclasses import dataclass
from enum import Enum


class FaultKind(str, Enum):
    """How a worker failed, from what the kernel or the worker itself told us."""

    LOST = "lost"  # the death alarm rang; how it died is not known yet
    KILLED = "killed"  # SIGKILL, SIGTERM, SIGINT, SIGHUP: somebody outside did it
    CRASHED = "crashed"  # any other signal: SIGSEGV, SIGABRT, SIGBUS ...
    EXITED = "exited"  # non-zero exit code
    EXITED_EARLY = "exited early"  # exit code 0 before the job was complete
    RAISED = "raised"  # an exception left the recoverable function
    COMMUNICATION = "communication"  # ... which is what a victim of somebody else's death sees
    UNRESPONSIVE = "unresponsive"  # did not come when called
    HANG = "hang"  # stands still while others wait for it; or all wait for the network
    START_FAILED = "start failed"  # the replacement could not be started
    NODE_LOST = "node lost"  # the agent is silent or gone


# Says nothing against the script. LOST: it is not known yet.
FROM_OUTSIDE = frozenset({FaultKind.LOST, FaultKind.KILLED, FaultKind.NODE_LOST})


@dataclass(frozen=True, slots=True)
class Fault:
    """One detected cause.

    `version` is the number of committed steps of the worker when it failed (None: it had no
    TrainState yet), `phase` where in the step it was (see `taskd.native.black_box.Phase`), `detail`
    the text for the log line ("SIGKILL", "exit 3", "ValueError: bad sample"), `signature` what
    makes two faults "the same": of an exception its type and where it was raised, never its text,
    which may hold a time, an address, a pid; else the exit reason. `is_final`: taskd itself refused
    what the script asked for, so that trying again changes nothing. `is_incurable`: the copies of
    the state are what they are, and no recovery in place can go on from them.
    """

    kind: FaultKind
    rank: int
    incarnation: int
    detail: str
    version: int | None = None
    phase: str | None = None
    signature: str = ""
    traceback: str | None = None
    exit_code: int | None = None
    is_final: bool = False
    is_incurable: bool = False

    @property
    def life(self) -> tuple[int, int]:
        """Whose it is: (rank, incarnation)."""
        return self.rank, self.incarnation


@dataclass(slots=True)
class TimedFault:
    """A fault with the times that belong to it."""

    fault: Fault
    died_at: float
    learned_at: float
    life_s: float = 0.0
    is_declared: bool = False  # the job used `taskd.recoverable` when it happened
    generation: int | None = None  # of the recovery that counted it

    def order(self) -> tuple[float, int]:
        """Sorts by death, then by rank."""
        return self.died_at, self.fault.rank


def describe(fault: Fault) -> str:
    """The fault as half a sentence."""
    where = "" if fault.version is None else f" at step {fault.version}"
    if fault.kind is FaultKind.NODE_LOST:
        return fault.detail
    how = {
        FaultKind.RAISED: "raised",
        FaultKind.COMMUNICATION: "lost its communication:",
        FaultKind.UNRESPONSIVE: "did not come when called:",
        FaultKind.HANG: "hangs:",
        FaultKind.START_FAILED: "could not be started:",
    }.get(fault.kind, "ended with" if fault.detail else "ended")
    return f"rank {fault.rank} {how} {fault.detail}".rstrip(" :") + where


def signature(fault: Fault) -> str:
    """What makes two faults of a kind the same."""
    return fault.signature or fault.detail
