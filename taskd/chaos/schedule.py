"""When which fault hits whom: a pure function of the seed, the number of faults and their kinds.

Knows nothing of processes. The number of ranks is not known before the job runs: a fault carries a
number, which is taken modulo the number of ranks.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, NamedTuple

from taskd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = {
    "kill": "SIGKILL of a rank",
    "segv": "SIGSEGV of a rank",
    "stop": "SIGSTOP of a rank, which is found as a hang",
    "manager": "SIGKILL of the manager",
    "agent": "SIGKILL of torchrun: only where a spare or somebody else takes its place",
    "kill+manager": "SIGKILL of a rank, and of the manager within half a second of it",
    "node": "a machine is lost, by the command of --node: where somebody takes its place",
    "link": "a link is disturbed, by the command of --link",
}
BY_COMMAND = ("node", "link")  # no signal does it: whoever owns the machines has to
DEFAULT_KINDS = ("kill", "segv", "stop", "manager")
_CHOICES = 10**6  # far above the number of ranks, so that each of them is about as likely
_LONGEST = 4.0  # times the mean: a run of so many faults takes about as long as it says


class PlannedFault(NamedTuple):
    """One fault of a schedule."""

    number: int  # from 1
    after_s: float  # from when the job has recovered from the fault before
    kind: str
    choice: int

    def position(self, count: int) -> int:
        """Which of `count` processes it hits."""
        return self.choice % count

    def share(self) -> float:
        """Of a span of time; not tied to the position."""
        return self.choice // 1000 / (_CHOICES // 1000)


def kinds_of(text: str) -> tuple[str, ...]:
    """Names separated by commas, each once. Raises ConfigError: one is unknown."""
    found: list[str] = []
    for name in (word.strip() for word in text.split(",")):
        if name == "exception":
            raise ConfigError(
                "--kinds: exception is none: no exception can be raised in a training process from "
                "outside; let the script raise one itself"
            )
        if name not in KINDS:
            raise ConfigError(f"--kinds: {name!r} is none of {', '.join(KINDS)}")
        if name not in found:
            found.append(name)
    return tuple(found)


def plan(seed: int, count: int, every_s: float, kinds: Sequence[str]) -> list[PlannedFault]:
    """The schedule. Intervals are exponential; of each kind there are as many, or one more.

    Raises ConfigError: a number is out of its range.
    """
    if count < 1:
        raise ConfigError(f"--faults {count}: at least 1 is needed")
    if not 0 < every_s < math.inf:
        raise ConfigError(f"--every {every_s}: more than 0 seconds are needed")
    # Only `random()`: its numbers are promised to be the same in every version of Python.
    draw = random.Random(f"taskd.chaos {seed}").random  # noqa: S311 - chance, no secret
    faults: list[PlannedFault] = []
    left: list[str] = []
    for number in range(1, count + 1):
        left = left or list(kinds)
        after_s = min(_LONGEST, -math.log(1.0 - draw())) * every_s
        kind = left.pop(int(draw() * len(left)))
        faults.append(PlannedFault(number, round(after_s, 3), kind, int(draw() * _CHOICES)))
    return faults


def describe(faults: Sequence[PlannedFault]) -> list[str]:
    """Lines for people."""
    return [
        f"{fault.number:4}  {fault.after_s:8.3f} s after the last recovery  {fault.kind:12}"
        + ("" if fault.kind == "manager" else f"  process {fault.choice} modulo their number")
        for fault in faults
    ]
