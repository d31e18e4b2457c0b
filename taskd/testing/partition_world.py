"""Hosts of which some do not reach others, and torchruns there that elect managers.

Owns time, which messages arrive, who is asked for votes, and when an elected manager starts. What a
manager does, and who obeys it, is that of each world (`partitions`, `pair_partitions`). The
elections are the real ones; everything else is a model: a message arrives at once or never.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from taskd.core.policy.election import Election, Won
from taskd.core.votes import AskVote, Elected, Roster, Vote

if TYPE_CHECKING:
    import random

_TURN_S = 0.05
_SETTLED_S = 30.0
_START_S = 4.0  # at most, of a manager


class _Torchrun(Protocol):
    name: str
    host: int
    election: Election


Torchrun = TypeVar("Torchrun", bound=_Torchrun)
Manager = TypeVar("Manager")


@dataclass(slots=True)
class PartitionWorld(ABC, Generic[Torchrun, Manager]):
    """`count`: of the nodes, or of the spares, of a world. `loss`: of each message, 0 to 1."""

    count: int
    random: random.Random
    loss: float = 0.0
    now: float = 0.0
    managers: list[Manager] = field(default_factory=list)
    torchruns: list[Torchrun] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)  # hosts
    _starting: list[tuple[float, Torchrun, Won]] = field(default_factory=list)  # from when on
    _block: dict[int, int] = field(default_factory=dict)  # by host: who reaches each other

    # ------------------------------------------------------------------ what happens

    def split(self, blocks: dict[int, int]) -> None:
        """From now on hosts reach those of their own block; who is not named is in the first."""
        self._block = blocks

    def kill(self, host: int) -> None:
        """The host with all that is on it."""
        self.dead.add(host)

    def settle(self) -> None:
        """Until nothing changes any more."""
        until = self.now + _SETTLED_S
        while self.now < until:
            self.turn()

    def turn(self) -> None:
        """A moment passes."""
        self.now += _TURN_S
        for due in [one for one in self._starting if one[0] <= self.now]:
            self._starting.remove(due)
            self._start(*due[1:])
        for one in [one for one in self.torchruns if one.host not in self.dead]:
            self._look_for_manager(one)
            ask = one.election.turn(self.now)
            if ask is not None:
                self._ask(one, ask)
        for manager in list(self.managers):
            self.look(manager)

    @abstractmethod
    def look(self, manager: Manager) -> None:
        """The manager sees who is there, gives away places that are free, and tells who votes."""

    # ------------------------------------------------------------------ what arrives

    def reaches(self, one: int, other: int) -> bool:
        """Whether what one host says to the other arrives."""
        is_there = not {one, other} & self.dead
        return is_there and self._block_of(one) == self._block_of(other)

    def _block_of(self, host: int) -> int:
        return self._block.get(host, 0)

    def _arrives(self, one: int, other: int) -> bool:
        return self.reaches(one, other) and self.random.random() >= self.loss

    # ------------------------------------------------------------------ the election

    @abstractmethod
    def _look_for_manager(self, one: Torchrun) -> None:
        """Whether it misses the manager that it obeys."""

    @abstractmethod
    def _start(self, winner: Torchrun, won: Won) -> None:
        """The manager that was elected begins, and whoever hears of it follows."""

    @abstractmethod
    def _follow(self, one: Torchrun, elected: Elected) -> None:
        """It hears of an elected manager."""

    def _ask(self, candidate: Torchrun, ask: AskVote) -> None:
        asked = candidate.election.others
        for other in [one for one in self.torchruns if one.name in asked]:
            if not self._arrives(candidate.host, other.host):
                continue
            vote = other.election.take_ask(candidate.name, ask, self.now)
            if self._arrives(other.host, candidate.host):
                self._take_vote(candidate, other, vote)

    def _take_vote(self, candidate: Torchrun, other: Torchrun, vote: Vote) -> None:
        result = candidate.election.take_vote(other.name, vote, self.now)
        if isinstance(result, AskVote):
            self._ask(candidate, result)
        elif isinstance(result, Elected):
            self._follow(candidate, result)
        elif isinstance(result, Won):
            self._starting.append((self.now + self.random.random() * _START_S, candidate, result))

    def _voters(self, roster: Roster | None) -> list[Torchrun]:
        names = () if roster is None else roster.names
        return [one for one in self.torchruns if one.name in names]
