"""What voters tell each other and their manager in an election, as data.

`taskd.core.policy.election` says who votes for whom, and why.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

# An earlier life of a manager may have told rosters of which nobody has heard who comes back: so
# many numbers are left out. It tells one for each agent or spare that comes or goes.
SKIPPED = 1000
MAX_NUMBER = 1 << 52  # of a roster that is gone on from: so that there are numbers left
# Of addresses in a roster: with all else that stands there (99 voters, names of earlier rosters) it
# fits into a message, of 256 KiB.
_LISTENERS_BYTES = 200 * 1024
_ITEM_BYTES = 5  # what stands before a text, at most


@dataclass(frozen=True, slots=True)
class Voter:
    """The agent of one place. `name`: its incarnation. `address`: host:port where others ask it."""

    node_rank: int
    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Witness:
    """The spare that votes in a job of two nodes. `name`, `address`: as of a `Voter`."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Roster:
    """All voters, in order of their places.

    `term`, `number`: of the manager, and of the roster. `former`: the names of earlier rosters that
    count beside it, until all have this one. `listeners`: addresses of agents that do not vote, and
    of spares, as many as are `fitting`. `node_count`, `ranks_per_node`: of the job. `witness`: in a
    job of two nodes, the spare that votes, too (`taskd.core.policy.pairs`).
    """

    term: int
    number: int
    node_count: int
    ranks_per_node: int
    voters: tuple[Voter, ...]
    former: tuple[tuple[str, ...], ...] = ()
    listeners: tuple[str, ...] = ()
    witness: Witness | None = None

    @property
    def key(self) -> tuple[int, int]:
        """The larger, the newer."""
        return self.term, self.number

    @property
    def names(self) -> tuple[str, ...]:
        """Of all who vote."""
        return tuple(one.name for one in self._all)

    @property
    def addresses(self) -> dict[str, str]:
        """Where each of them is asked for its vote, by name."""
        return {one.name: one.address for one in self._all}

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The names of these voters, and of each former roster."""
        return [self.names, *self.former]

    def is_quorum(self, names: Collection[str]) -> bool:
        """Whether these may elect a manager."""
        return all(2 * _count(group, names) > len(group) for group in self.groups)

    def is_half(self, names: Collection[str], more: int = 0) -> bool:
        """Whether those who are not among these cannot elect another one.

        `more`: so many others will be added, whoever they are.
        """
        return all(2 * (_count(group, names) + more) >= len(group) for group in self.groups)

    @property
    def _all(self) -> tuple[Voter | Witness, ...]:
        return self.voters if self.witness is None else (*self.voters, self.witness)


def fitting(addresses: Iterable[str]) -> tuple[str, ...]:
    """As many of these as a roster has room for, from the first on."""
    found: list[str] = []
    left = _LISTENERS_BYTES
    for address in addresses:
        left -= len(address.encode(errors="replace")) + _ITEM_BYTES
        if left < 0:
            break
        found.append(address)
    return tuple(found)


def _count(group: Collection[str], names: Collection[str]) -> int:
    return sum(name in names for name in group)


@dataclass(frozen=True, slots=True)
class AskVote:
    """A candidate asks for the vote, or (`is_trial`) whether it would get it, which binds nobody.

    `roster_term`, `roster_number`: of the roster that it knows.
    """

    term: int
    is_trial: bool
    roster_term: int
    roster_number: int


@dataclass(frozen=True, slots=True)
class Vote:
    """The answer to `AskVote`, whose `term` and `is_trial` it repeats.

    `manager` and `manager_term`: where the manager is that the voter obeys; "": it has none.
    `promised`: the newest term that it has voted in, or whose manager it has obeyed: it gives no
    vote in one up to that. `roster`: of a witness, if it is newer than that of the candidate.
    """

    term: int
    is_trial: bool
    is_given: bool
    manager: str = ""
    manager_term: int = 0
    promised: int = 0
    roster: Roster | None = None


@dataclass(frozen=True, slots=True)
class Elected:
    """The manager of this term listens at `address`."""

    term: int
    address: str
