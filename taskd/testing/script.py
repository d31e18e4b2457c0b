"""What goes wrong, and when: the input of a simulation, as data.

Each trouble is asserted by the simulation to have happened once, or reported as one that found
nothing to hurt.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

KINDS = (
    "kill", "crash", "exit", "exit early", "raise", "tear", "freeze", "cut", "manager", "agent",
    "fail start", "partition", "slow", "stall",
)  # fmt: skip


_OF_RANKS = ("kill", "crash", "raise", "of a node", "of many")
_OF_LINKS = ("cut", "partition", "slow", "stall")
_MANY = 8  # ranks of many nodes that die within a hundredth of a second
_OF_ONE_SWITCH = 32  # nodes that one switch cuts off
OF_A_NODE = frozenset({"cut", "agent", "host", "partition", "slow", "stall"})


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that goes wrong.

    `kind`: of a rank: "kill" (SIGKILL), "crash" (SIGSEGV), "exit" (exit 3), "exit early" (exit 0),
    "raise", "tear" (an exception between optimizer.step() and commit()), "freeze" (SIGSTOP), "fail
    start" (its next process cannot be started); of a node: "cut" (its connection), "agent" (killed,
    with its workers), "host" (the same, with the manager on it: another one is elected after
    a while), "partition" (its link to the manager is down for `lasts_s`), "slow" (its messages take
    `lasts_s` longer from then on), "stall" (its agent stands still for `lasts_s`); of the job:
    "manager" (killed, back after `lasts_s`). `target`: the rank or the node. `count`: so many ranks
    or nodes from that one on are hurt together.
    """

    at: float
    kind: str
    target: int = 0
    lasts_s: float = 0.05
    count: int = 1


@dataclass(frozen=True, slots=True)
class FaultScript:
    """Troubles in the order of their time."""

    troubles: tuple[Trouble, ...] = ()

    @classmethod
    def of(cls, troubles: Iterable[Trouble]) -> "FaultScript":
        """Sorted by time."""
        return cls(tuple(sorted(troubles, key=lambda trouble: trouble.at)))

    @classmethod
    def random(
        cls,
        rng: Random,
        *,
        count: int,
        until: float,
        ranks: int,
        nodes: int,
        kinds: Sequence[str] = KINDS,
    ) -> "FaultScript":
        """`count` troubles of these kinds, some so close together that they hit a recovery."""
        troubles: list[Trouble] = []
        at = 0.0
        for _ in range(count):
            at = (
                at + rng.random() * 0.2 if troubles and rng.random() < 0.5 else rng.random() * until
            )
            kind = rng.choice(kinds)
            target = rng.randrange(nodes if kind in OF_A_NODE else ranks)
            troubles.append(Trouble(at, kind, target, rng.choice([0.01, 0.1, 1.0])))
        return cls.of(troubles)

    @classmethod
    def cascade(
        cls, rng: Random, *, count: int, after: float, ranks: int, nodes: int
    ) -> "FaultScript":
        """`count` troubles at many places, each shortly after the one before.

        So the first one begins a recovery, and the others hit it, or the one after it: single
        ranks, all ranks of a node, ranks of many nodes, agents that are not reached for a while.
        """
        troubles: list[Trouble] = []
        per_node, at = ranks // nodes, after
        for _ in range(count):
            node, lasts_s = rng.randrange(nodes), rng.choice((0.01, 0.1, 1.0))
            rank = rng.randrange(ranks)
            kind = rng.choice((*_OF_RANKS, *_OF_LINKS) if troubles else _OF_RANKS)
            if kind == "of a node":
                troubles.append(Trouble(at, "kill", node * per_node, count=per_node))
            elif kind == "of many":
                ranks_hurt = rng.sample(range(ranks), min(_MANY, ranks // 2))
                troubles += [Trouble(at + rng.random() * 0.01, "kill", one) for one in ranks_hurt]
            elif kind in OF_A_NODE:
                size = rng.randint(1, max(1, min(_OF_ONE_SWITCH, nodes - 1)))
                troubles.append(Trouble(at, kind, node, lasts_s, size))
            else:
                troubles.append(Trouble(at, kind, rank))
            at += rng.random() * rng.choice((0.005, 0.05, 0.2))
        return cls.of(troubles)

    def each(self) -> Iterator[Trouble]:
        """The same with one target in each."""
        for trouble in self.troubles:
            for target in range(trouble.target, trouble.target + trouble.count):
                yield replace(trouble, target=target, count=1)

    def __iter__(self) -> Iterator[Trouble]:
        return iter(self.troubles)
