"""Every interleaving of a small world.

Each state that can be reached is looked at once, and from each the end must be in reach. A command,
too.

    python -m taskd.testing.explorer                  # all of SCOPES
    python -m taskd.testing.explorer --only "2 faults, sharded" --limit 1000000
    python -m taskd.testing.explorer --only "2 faults, sharded" --first kill --then cut raise

A scope has two nodes with one rank each where nothing else is said. Owns the search. What can
happen in a world is `taskd.testing.small`'s to say.
"""

import argparse
import sys
import time
from array import array
from dataclasses import dataclass, field, replace

from taskd.testing.small.rules import Rules
from taskd.testing.small.state import FAULTS, Scope, State, Violation


@dataclass(slots=True)
class Report:
    """What was seen. `ends`: how jobs ended, and in how many states.

    `seconds` of processor time.
    """

    states: int = 0
    moves: int = 0
    machine_states: int = 0
    depth: int = 0
    seconds: float = 0.0
    ends: dict[str, int] = field(default_factory=dict)
    is_complete: bool = True

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {name}" for name, count in sorted(self.ends.items()))
        scope = "all" if self.is_complete else "the first"
        return (
            f"{scope} {self.states} states ({self.machine_states} of machines) by {self.moves} "
            f"moves, up to {self.depth} deep; "
            f"ends: {ends}; {self.seconds:.1f} s"
        )


class _Search:
    """Breadth first. `_parents[i]` is the state from which state i was reached first."""

    def __init__(self, scope: Scope, limit: int) -> None:
        self.rules, self.limit, self.report = Rules(scope), limit, Report()
        first = self.rules.first()
        # 61 bits tell a million states apart, but for one chance in a million
        self._numbers = {hash(first): 0}
        self._states: list[State | None] = [first]
        self._parents, self._depths = array("l", [-1]), array("H", [0])
        self._from, self._to = array("l"), array("l")
        self._ends: list[int] = []

    def run(self) -> Report:
        """Raises `Violation` with the way that led to it."""
        began, number = time.process_time(), 0
        while number < len(self._states) and number < self.limit:
            self._expand(number)
            number += 1
        report = self.report
        report.is_complete = number == len(self._states)
        report.states, report.moves, report.machine_states = (
            number,
            len(self._from),
            len(self.rules.machines),
        )
        report.depth = max(self._depths)
        if report.is_complete:
            self._check_that_all_end()
        report.seconds = time.process_time() - began
        return report

    def _expand(self, number: int) -> None:
        state = self._states[number]
        assert state is not None
        self._states[number] = None  # its hash table entry is enough from here on
        if state.ended:
            self._ends.append(number)
            self.report.ends[state.ended] = self.report.ends.get(state.ended, 0) + 1
        for move in self.rules.moves(state):
            try:
                following = self.rules.after(state, move)
            except Exception as error:
                raise Violation(
                    f"{type(error).__name__}: {error}\n{self._way(number)}\n  {move[0]}   <- here"
                ) from error
            known = self._numbers.setdefault(hash(following), len(self._states))
            if known == len(self._states):
                self._states.append(following)
                self._parents.append(number)
                self._depths.append(self._depths[number] + 1)
            self._from.append(number)
            self._to.append(known)

    def _way(self, number: int) -> str:
        """How this state was reached: found again from the beginning."""
        numbers = [number]
        while self._parents[numbers[-1]] >= 0:
            numbers.append(self._parents[numbers[-1]])
        numbers.reverse()
        state, lines = self.rules.first(), []
        for following in numbers[1:]:
            for move in self.rules.moves(state):
                candidate = self.rules.after(state, move)
                if self._numbers.get(hash(candidate)) == following:
                    lines.append(f"  {move[0]}")
                    state = candidate
                    break
        return "\n".join(lines)

    def _check_that_all_end(self) -> None:
        """From each state an end can be reached: no circle without a way out."""
        first, sources = self._sources()
        reached, todo = bytearray(len(self._states)), list(self._ends)
        for number in todo:
            reached[number] = 1
        while todo:
            number = todo.pop()
            for source in sources[first[number] : first[number + 1]]:
                if not reached[source]:
                    reached[source] = 1
                    todo.append(source)
        lost = reached.find(0)
        if lost >= 0:
            raise Violation(
                f"{reached.count(0)} states from which no end can be reached; the "
                f"first of them:\n{self._way(lost)}"
            )

    def _sources(self) -> "tuple[array[int], array[int]]":
        """From where each state is reached: those of state i are `sources[first[i]:first[i + 1]]`.

        Arrays, because lists of tens of millions of numbers would not fit into memory.
        """
        first = array("l", bytes(8 * (len(self._states) + 1)))
        for target in self._to:
            first[target + 1] += 1
        for number in range(len(self._states)):
            first[number + 1] += first[number]
        place, sources = array("l", first), array("l", bytes(8 * len(self._to)))
        for source, target in zip(self._from, self._to, strict=True):
            sources[place[target]] = source
            place[target] += 1
        return first, sources


def explore(scope: Scope, limit: int = 2**62) -> Report:
    """Look at every state of this scope, at most `limit` of them.

    Raises `Violation` with the way that led to it.
    """
    return _Search(scope, limit).run()


_SMALL = Scope(per_node=1)
_TURNS = replace(_SMALL, in_turns=True)
SCOPES = {
    "no fault, 2 nodes with 2 ranks, replicated": Scope(faults=0),
    "no fault, 2 nodes with 2 ranks, sharded": Scope(faults=0, is_sharded=True),
    "1 fault, replicated": _SMALL,
    "1 fault, sharded": replace(_SMALL, is_sharded=True),
    "1 fault and a peer that notices, replicated": replace(_TURNS, breaks=1),
    "1 fault and a peer that notices, sharded": replace(_TURNS, breaks=1, is_sharded=True),
    "1 fault, an agent that comes late, replicated": replace(_TURNS, late=(1,)),
    "1 fault, an agent that comes late, sharded": replace(_TURNS, late=(1,), is_sharded=True),
}
# Too large to be seen whole in minutes: `--limit` says how much of them is looked at.
LARGE = {
    "1 fault, 2 nodes with 2 ranks, replicated": Scope(in_turns=True),
    "1 fault, 2 nodes with 2 ranks, sharded": Scope(in_turns=True, is_sharded=True),
    "2 faults, replicated": replace(_TURNS, faults=2),
    "2 faults, sharded": replace(_TURNS, faults=2, is_sharded=True),
}


def main(arguments: list[str] | None = None) -> int:
    """The command. 0: nothing was found."""
    parser = argparse.ArgumentParser(
        prog="python -m taskd.testing.explorer",
        description="Every interleaving of small jobs with faults.",
    )
    parser.add_argument(
        "--only", choices=[*SCOPES, *LARGE], help="this scope; else all that can be seen whole"
    )
    for option, which in (("--first", "the first fault"), ("--then", "each fault after it")):
        parser.add_argument(
            option,
            nargs="+",
            choices=FAULTS,
            default=FAULTS,
            help=f"kinds that {which} may be of; runs with each of them see what one with all "
            "does, and need less memory",
        )
    parser.add_argument("--limit", type=int, default=2**62, help="states to look at in each scope")
    wanted = parser.parse_args(arguments)
    first, then = tuple(wanted.first), tuple(wanted.then)
    print(  # noqa: T201
        f"faults: {', '.join(FAULTS)}; the first: {', '.join(first)}; then: {', '.join(then)}"
    )
    is_bad = False
    for name, scope in (
        SCOPES.items() if wanted.only is None else [(wanted.only, (SCOPES | LARGE)[wanted.only])]
    ):
        try:
            report = explore(replace(scope, first=first, then=then), wanted.limit)
            print(f"{name}: {report}", flush=True)  # noqa: T201
        except Violation as violation:
            is_bad = True
            print(f"{name}: {violation}", flush=True)  # noqa: T201
    return 1 if is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
