"""What a small world is made of, as values.

How much may go wrong in it, its workers, and everything that tells two of its moments apart.

What can happen is `taskd.testing.small.rules`'s to say.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

OF_A_RANK = ("kill", "exit", "raise")
OF_A_NODE = ("cut", "lose up", "lose down", "repeat up", "repeat down")
OF_THE_JOB = ("manager",)
FAULTS = (*OF_A_RANK, *OF_A_NODE, *OF_THE_JOB)
WAITING = frozenset({"paused", "asking", "raised", "returned"})
IN_COLLECTIVE = frozenset({"enter", "vote"})


@dataclass(frozen=True, slots=True)
class Scope:
    """Which world, and how much may go wrong in it.

    `late`: nodes whose agent has not registered yet when training begins. `in_turns`: what somebody
    says to one other in one turn stays together on its way, and is heard, lost or repeated as one.
    `breaks`: see `taskd.testing.small`. `first`: the kinds that the first fault may be of,
    and `then` those of the others, so that what is too large to be seen at once can be seen one
    kind after the other.
    """

    nodes: int = 2
    per_node: int = 2
    steps: int = 1
    is_sharded: bool = False
    kinds: tuple[str, ...] = FAULTS
    first: tuple[str, ...] = FAULTS
    then: tuple[str, ...] = FAULTS
    faults: int = 1
    breaks: int = 0
    late: tuple[int, ...] = ()
    in_turns: bool = False


class Worker(NamedTuple):
    """The newest life of a rank.

    `phase`: "boot", "enter" and "vote" (collectives), "paused", "asking", "raised", "returned",
    "gone".
    """

    incarnation: int
    phase: str
    generation: int
    target: int
    is_gated: bool = False
    version: int | None = None
    source: int | None = None  # where it gets the state from, once all have entered
    restores: int | None = None  # ... and in which version
    has_entered: bool = False
    is_fresh: bool = False  # resumed, and has not committed since
    is_released: bool = False
    start: int = 0  # the generation for whose start the store was opened at which it meets others
    orders: tuple[int, ...] = ()  # commands that it has not read yet, by number


class State(NamedTuple):
    """Everything. Machines and messages by number (`Rules.machines`)."""

    now: float
    manager: int
    agents: tuple[int, ...]
    left: frozenset[int]  # nodes whose agent has ended
    workers: tuple[Worker, ...]
    # by node: messages that are on their way to the manager, and
    up: tuple[tuple[tuple[int, ...], ...], ...]
    down: tuple[tuple[tuple[int, ...], ...], ...]  # ... to the agent
    gaps: frozenset[int]  # nodes that will notice that something was lost, and register
    # rank, incarnation and status of what the kernel has not said yet
    reaps: frozenset[tuple[int, int, int]]
    arrived: frozenset[tuple[Any, int]]  # who has come to which collective
    faults: int
    breaks: int
    ended: str = ""


class Violation(AssertionError):  # noqa: N818
    """What must never be."""


class Draft:
    """A state that is being made. The fields are those of `State`, as lists and sets."""

    def __init__(self, state: State) -> None:
        self.now, self.manager, self.ended = state.now, state.manager, state.ended
        self.agents, self.workers = list(state.agents), list(state.workers)
        self.up, self.down = list(map(list, state.up)), list(map(list, state.down))
        self.left, self.gaps = set(state.left), set(state.gaps)
        self.reaps, self.arrived = set(state.reaps), set(state.arrived)
        self.sent: set[tuple[str, int]] = set()  # channels that have got something in this turn
        self.faults, self.breaks = state.faults, state.breaks

    def channel(self, name: str, node: int) -> list[tuple[int, ...]]:
        """`name`: "up" to the manager, "down" to the agent."""
        return (self.up if name == "up" else self.down)[node]

    def freeze(self) -> State:
        """The state, without what cannot matter any more: collectives in which nobody is."""
        open_ = {place(worker) for worker in self.workers if worker.phase in IN_COLLECTIVE}
        return State(
            now=self.now,
            manager=self.manager,
            agents=tuple(self.agents),
            left=frozenset(self.left),
            workers=tuple(self.workers),
            up=tuple(map(tuple, self.up)),
            down=tuple(map(tuple, self.down)),
            gaps=frozenset(self.gaps),
            reaps=frozenset(self.reaps),
            arrived=frozenset(
                item for item in self.arrived if item[0] in open_ or self._may_come(item[0])
            ),
            faults=self.faults,
            breaks=self.breaks,
            ended=self.ended,
        )

    def _may_come(self, where: tuple[Any, ...]) -> bool:
        """Whether somebody may come to this collective yet."""
        return any(
            worker.generation <= where[0] and worker.phase != "gone" for worker in self.workers
        )


def place(worker: Worker) -> tuple[Any, ...]:
    """Which collective a worker is in."""
    return (worker.generation, worker.phase, None if worker.phase == "enter" else worker.version)
