"""How far a worker has come, as its agent reads it from the black box and from the kernel.

All durations are seconds up to the moment at which the agent looked; an agent that was itself not
running for a while counts only from the moment at which it ran again.
"""

from dataclasses import dataclass


class Activity:
    """What the kernel says of the main thread and of everything that the worker started.

    Plain strings, as they go over the wire.
    """

    ASLEEP = "asleep"  # no processor time, no input or output, nor in its children
    BUSY = "busy"
    DISK = (
        "disk"  # waits for something outside the job: a disk, a device, a file, a socket, a child
    )
    STOPPED = "stopped"  # by SIGSTOP or the like (state T)
    ENDING = "ending"  # it was killed or exits, and the kernel has not let go of it yet
    TRACED = "traced"  # a debugger holds it, or somebody types at it (pdb)
    UNKNOWN = ""  # it went on a moment ago, so that nobody looked


@dataclass(frozen=True, slots=True)
class GroupMark:
    """One communicator of a worker. `id` is the same on all its ranks.

    `entered`, `left`: collectives begun, and completed (NCCL, HCCL: calls that came back).
    `operation`: the one begun last.
    """

    id: int
    name: str
    entered: int
    left: int
    operation: str = ""


@dataclass(slots=True, unsafe_hash=True)
class Mark:
    """One worker at one moment. Nobody changes one.

    Not frozen, because setting the fields of one that is takes four times as long, which was a
    quarter of the time that a manager of thousands of nodes spent.

    Args:
        still_s: since the main thread last marked anything: a phase, a commit. Of one that is
            asleep: since it was last seen to do something.
        frozen_s: since libtaskd's thread last ran; 0 without libtaskd.
        python_s: since the runtime's Python thread last ran: whoever keeps the interpreter lock
            keeps it from running.
        is_waiting: a collective was begun and is not complete.
        slowest_s: the longest of the last few hundred steps; 0: not known yet.
        checkpoint_s, evaluation_s: the longest of each so far; 0: there was none.
        groups: only of one that stands.
        times: name of a phase, complete visits to it, seconds in them; only now and then.
    """

    rank: int
    incarnation: int
    generation: int
    version: int | None
    phase: str
    still_s: float
    frozen_s: float = 0.0
    python_s: float = 0.0
    activity: str = Activity.UNKNOWN
    is_waiting: bool = False
    slowest_s: float = 0.0
    checkpoint_s: float = 0.0
    evaluation_s: float = 0.0
    groups: tuple[GroupMark, ...] = ()
    times: tuple[tuple[str, int, float], ...] = ()
