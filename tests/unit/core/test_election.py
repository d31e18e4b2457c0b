"""Who votes for whom; what the elected manager makes of those who do not come."""

from __future__ import annotations

import dataclasses
import random

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.phase import JobPhase
from taskd.core.policy.election import MAX_VOTERS, Election, Won
from taskd.core.votes import AskVote, Elected, Roster, Vote, Voter
from taskd.wire import codec, translate
from tests.unit.core.answers import kinds, only, plan
from tests.unit.core.test_meeting import Job

NAMES = ("a", "b", "c")


def roster(number: int = 1, names: tuple[str, ...] = NAMES, term: int = 0, **more) -> Roster:
    voters = tuple(Voter(rank, name, f"{name[:20]}:1") for rank, name in enumerate(names))
    return Roster(term, number, len(names), 2, voters, **more)


def voter(name: str, *, misses: bool = True, known: Roster | None = None) -> Election:
    """One that obeyed the manager at m:1 and has missed it since."""
    one = Election(name)
    one.obey("m:1", 0)
    assert one.keep(known or roster())
    if misses:
        one.miss(10.0)
    return one


def first_ask(one: Election) -> AskVote:
    assert one.next_deadline is not None
    ask = one.turn(one.next_deadline)
    assert ask is not None
    return ask


def simulate(chance: random.Random, most_s: float) -> list[tuple[float, Won]]:
    """What comes within a minute of three voters whose messages take up to `most_s` each.

    Who was elected, and when; no manager ever answers.
    """
    voters = {name: voter(name) for name in NAMES}
    wins: list[tuple[float, Won]] = []
    coming: list[tuple[float, str, str, AskVote | Vote]] = []
    now = 0.0
    while now < 60.0:
        due = [(one.next_deadline, name) for name, one in voters.items() if one.next_deadline]
        asks: list[tuple[str, AskVote]] = []
        if coming and (not due or min(coming)[0] < min(due)[0]):
            coming.sort(key=lambda message: message[0])
            now, source, target, message = coming.pop(0)
            if isinstance(message, AskVote):
                answer = voters[target].take_ask(source, message, now)
                coming.append((now + chance.uniform(0, most_s), target, source, answer))
            else:
                outcome = voters[target].take_vote(source, message, now)
                if isinstance(outcome, AskVote):
                    asks.append((target, outcome))
                elif isinstance(outcome, Won):
                    wins.append((now, outcome))
        else:
            now, name = min(due)
            asked = voters[name].turn(now)
            asks += [] if asked is None else [(name, asked)]
        coming += [
            (now + chance.uniform(0, most_s), source, target, ask)
            for source, ask in asks
            for target in NAMES
            if target != source
        ]
    return wins


class TestVoters:
    def test_two_of_three_elect(self) -> None:
        candidate, other = voter("b"), voter("c")
        trial = first_ask(candidate)
        assert (trial.term, trial.is_trial) == (1, True)
        ask = candidate.take_vote("c", other.take_ask("b", trial, 10.3), 10.3)
        assert ask == AskVote(1, is_trial=False, roster_term=0, roster_number=1)
        won = candidate.take_vote("c", other.take_ask("b", ask, 10.3), 10.3)
        assert won == Won(1, roster(), ("b", "c"))
        assert won.node_ranks == (1, 2)
        assert not other.may_obey(0), "the manager that both have missed may come back"
        assert other.follows(Elected(1, "b:2"))

    def test_the_first_place_asks_first(self) -> None:
        deadlines = [voter(name).next_deadline for name in NAMES]
        assert deadlines == sorted(set(deadlines))

    def test_who_hears_the_manager_gives_no_vote_and_says_where_it_is(self) -> None:
        vote = voter("c", misses=False).take_ask("b", first_ask(voter("b")), 10.3)
        assert vote == Vote(1, is_trial=True, is_given=False, manager="m:1", manager_term=0)

    def test_who_is_told_where_a_newer_manager_is_goes_there(self) -> None:
        lost, told = voter("b"), Vote(1, is_trial=True, is_given=False, manager="n:1",
                                      manager_term=4)  # fmt: skip
        found = lost.take_vote("c", told, 10.3)
        assert found == Elected(4, "n:1")
        assert lost.follows(found)
        lost.obey("n:1", 4)
        assert not lost.follows(Elected(4, "n:1"))
        assert not lost.follows(Elected(3, "o:1"))

    def test_a_manager_of_the_same_term_may_have_another_port(self) -> None:
        """It was started again, and its port was taken."""
        one = voter("b", misses=False)
        assert not one.follows(Elected(0, "m:2"))
        one.miss(10.0)
        assert one.follows(Elected(0, "m:2"))
        assert not one.follows(Elected(0, "m:1"))

    def test_one_vote_in_a_term(self) -> None:
        one, ask = voter("c"), AskVote(1, is_trial=False, roster_term=0, roster_number=1)
        assert one.take_ask("b", ask, 10.0).is_given
        assert not one.take_ask("a", ask, 10.0).is_given

    def test_a_manager_that_was_elected_has_time_to_start(self) -> None:
        """Else the next candidate would have all votes before the first manager listens."""
        one, ask = voter("c"), AskVote(1, is_trial=False, roster_term=0, roster_number=1)
        one.take_ask("b", ask, 10.0)
        later = dataclasses.replace(ask, term=2)
        assert not one.take_ask("a", later, 12.0).is_given
        assert one.take_ask("a", later, 16.0).is_given

    def test_a_trial_binds_nobody(self) -> None:
        one, trial = voter("c"), AskVote(1, is_trial=True, roster_term=0, roster_number=1)
        assert one.take_ask("b", trial, 10.0).is_given
        assert one.may_obey(0)

    @pytest.mark.parametrize(("candidate", "number"), [("stranger", 2), ("b", 1)])
    def test_strangers_and_who_knows_an_older_roster_get_no_vote(
        self, candidate: str, number: int
    ) -> None:
        one = voter("c", known=roster(2))
        ask = AskVote(1, is_trial=True, roster_term=0, roster_number=number)
        assert not one.take_ask(candidate, ask, 10.0).is_given

    def test_a_late_vote_of_another_round_counts_nothing(self) -> None:
        candidate = voter("b")
        trial = first_ask(candidate)
        for vote in (Vote(trial.term, False, True), Vote(trial.term + 1, True, True)):
            assert candidate.take_vote("c", vote, 10.3) is None

    def test_a_vote_that_comes_after_the_next_trial_has_begun_counts(self) -> None:
        """Who has given it gives no other one before the manager has had time to start."""
        candidate, other = voter("b"), voter("c")
        ask = candidate.take_vote("c", other.take_ask("b", first_ask(candidate), 10.3), 10.3)
        assert isinstance(ask, AskVote)
        vote = other.take_ask("b", ask, 10.5)
        trial = first_ask(candidate)
        assert (trial.term, trial.is_trial) == (2, True)
        assert not other.take_ask("b", trial, 11.0).is_given
        assert candidate.take_vote("c", vote, 12.0) == Won(1, roster(), ("b", "c"))
        assert candidate.take_vote("a", vote, 12.1) is None, "it has won already"

    def test_a_vote_counts_nothing_once_the_candidate_has_given_its_own_to_another(self) -> None:
        candidate, other = voter("b"), voter("c")
        ask = candidate.take_vote("c", other.take_ask("b", first_ask(candidate), 10.3), 10.3)
        assert isinstance(ask, AskVote)
        vote = other.take_ask("b", ask, 10.5)
        assert candidate.take_ask("a", dataclasses.replace(ask, term=2), 10.6).is_given
        assert candidate.take_vote("c", vote, 10.7) is None

    @pytest.mark.parametrize("seed", range(20))
    @pytest.mark.parametrize("most_s", [0.05, 0.3, 1.0, 2.0])
    def test_one_is_elected_however_long_a_vote_takes(self, most_s: float, seed: int) -> None:
        """Each message up to so long, in any order; once in each term at most."""
        wins = simulate(random.Random(seed), most_s)
        assert wins
        assert len({won.term for _, won in wins}) == len(wins)
        assert wins[0][0] < 25.0, "15 s after they have missed their manager"

    def test_who_knows_more_and_who_has_promised_more_elect_together(self) -> None:
        """One has voted for somebody who is lost; the other was told a newer roster."""
        one, other = voter("b", known=roster(2)), voter("c")
        assert other.take_ask("a", dataclasses.replace(first_ask(voter("a")), term=5,
                                                       is_trial=False), 10.0).is_given  # fmt: skip
        trial = first_ask(one)
        assert one.take_vote("c", other.take_ask("b", trial, 16.0), 16.0) is None
        trial = first_ask(one)
        assert trial.term == 6
        ask = one.take_vote("c", other.take_ask("b", trial, 16.3), 16.3)
        assert isinstance(one.take_vote("c", other.take_ask("b", ask, 16.3), 16.3), Won)

    @pytest.mark.parametrize("promised", [1 << 52, (1 << 64) - 1])
    def test_a_term_behind_which_there_are_none_left_is_not_believed(self, promised: int) -> None:
        one = voter("b")
        one.take_vote("c", Vote(1, is_trial=True, is_given=False, promised=promised), 10.0)
        assert first_ask(one).term == 1

    def test_whoever_voted_in_the_former_roster_is_asked_too(self) -> None:
        one = voter("b")
        assert one.keep(roster(2, ("d", "b", "c"), former=(NAMES,)))
        assert one.others == {"a": "a:1", "c": "c:1", "d": "d:1"}
        assert one.keep(roster(3, ("d", "b", "c")))
        assert one.others == {"c": "c:1", "d": "d:1"}

    def test_who_is_starting_a_manager_asks_for_no_other_for_80_s_and_votes_after_5(self) -> None:
        one, other = voter("b"), voter("c")
        ask = one.take_vote("c", other.take_ask("b", first_ask(one), 10.0), 10.0)
        assert isinstance(one.take_vote("c", other.take_ask("b", ask, 10.0), 10.0), Won)
        now = 10.0
        while now < 89.9:
            now = one.next_deadline
            one.hold(now)
            if one.next_deadline <= now:
                break
            assert one.turn(now) is None
        assert 85.0 <= now <= 95.0
        later = AskVote(2, is_trial=True, roster_term=0, roster_number=1)
        assert one.take_ask("a", later, 15.5).is_given
        assert one.turn(now) is not None

    def test_a_manager_that_listens_has_time_to_answer(self) -> None:
        """Its own agent does not ask for the next one in the moment when it has started."""
        one, other = voter("b"), voter("c")
        ask = one.take_vote("c", other.take_ask("b", first_ask(one), 10.3), 10.3)
        won = one.take_vote("c", other.take_ask("b", ask, 10.3), 10.3)
        assert isinstance(won, Won)
        trial = one.turn(15.6)
        assert trial is not None
        one.begun(won.term, 15.7)
        assert one.take_vote("c", other.take_ask("b", trial, 15.8), 15.8) is None
        assert one.turn(20.0) is None

    def test_what_listens_after_its_agent_has_voted_for_another_has_none(self) -> None:
        one = voter("b")
        deadline = one.next_deadline
        one.begun(1, 10.0)
        assert one.next_deadline == deadline

    def test_each_manager_that_is_elected_has_longer_to_start(self) -> None:
        """Up to 80 s; until one has answered."""
        one, now = voter("c"), 10.0
        waits = []
        for term in range(1, 7):
            ask = AskVote(term, is_trial=False, roster_term=0, roster_number=1)
            assert one.take_ask("b", ask, now).is_given
            begun = now
            later = AskVote(term + 1, is_trial=True, roster_term=0, roster_number=1)
            while not one.take_ask("b", later, now).is_given:
                now += 0.5
            waits.append(now - begun)
        assert waits == [5.0, 10.0, 20.0, 40.0, 80.0, 80.0]
        one.obey("b:1", 6)
        one.miss(now)
        assert one.take_ask("b", AskVote(7, is_trial=False, roster_term=0, roster_number=1), now)
        assert one.take_ask(
            "b", AskVote(8, is_trial=True, roster_term=0, roster_number=1), now + 5.0
        ).is_given

    def test_an_older_roster_or_one_without_it_is_not_kept(self) -> None:
        one = voter("b", known=roster(5))
        assert not one.keep(roster(4))
        assert not one.keep(roster(6, ("a", "c", "d")))
        assert one.keep(roster(6))

    def test_of_two_voters_nobody_asks(self) -> None:
        one = voter("b", known=roster(1, ("a", "b")))
        assert one.next_deadline is None

    def test_while_voters_are_exchanged_both_rosters_have_to_agree(self) -> None:
        joint = roster(2, ("a", "d", "e"), former=(("a", "b", "c"),))
        assert not joint.is_quorum({"d", "e"})
        assert not joint.is_quorum({"a", "b"})
        assert joint.is_quorum({"a", "b", "d"})


class TestTheElectedManager:
    """Of a job of three nodes of one rank; node 0 was lost with the manager."""

    def elected(self) -> Job:
        job = Job()
        job.send(ev.ManagerElected, 3, 1, (1, 2))
        return job

    def test_a_node_that_does_not_come_is_lost_and_waited_for(self) -> None:
        job = self.elected()
        assert job.register(1) == []
        assert job.register(2) == []
        assert job.machine.phase is JobPhase.JOINING
        job.now += 3.1  # the heartbeats that it should have sent
        said = job.send(ev.Tick)
        assert job.machine.lost_nodes == [0]
        assert only(said, do.Interrupt).generation == 1
        for rank in (1, 2):
            job.pause(rank)
        resume = only(job.replace(0), do.Resume)
        assert resume.version == 5
        assert plan(resume) == {0: 1}
        assert resume.store == "agent 1:1"

    @pytest.mark.parametrize("known", [((0, "first"), (1, "agent 1")), ()])
    def test_it_names_the_agent_that_the_roster_has_in_the_place(
        self, known: tuple[tuple[int, str], ...]
    ) -> None:
        """One on the same host may have its node memory."""
        job = Job()
        job.send(ev.ManagerElected, 3, 1, (1, 2), known)
        job.register(1), job.register(2)
        job.now += 3.1
        job.send(ev.Tick)
        said = job.register(0, agent="another", state="lost", is_late=True)
        assert only(said, do.ReplaceWorker).former_agent == dict(known).get(0, "")

    @pytest.mark.parametrize("generation", [0, 3], ids=["first lives", "after recoveries"])
    def test_a_node_that_was_only_cut_off_keeps_its_processes(self, generation: int) -> None:
        """The manager knows it from the roster alone; what its ranks are, it says itself."""
        job = Job()
        agents = tuple((node, f"agent {node}") for node in range(3))
        job.send(ev.ManagerElected, 3, 1, (1, 2), agents)
        job.register(1, generation=generation), job.register(2, generation=generation)
        job.now += 3.1
        (interrupt,) = job.send(ev.Tick)
        job.pause(1), job.pause(2)
        (repeated,) = job.register(0, generation=generation)
        assert (repeated.node_rank, repeated.order) == (0, interrupt)
        assert job.machine.lost_nodes == []
        resume = only(job.pause(0), do.Resume)
        assert (resume.version, resume.moves) == (5, ())

    def test_of_what_has_died_there_meanwhile_alone_there_is_another(self) -> None:
        job = Job()
        job.send(ev.ManagerElected, 3, 1, (1, 2), ((0, "agent 0"),))
        job.register(1), job.register(2)
        job.now += 3.1
        job.send(ev.Tick)
        order = only(job.register(0, state="lost"), do.ReplaceWorker)
        assert (order.rank, order.incarnation, order.former_agent) == (0, 1, "")

    @pytest.mark.parametrize("node_rank", [None, 0, 2])
    def test_who_asks_before_the_agents_have_come_is_late(self, node_rank: int | None) -> None:
        """The job runs; and node 0, where the others have met, may be lost with the manager."""
        job = self.elected()
        assert job.machine.is_late(node_rank)

    def test_with_an_index_it_meets_the_others_as_soon_as_node_0_has_come(self) -> None:
        job = self.elected()
        job.register(0)
        assert not job.machine.is_late(2)
        assert job.machine.is_late(None)

    def test_two_that_do_not_come_are_one_loss_each(self) -> None:
        """Their time is over in the same moment."""
        job = Job(nodes=5, able=(1, 2, 3))
        job.send(ev.ManagerElected, 5, 1, (1, 2, 3))
        for node in (1, 2, 3):
            job.register(node)
        job.now += 3.1
        said = job.send(ev.Tick)
        assert job.machine.lost_nodes == [0, 4]
        assert only(said, do.Interrupt).generation == 1
        assert job.machine.restarts_used == 2

    def test_all_come_and_nothing_happens(self) -> None:
        job = self.elected()
        for node in range(3):
            assert job.register(node) == []
        assert job.machine.phase is JobPhase.RUNNING
        job.now += 5.0
        assert job.send(ev.Tick) == []

    def test_one_that_comes_late_is_no_less_there(self) -> None:
        """Nobody is given up before all others are there."""
        job = self.elected()
        job.register(1)
        job.now += 3.1
        assert job.send(ev.Tick) == []
        job.register(0)
        job.register(2)
        assert job.machine.phase is JobPhase.RUNNING
        assert job.machine.lost_nodes == []

    def test_the_last_one_that_comes_ends_the_wait(self) -> None:
        job = self.elected()
        job.register(1)
        job.now += 3.1
        job.send(ev.Tick)
        assert only(job.register(2), do.Interrupt).generation == 1
        assert job.machine.lost_nodes == [0]

    def test_one_that_says_goodbye_is_not_missed(self) -> None:
        job = self.elected()
        job.register(1)
        job.register(2)
        job.send(ev.AgentLeft, 0, "succeeded", "")
        assert job.machine.phase is JobPhase.RUNNING
        assert job.machine.lost_nodes == []

    def test_a_voter_has_a_whole_lease(self) -> None:
        job = self.elected()
        job.register(0)
        job.register(1)
        job.now += 10.0
        job.send(ev.AgentHeard, 0)
        job.send(ev.AgentHeard, 1)
        assert kinds(job.send(ev.Tick)) == []
        assert job.machine.phase is JobPhase.JOINING


def test_a_roster_of_the_largest_job_fits_into_a_message() -> None:
    names = tuple(f"{rank:032}" for rank in range(MAX_VOTERS))
    others = tuple(f"[2001:db8:0:0:0:0:1:{rank:x}]:54321" for rank in range(4096 - MAX_VOTERS))
    full = roster(2**40, names, 2**20, former=(names[::-1], names), listeners=others)
    message = translate.command_to_message(do.KeepRoster("roster", 2**20, full))
    envelope = codec.Envelope("job", "manager", None, None, "a" * 32, 0, 0, "roster")
    assert len(codec.encode(envelope, message)) <= codec.MAX_MESSAGE_BYTES
    told = dataclasses.replace(full, listeners=())
    workers = tuple(
        ev.WorkerReport(rank, 10**6, "returned", declared=True, version=10**9)
        for rank in range(512)
    )
    known = (4095, "f" * 32, 4096, 2**20, 32767, 10**6, 32767, workers)
    registration = ev.AgentRegistered(0.0, "registration", *known, roster=told)
    message = translate.event_to_message(registration)
    assert len(codec.encode(envelope, message)) <= codec.MAX_MESSAGE_BYTES // 2
