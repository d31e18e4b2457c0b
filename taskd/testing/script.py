"""What goes wrong, and when: the input of a simulation, as data.

Each trouble is asserted by the simulation to have happened once, or reported as one that found
nothing to hurt.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

KINDS = (
    "kill", "crash", "exit", "exit early", "raise", "tear", "freeze", "cut", "manager", "agent",
    "fail start",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that goes wrong.

    `kind`: of a rank: "kill" (SIGKILL), "crash" (SIGSEGV), "exit" (exit 3), "exit early" (exit 0),
    "raise", "tear" (an exception between optimizer.step() and commit()), "freeze" (SIGSTOP), "fail
    start" (its next process cannot be started); of a node: "cut" (its connection), "agent" (killed,
    with its workers), "host" (the same, with the manager on it: another one is elected after
    a while); of the job: "manager" (killed, back after `lasts_s`). `target`: the rank or the node.
    """

    at: float
    kind: str
    target: int = 0
    lasts_s: float = 0.05


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
        rng: random.Random,
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
            target = rng.randrange(nodes if kind in {"cut", "agent"} else ranks)
            troubles.append(Trouble(at, kind, target, rng.choice([0.01, 0.1, 1.0])))
        return cls.of(troubles)

    def __iter__(self) -> Iterator[Trouble]:
        return iter(self.troubles)
