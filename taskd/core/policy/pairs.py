"""Who goes on in a job of two nodes and a spare when the manager's host is lost.

Of two voters none is more than half, so one spare votes, too: the *witness*. Two of these three
elect a manager (`taskd.core.policy.election`). A witness has no place, so that what binds it does
not bind whoever trains, and the rule for larger jobs (half of the voters are there) is not enough:
with the vote of the witness node 1 may have a manager, while that of node 0, which takes the
witness for its own still, gives place 1 to another spare. So here

1. a manager goes on only with two agents that are at least half of the voters themselves, of each
   roster that counts: two of the three where there is a witness (only the witness may be given a
   place), one of the two where there is none;
2. the witness keeps its name and its promises, the terms that it has voted in, when it becomes the
   agent of a place; and it gets one only if it knows the newest roster;
3. a roster counts until both agents know the next one, and so with all that came between; the first
   one of a job has no witness;
4. agents tell a manager that has just begun the newest roster that they know: it goes on from that;
5. an agent that misses its manager learns a newer roster from the witness, too: nobody else is left
   to be elected, and the witness would refuse it for ever.

*Why that is safe.* Whoever is elected has the votes of a quorum, more than half of every group of
voters that counts; a manager that goes on has agents that are half of every group (1). If the two
have a group in common, one of these agents has voted for the newer manager, and obeys the older one
never again (2): the older one has not both places any more. They always have one in common: a
manager drops a group only when both of its agents, which are half of that group, know the next
roster (3). Whoever knows only the former one needs one of these two for a quorum, and they give no
vote to somebody whose roster is older than theirs. Who has voted for a newer manager before it was
told the next roster does not take that from the older one, so that one drops nothing.

A manager that was started again knows no roster; rule 4 gives it that of one of its agents, which
has a group in common with all that are known elsewhere, by the same argument. From whom an agent
knows a roster (5) changes nothing: what a manager drops a group for is that an agent which obeys it
knows the next one, and gives no vote to anybody who does not. Nothing here asks whether somebody is
slow, stopped or cut off. Knows no connection and no clock.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from taskd.core.votes import MAX_NUMBER, SKIPPED, Roster, Voter, Witness

PLACES = 2


@dataclass(frozen=True, slots=True)
class WaitingSpare:
    """One that may be the witness. `may_vote`: it has a port, and may be offered a place."""

    name: str
    address: str
    may_vote: bool = True


class PairElectorate:
    """The manager's side: who votes, and who may have a place. See the module."""

    def __init__(self, term: int = 0, roster: Roster | None = None) -> None:
        """`roster`: that of the election in which this manager was elected."""
        self.term = term
        self.roster: Roster | None = None  # the newest one; all agents and the witness are told it
        self._learnt: tuple[int, int] | None = None  # key of the one that it went on from
        self._own: list[Roster] = []  # those that it has told since
        self._has_composed = False
        self._kept: set[str] = set()  # by whom the roster is known
        if roster is not None:
            self.learn(roster)

    def learn(self, roster: Roster | None) -> None:
        """An agent knows this one, from this manager or from one before it."""
        if roster is None or self._has_composed or not self._is_sound(roster):
            return
        is_older = self._learnt is not None and roster.key <= self._learnt
        if is_older or replace(roster, listeners=()) in self._own:
            return
        self._learnt = roster.key
        number = max(roster.number, 0 if self.roster is None else self.roster.number)
        self._issue(replace(roster, term=self.term, number=number + SKIPPED))

    def keeps(self, name: str, key: tuple[int, int] | None) -> None:
        """This one knows the roster with that key."""
        if self.roster is not None and key == self.roster.key:
            self._kept.add(name)

    def lacks(self, name: str) -> bool:
        """Whether it has to be told the newest roster, as far as is known."""
        return self.roster is not None and name in self.roster.names and name not in self._kept

    @property
    def witness(self) -> str | None:
        """The witness, from when on it and one of the agents may elect a manager."""
        roster = self.roster
        if roster is None or roster.witness is None or roster.former:
            return None
        return roster.witness.name if self._kept >= set(roster.names) else None

    def may_hold(self, names: Collection[str], more: int = 0) -> bool:
        """Whether the job may go on with these agents. `more`: places that are empty."""
        return self.roster is None or self.roster.is_half(names, more)

    def may_offer(self, name: str, others: Collection[str]) -> bool:
        """Whether this spare may be offered a place. `others`: the agents that are there."""
        return self.may_hold({name, *others}) and not self.lacks(name)

    def compose(
        self,
        ranks_per_node: int,
        voters: tuple[Voter, ...],
        spares: tuple[WaitingSpare, ...],
        listeners: tuple[str, ...],
    ) -> Roster | None:
        """The next roster; None: nothing changes, or the last one is not known to both agents.

        To be asked while the agents of both places are there. Of `spares` the witness of the last
        roster stays it; else it is the first one that may.
        """
        known = self.roster
        agents = {voter.name for voter in voters}
        former: tuple[tuple[str, ...], ...] = ()
        witness = None
        if known is not None and self._kept >= agents:
            witness = self._witness(spares)
            names = (*(voter.name for voter in voters), *([witness.name] if witness else []))
            former = self._former(known) if names != known.names else ()
        elif known is not None and agents <= set(known.names):
            return None  # they are told
        elif known is not None:
            former = (*self._former(known), *known.former)
        number = 0 if known is None else known.number
        new = Roster(self.term, number, PLACES, ranks_per_node, voters, former, listeners, witness)
        if new == known:
            return None
        self._has_composed = True
        return self._issue(replace(new, number=number + 1))

    def _is_sound(self, roster: Roster) -> bool:
        """Whether a manager before this one may have told that."""
        is_pair = roster.node_count == len(roster.voters) == PLACES
        return is_pair and roster.term <= self.term and roster.number < MAX_NUMBER

    def _former(self, known: Roster) -> tuple[tuple[str, ...], ...]:
        return (known.names,)

    def _issue(self, roster: Roster) -> Roster:
        self.roster, self._kept = roster, set()
        if not self._has_composed:
            self._own.append(replace(roster, listeners=()))
        return roster

    def _witness(self, spares: tuple[WaitingSpare, ...]) -> Witness | None:
        assert self.roster is not None
        present = None if self.roster.witness is None else self.roster.witness.name
        fit = [spare for spare in spares if spare.may_vote]
        fit.sort(key=lambda spare: spare.name != present)
        return Witness(fit[0].name, fit[0].address) if fit else None
