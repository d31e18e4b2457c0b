"""Who goes on when the manager's host is lost: the agents elect the node where the next one starts.

Voters are the agents of the first 99 places of a job (a *roster*, which the manager tells them); in
a job of two nodes a spare, too, under rules of its own: `taskd.core.policy.pairs`.
One that misses its manager asks the others, and starts the next one if a *quorum* agrees, more than
half of the roster. All others have no vote; they are told where the manager is.

Two managers never bring the same job on, whatever is slow, lost or cut off. No clock is needed for
that, because

1. a voter obeys one manager at a time, and none of an older term than it has voted for;
2. training goes on after a recovery only when the agents of *all* places obey the same manager;
3. a manager replaces agents only while at least half of the roster is there (`is_half`), so that
   the others cannot elect, and while half of it obeys nobody else can be elected either;
4. when agents have been replaced, those of the former roster count beside the next one, which needs
   both quorums, until all have it: by then whoever knows only the former one is less than a quorum;
5. a manager that was started again goes on from the newest roster that its agents know: it begins
   only with agents that are more than half of that one, and replaces nobody before it has heard so
   many. If all of a newer one had it, half of those of the older one would be among them (3), and
   one of the two halves would have said so. An elected one is told by the agent that starts it,
   which is in each of its rosters.

A manager that starts with the job is one of half of the roster, too: of two nodes, or of two halves
of four, its side goes on, and the other one waits and ends when its time is over.

The terms are those of Raft (Ongaro and Ousterhout, 2014); a trial is its pre-vote. There is no log:
agents tell a new manager all that it has to know. A voter that refuses says the term that it has
promised, and a witness its roster if it is newer, so that the candidate gets the vote next time.
Knows no connection and no clock.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from taskd.core.votes import MAX_NUMBER, SKIPPED, AskVote, Elected, Roster, Vote, Voter

_RETRY_S = 0.25  # a round of votes takes a round trip
_PATIENCE_S = 0.5  # for the votes, the first time
_START_S = 5.0  # a manager that was elected has to be there, the first time
_MOST_START_S = 80.0
_STEP_S = 0.15  # between two who would ask in the same moment: the next in order comes first
MAX_VOTERS = 99  # more would not make it any safer
MIN_VOTERS = 3  # of two, none is more than half


@dataclass(frozen=True, slots=True)
class Won:
    """This voter is to start the manager of `term`, elected by those of `roster` in `names`."""

    term: int
    roster: Roster
    names: tuple[str, ...]

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Of those who gave their vote."""
        return tuple(one.node_rank for one in self.roster.voters if one.name in self.names)

    def again(self, known: Roster | None) -> "Won":
        """For the manager of this term that is started again by the agent that knows this roster.

        Of a job of two nodes it is told that by its agents (`taskd.core.policy.pairs`).
        """
        if len(self.roster.voters) < MIN_VOTERS:
            return self
        newest = self.roster if known is None or known.key < self.roster.key else known
        number = max(self.roster.number, newest.number) + SKIPPED
        return replace(self, roster=replace(newest, term=self.term, number=number))


@dataclass(slots=True)
class _Round:
    """What this voter has asked all others, and who has said yes."""

    term: int
    given: set[str]


class Election:
    """One voter: it asks the others when its manager is missing, and is asked by them.

    `turn` says what to ask of all others; `take_...` takes in what one of them said.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.roster: Roster | None = None
        self.term = 0  # of the manager that it obeys, or obeyed last
        self.promised = 0  # the newest term that it has given its vote in
        self.next_deadline: float | None = None  # when `turn` has something to do
        self._address = ""  # of that manager
        self._is_missed = True
        self._waits_until = 0.0  # for a manager that is being started
        self._holds_until = 0.0  # at most, if it is started here
        # Both twice as long each time: the votes of another may have come between, and a host
        # under load may take longer to start a manager.
        self._patience_s, self._start_s = _PATIENCE_S, _START_S
        self._heard = 0  # the newest term that another voter has promised
        self._addresses: dict[str, str] = {}  # of the voters of the roster and of former ones
        self._trial: _Round | None = None  # the last one, if it is open
        # Open until this voter promises anything newer: who has given it a vote gives no other one
        # for seconds, and a message may take longer than the time to the next trial.
        self._candidacy: _Round | None = None

    @property
    def can_elect(self) -> bool:
        """Whether there are enough to elect a manager."""
        return self.roster is not None and len(self.roster.names) >= MIN_VOTERS

    @property
    def may_ask(self) -> bool:
        """Whether it may be elected. A witness has a vote, and no place to start a manager in."""
        return self.can_elect and not self._is_witness

    def may_obey(self, term: int) -> bool:
        """Whether it has not voted for, or obeyed, a later manager."""
        return term >= max(self.promised, self.term)

    def obey(self, address: str, term: int) -> None:
        """The manager of this term has accepted the agent."""
        self._address, self.term, self.promised = address, term, max(term, self.promised)
        self._is_missed, self.next_deadline, self._waits_until = False, None, 0.0
        self._trial = self._candidacy = None
        self._patience_s, self._start_s = _PATIENCE_S, _START_S

    def hold(self, now: float) -> None:
        """The manager that this voter was elected for is being started: it asks for no other yet.

        However long that takes, within reason. It gives its vote to others as ever.
        """
        if self.next_deadline is not None and self.next_deadline <= now < self._holds_until:
            self.next_deadline = now + _START_S

    def begun(self, term: int, now: float) -> None:
        """The manager of this term, which was elected here, listens: it has time to answer."""
        if self._is_missed and term == self.promised:
            self._trial = None
            self._wait(now)

    def miss(self, now: float) -> None:
        """The manager has been silent for too long."""
        self._is_missed = True
        if self.may_ask:
            self.next_deadline = now + self._order * _STEP_S

    def keep(self, roster: Roster) -> bool:
        """The manager tells who votes. Whether that is from now on what this voter knows."""
        is_newer = self.roster is None or roster.key >= self.roster.key
        if not is_newer or self.name not in roster.names or not self.may_obey(roster.term):
            return False
        self._know(roster)
        return True

    @property
    def others(self) -> dict[str, str]:
        """Where to ask whom, by name: the voters of the roster, and of former ones that count."""
        return {name: where for name, where in self._addresses.items() if name != self.name}

    def turn(self, now: float) -> AskVote | None:
        """What to ask all others now, if it is time."""
        if self.next_deadline is None or now < self.next_deadline:
            return None
        if not self.may_ask:
            self.next_deadline = None
            return None
        self.next_deadline = now + _RETRY_S + self._order * _STEP_S
        return self._ask(is_trial=True)

    def take_ask(self, candidate: str, ask: AskVote, now: float) -> Vote:
        """The answer to another one that would start a manager."""
        is_given = self._would_give(candidate, ask, now)
        if is_given and not ask.is_trial:
            self.promised = ask.term
            self._trial = self._candidacy = None
            self._wait(now)
        told = (max(self.promised, self.term), self._newer_than(ask))
        if self._is_missed:
            return Vote(ask.term, ask.is_trial, is_given, "", 0, *told)
        return Vote(ask.term, ask.is_trial, is_given, self._address, self.term, *told)

    def take_vote(self, name: str, vote: Vote, now: float) -> AskVote | Elected | Won | None:
        """What follows from it: the next question to all, whom to obey, or that this one won."""
        if self._is_missed and vote.manager and self.may_obey(vote.manager_term):
            return Elected(vote.manager_term, vote.manager)
        self._catch_up(name, vote)
        asked = self._trial if vote.is_trial else self._candidacy
        if asked is None or self.roster is None or vote.term != asked.term or not vote.is_given:
            return None
        asked.given.add(name)
        if not self.roster.is_quorum(asked.given):
            return None
        self._trial = self._candidacy = None
        if vote.is_trial:
            self.next_deadline = now + self._patience_s
            self._patience_s = min(2 * self._patience_s, _START_S)
            return self._ask(is_trial=False)
        self._wait(now)
        self._holds_until = now + _MOST_START_S
        return Won(asked.term, self.roster, tuple(sorted(asked.given)))

    def knows(self, name: str) -> bool:
        """Whether this is a voter of its roster, or was one of the former."""
        return self.roster is not None and any(name in group for group in self.roster.groups)

    def follows(self, elected: Elected) -> bool:
        """Whether to obey that manager from now on, instead of another or none."""
        has_moved = elected.term == self.term and elected.address != self._address
        is_other = elected.term > self.term or (has_moved and self._is_missed)
        return is_other and self.may_obey(elected.term)

    @property
    def _is_witness(self) -> bool:
        witness = None if self.roster is None else self.roster.witness
        return witness is not None and witness.name == self.name

    @property
    def _order(self) -> int:
        assert self.roster is not None
        return self.roster.names.index(self.name)

    def _ask(self, *, is_trial: bool) -> AskVote:
        assert self.roster is not None
        begun = _Round(max(self.promised, self.term, self._heard) + 1, {self.name})
        if is_trial:
            self._trial = begun
        else:
            self._candidacy, self.promised = begun, begun.term  # its own vote
        return AskVote(begun.term, is_trial, *self.roster.key)

    def _wait(self, now: float) -> None:
        """A manager is being started."""
        self._waits_until = now + self._start_s
        self._start_s = min(2 * self._start_s, _MOST_START_S)
        if self.may_ask:
            self.next_deadline = self._waits_until + self._order * _STEP_S

    def _would_give(self, candidate: str, ask: AskVote, now: float) -> bool:
        if not self._is_missed or self.roster is None or now < self._waits_until:
            return False
        is_known = (ask.roster_term, ask.roster_number) >= self.roster.key
        return self.knows(candidate) and is_known and ask.term > max(self.promised, self.term)

    def _newer_than(self, ask: AskVote) -> Roster | None:
        """What the candidate has to know for the vote of a witness, which cannot ask itself."""
        if self.roster is None or not self._is_witness:
            return None
        is_newer = self.roster.key > (ask.roster_term, ask.roster_number)
        return replace(self.roster, listeners=()) if is_newer else None

    def _catch_up(self, name: str, vote: Vote) -> None:
        """With a voter that may have refused because it has promised more, or knows more."""
        if vote.promised < MAX_NUMBER:
            self._heard = max(self._heard, vote.promised)
        known, told = self.roster, vote.roster
        if known is None or told is None or told.witness is None or not self._is_missed:
            return
        is_newer = told.key > known.key and max(told.key) < MAX_NUMBER
        if is_newer and told.witness.name == name and self.name in told.names:
            self._know(told)

    def _know(self, roster: Roster) -> None:
        self.roster = roster
        known = self._addresses | roster.addresses
        self._addresses = {name: known[name] for name in known if self.knows(name)}


class Electorate:
    """The manager's side: who votes, and whether it may replace an agent that is lost.

    One that begins without an election may have been started again. Then agents may have a newer
    roster than those that have told it theirs, until it is sure that none counts.
    """

    def __init__(self, term: int = 0, roster: Roster | None = None) -> None:
        """`roster`: that of the election in which this manager was elected, or a newer one."""
        self.term = term
        self.roster = roster  # the newest that it has told, or goes on from
        self._number = 0 if roster is None else roster.number  # the next one has a larger one
        self._has_composed = False
        self._kept: set[str] = set()  # by whom the roster is kept
        self._heard: set[str] = set()  # who has told what it knew
        self._first: set[str] = set()  # of these, who began with the job and knew no roster
        self._place_count = 0
        self._has_no_votes = False  # there has never been a roster
        self._is_sure = roster is not None  # those who have elected it know none that is newer

    def learn(
        self,
        name: str,
        roster: Roster | None,
        place_count: int,
        *,
        is_first: bool = False,
        has_vote: bool = True,
    ) -> None:
        """An agent knows this roster, from this manager or one before it. None: it knows none.

        `place_count`: of those that have a vote. `is_first`: it began with the job. `has_vote`: it
        can be asked; one that cannot has never been in a roster.
        """
        self._place_count = place_count
        if roster is None:
            self._heard.add(name)
            if is_first:
                self._first.add(name)
                self._has_no_votes = self._has_no_votes or not has_vote
        elif name in roster.names and self._is_sound(roster):
            self._heard.add(name)
            if self.roster is None or roster.key > self.roster.key:
                self._go_on_from(roster)
            if self.roster is not None and _same(roster, self.roster):
                self._kept.add(name)

    def compose(
        self,
        node_count: int,
        ranks_per_node: int,
        voters: tuple[Voter, ...],
        listeners: tuple[str, ...],
    ) -> Roster | None:
        """The next roster, for all of `voters`; None: they have been told.

        To be asked while the agents of all places are there. Who is lost stays a voter until then.
        """
        known = self.roster
        former: tuple[tuple[str, ...], ...] = ()
        if known is not None and known.names != tuple(voter.name for voter in voters):
            former = (known.names, *known.former)
        elif known is not None and not self._kept >= set(known.names):
            former = known.former
        number = 0 if known is None else known.number
        new = Roster(self.term, number, node_count, ranks_per_node, voters, former, listeners)
        if self._has_composed and new == known:
            return None
        self._number, self._has_composed = self._number + 1, True
        self.roster, self._kept = replace(new, number=self._number), set()
        return self.roster

    def keeps(self, name: str, number: int) -> None:
        """A voter has told that it has the roster of this number."""
        if self.roster is not None and self.roster.key == (self.term, number):
            self._kept.add(name)

    def lacks(self, name: str) -> bool:
        """Whether it has to be told the roster, as far as is known."""
        is_named = self.roster is not None and name in self.roster.names
        return is_named and self._has_composed and name not in self._kept

    def settle(self) -> None:
        """The agents of all places were there at once: nobody else can have them."""
        self._is_sure = True

    def may_begin(self, names: Collection[str], more: int) -> bool:
        """Whether these may be agents of this manager together. `more`: places that are empty."""
        roster = self.roster
        if self._is_sure or roster is None or len(roster.voters) < MIN_VOTERS:
            return True
        present = sum(name in names for name in roster.names)
        return 2 * (present + more) > len(roster.names) and roster.is_half(names, more)

    @property
    def is_settled(self) -> bool:
        """Whether `may_begin` has nothing to say any more."""
        return self._is_sure

    @property
    def is_sure(self) -> bool:
        """Whether nobody has a newer roster that counts."""
        if self._is_sure or not self._place_count:
            return True
        if self.roster is None:
            return self._has_no_votes or 2 * len(self._first) > self._place_count
        heard = sum(name in self._heard for name in self.roster.names)
        return 2 * heard > len(self.roster.names)

    def may_replace(self, present: Collection[str]) -> bool:
        """Whether nobody else could be elected, if these are the voters that are there."""
        if self.roster is None:
            return self.is_sure
        if len(self.roster.voters) < MIN_VOTERS:
            return True
        return self.is_sure and self.roster.is_half(present)

    def _is_sound(self, roster: Roster) -> bool:
        """Whether a manager before this one may have told that."""
        is_whole = len(roster.voters) == self._place_count and roster.witness is None
        return is_whole and roster.term <= self.term and roster.number < MAX_NUMBER

    def _go_on_from(self, roster: Roster) -> None:
        """One of an earlier life of this manager, or of one before it."""
        self._number = max(self._number, roster.number) + SKIPPED
        if self.roster is not None and self._has_composed:  # those of its own count beside it
            former = (*roster.former, self.roster.names, *self.roster.former)
            roster = replace(roster, term=self.term, number=self._number, former=former)
        self.roster, self._kept = roster, set()


def _same(one: Roster, other: Roster) -> bool:
    """Whether these are the same roster, but for addresses."""
    return (one.key, one.names, one.former) == (other.key, other.names, other.former)
