"""Who votes in a job of two nodes, and who may have a place there."""

from __future__ import annotations

import dataclasses

import pytest

from taskd.core.policy.election import Election, Won
from taskd.core.policy.pairs import PairElectorate, WaitingSpare
from taskd.core.votes import AskVote, Roster, Vote, Voter, Witness


class Job:
    """Two agents, spares, and what the manager keeps. All know at once what they are told."""

    def __init__(self, term: int = 0, roster: Roster | None = None) -> None:
        self.electorate = PairElectorate(term, roster)

    def compose(self, agents: str, *spares: str, kept_by: str | None = None) -> Roster | None:
        """Names of one letter; `kept_by`: those who know it; None: both agents."""
        voters = tuple(Voter(place, name, f"{name}:1") for place, name in enumerate(agents))
        waiting = tuple(WaitingSpare(name, f"{name}:1", may_vote=name != "x") for name in spares)
        roster = self.electorate.compose(1, voters, waiting, ())
        for name in agents if kept_by is None else kept_by:
            self.electorate.keeps(name, None if roster is None else roster.key)
        return roster

    def settle(self, agents: str, *spares: str) -> Roster:
        """Until nothing changes any more."""
        while self.compose(agents, *spares) is not None:
            pass
        assert self.electorate.roster is not None
        return self.electorate.roster


def groups(roster: Roster | None) -> list[str]:
    assert roster is not None
    return ["".join(roster.names), *("".join(group) for group in roster.former)]


class TestRosters:
    def test_the_first_one_has_no_witness_and_the_next_ones_do(self) -> None:
        job = Job()
        assert groups(job.compose("ab", "w")) == ["ab"]
        assert groups(job.compose("ab", "w")) == ["abw", "ab"]
        assert groups(job.compose("ab", "w")) == ["abw"]
        assert job.compose("ab", "w") is None

    def test_the_witness_counts_from_when_on_all_know_it_and_no_former_roster_does(self) -> None:
        job = Job()
        assert job.electorate.witness is None
        job.compose("ab", "w")
        job.compose("ab", "w", kept_by="abw")
        assert job.electorate.witness is None, "of the former two, one is not more than half"
        job.compose("ab", "w", kept_by="ab")
        assert job.electorate.witness is None
        job.electorate.keeps("w", job.electorate.roster.key)
        assert job.electorate.witness == "w"

    def test_while_an_agent_does_not_know_it_nothing_changes(self) -> None:
        job = Job()
        job.compose("ab", "w", kept_by="a")
        assert job.compose("ab", "w") is None
        job.electorate.keeps("b", (0, 1))
        assert groups(job.compose("ab", "w")) == ["abw", "ab"]

    def test_a_witness_that_has_a_place_makes_room_for_the_next(self) -> None:
        job = Job()
        job.settle("ab", "w", "v")
        job.electorate.keeps("w", job.electorate.roster.key)
        assert groups(job.compose("wb", "v")) == ["wbv", "abw"]
        assert groups(job.settle("wb", "v")) == ["wbv"]

    def test_who_has_come_without_a_witness_counts_beside_all_before(self) -> None:
        job = Job()
        job.settle("ab")
        assert groups(job.compose("cb", "w", kept_by="")) == ["cb", "ab"]
        assert groups(job.compose("db", "w")) == ["db", "cb", "ab"]

    def test_the_witness_stays_it_and_one_that_may_have_no_place_is_none(self) -> None:
        job = Job()
        assert job.settle("ab", "x", "w").witness == Witness("w", "w:1")
        assert job.settle("ab", "v", "w").witness == Witness("w", "w:1")
        assert job.settle("ab", "v").witness == Witness("v", "v:1")
        assert job.settle("ab", "x").witness is None

    def test_an_elected_manager_tells_the_same_under_its_own_term(self) -> None:
        known = Job().settle("ab", "w")
        roster = Job(2, known).electorate.roster
        assert roster == dataclasses.replace(known, term=2, number=known.number + 1000)


class TestPlaces:
    def test_with_a_witness_only_that_one_may_have_a_place(self) -> None:
        job = Job()
        roster = job.settle("ab", "w", "v")
        assert not job.electorate.may_offer("v", {"a"})
        assert not job.electorate.may_offer("w", {"a"}), "it does not know the roster"
        job.electorate.keeps("w", roster.key)
        assert job.electorate.may_offer("w", {"a"})
        assert job.electorate.may_hold({"w"}, 1)
        assert not job.electorate.may_hold({"v"}, 1)

    def test_without_one_anybody_may_beside_one_that_was_there(self) -> None:
        job = Job()
        assert job.electorate.may_hold({"c", "d"}), "nobody knows anything yet"
        job.settle("ab")
        assert job.electorate.may_offer("c", {"a"})
        assert not job.electorate.may_offer("c", {"d"})


class TestAManagerThatBeginsAnew:
    def test_it_goes_on_from_the_newest_roster_that_it_is_told(self) -> None:
        older = Job().settle("ab", "w")
        newer = dataclasses.replace(older, number=7, witness=Witness("v", "v:1"))
        one = PairElectorate()
        one.learn(None)
        one.learn(older)
        one.learn(newer)
        assert one.roster == dataclasses.replace(newer, number=2003)
        assert one.lacks("v")
        one.learn(older)
        one.learn(dataclasses.replace(older, number=1003))  # its own, from who had not heard more
        assert one.roster.number == 2003

    def test_what_it_has_composed_since_is_newer_than_all(self) -> None:
        job = Job()
        known = job.settle("ab", "w")
        job.electorate.learn(dataclasses.replace(known, number=90))
        assert job.electorate.roster == known

    @pytest.mark.parametrize("changed", [
        {"term": 1}, {"node_count": 3}, {"number": 1 << 60}, {"voters": ()},
    ])  # fmt: skip
    def test_what_no_manager_before_it_can_have_told_is_left_alone(
        self, changed: dict[str, object]
    ) -> None:
        one = PairElectorate()
        one.learn(dataclasses.replace(Job().settle("ab", "w"), **changed))
        assert one.roster is None


class TestTheWitness:
    def voter(self, name: str) -> Election:
        one = Election(name)
        one.obey("m:1", 0)
        assert one.keep(Job().settle("ab", "w"))
        one.miss(10.0)
        return one

    def test_it_gives_its_vote_and_asks_for_none(self) -> None:
        node, witness = self.voter("b"), self.voter("w")
        assert witness.next_deadline is None
        assert node.next_deadline is not None
        ask = node.turn(node.next_deadline)
        assert ask is not None
        ask = node.take_vote("w", witness.take_ask("b", ask, 10.3), 10.3)
        assert ask == AskVote(1, is_trial=False, roster_term=0, roster_number=3)
        won = node.take_vote("w", witness.take_ask("b", ask, 10.3), 10.3)
        assert (won.names, won.node_ranks) == (("b", "w"), (1,))
        assert witness.next_deadline is None
        assert not witness.may_obey(0)

    def test_it_tells_a_candidate_the_newer_roster_that_it_knows(self) -> None:
        """It is the only one that the candidate can have a vote of, and cannot ask itself."""
        node, witness = self.voter("b"), self.voter("w")
        newer = dataclasses.replace(node.roster, number=9, listeners=("c:1",))
        assert witness.keep(newer)
        trial = node.turn(20.0)
        answer = witness.take_ask("b", trial, 20.0)
        assert not answer.is_given
        assert answer.roster == dataclasses.replace(newer, listeners=())
        assert node.take_vote("w", answer, 20.0) is None
        trial = node.turn(30.0)
        assert (trial.term, trial.roster_number) == (1, 9)
        assert witness.take_ask("b", trial, 30.0) == Vote(1, is_trial=True, is_given=True)

    def test_what_cannot_be_its_roster_changes_nothing(self) -> None:
        """An older one, one without the candidate, one of another witness, one without numbers."""
        node = self.voter("b")
        known = node.roster
        for told in (
            dataclasses.replace(known, number=known.number - 1),
            dataclasses.replace(known, number=9, voters=known.voters[:1]),
            dataclasses.replace(known, number=9, witness=Witness("v", "v:1")),
            dataclasses.replace(known, number=9, witness=None),
            dataclasses.replace(known, number=1 << 52),
        ):
            node.take_vote("w", Vote(1, is_trial=True, is_given=False, roster=told), 20.0)
            assert node.roster is known

    def test_one_that_hears_its_manager_takes_no_roster_from_others(self) -> None:
        node = self.voter("b")
        known = node.roster
        node.obey("m:1", 0)
        told = dataclasses.replace(known, number=9)
        node.take_vote("w", Vote(1, is_trial=True, is_given=False, roster=told), 20.0)
        assert node.roster is known

    def test_a_witness_that_voted_for_a_node_that_is_lost_votes_for_the_other_one(self) -> None:
        lost, node, witness = self.voter("a"), self.voter("b"), self.voter("w")
        trial = lost.turn(20.0)
        ask = lost.take_vote("w", witness.take_ask("a", trial, 20.0), 20.0)
        assert witness.take_ask("a", ask, 20.0).is_given
        now, won = 20.0, None
        while not isinstance(won, Won):
            now = node.next_deadline
            assert now < 30.0, "the witness waits 5 s for the manager that is lost"
            answer = witness.take_ask("b", node.turn(now), now)
            ask = node.take_vote("w", answer, now)
            if ask is not None:
                won = node.take_vote("w", witness.take_ask("b", ask, now), now)
        assert won.term == 2

    def test_who_is_no_voter_any_more_stops_to_ask(self) -> None:
        node = self.voter("b")
        node.roster = dataclasses.replace(node.roster, witness=None)
        assert node.turn(20.0) is None
        assert node.next_deadline is None
