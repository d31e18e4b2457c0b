"""The manager's side of an election: the roster that it tells, and what it may do without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskd.core.policy.election import Electorate, Won
from tests.unit.core.test_election import NAMES, roster, voter

if TYPE_CHECKING:
    from taskd.core.votes import Roster


class TestElectorate:
    def compose(self, one: Electorate, names: tuple[str, ...]) -> Roster | None:
        return one.compose(len(names), 2, roster(names=names).voters, ())

    def test_it_is_told_once(self) -> None:
        one = Electorate()
        assert self.compose(one, NAMES) == roster(1)
        assert self.compose(one, NAMES) is None

    def test_the_former_counts_until_all_have_the_next(self) -> None:
        one, new = Electorate(), ("a", "b", "d")
        self.compose(one, NAMES)
        assert self.compose(one, new) == roster(2, new, former=(NAMES,))
        assert not one.may_replace({"d"})
        for name in ("a", "b"):
            one.keeps(name, 2)
        assert self.compose(one, new) is None
        one.keeps("d", 1)
        assert self.compose(one, new) is None, "that was an older one"
        one.keeps("d", 2)
        assert self.compose(one, new) == roster(3, new)

    def test_half_of_the_voters_are_enough_and_less_are_not(self) -> None:
        one = Electorate()
        self.compose(one, ("a", "b", "c", "d"))
        assert one.may_replace({"a", "b"})
        assert not one.may_replace({"a"})

    def test_where_nobody_can_be_elected_anybody_may_be_replaced(self) -> None:
        one = Electorate()
        assert one.may_replace(())
        self.compose(one, ("a", "b"))
        assert one.may_replace(())

    def test_an_elected_manager_tells_its_own_roster(self) -> None:
        one = Electorate(3, roster(7))
        assert self.compose(one, NAMES) == roster(8, term=3)


class TestBegunAnew:
    """A manager that was started again: what agents tell it that registered with the one before."""

    def told(self, *known: tuple[str, Roster | None], term: int = 0, **more: bool) -> Electorate:
        one = Electorate(term)
        for name, known_one in known:
            one.learn(name, known_one, 3, **more)
        return one

    def compose(self, one: Electorate, names: tuple[str, ...]) -> Roster:
        composed = one.compose(len(names), 2, roster(names=names).voters, ())
        assert composed is not None
        return composed

    def test_its_rosters_are_newer_than_all_that_an_earlier_life_may_have_told(self) -> None:
        """Agents refuse an older one, and who knows different ones elects nobody."""
        one = self.told(*((name, roster(3)) for name in NAMES))
        agent = voter("b", known=roster(5), misses=False)
        assert agent.keep(self.compose(one, NAMES))

    def test_so_they_are_if_nothing_else_has_changed(self) -> None:
        one = self.told(*((name, roster(3)) for name in NAMES))
        first = self.compose(one, NAMES)
        assert first.key > (0, 3)
        assert first.former == (), "all have told that they know the one before"

    def test_the_newest_that_is_told_counts_whoever_comes_first(self) -> None:
        """C was cut off when D got its place, and A alone has heard of that."""
        newer = roster(2, ("a", "b", "d"), former=(NAMES,))
        for known in ((("b", roster(1)), ("a", newer)), (("a", newer), ("b", roster(1)))):
            one = self.told(*known)
            assert one.roster == newer
        one.learn("d", None, 3)
        assert not one.may_replace({"a", "d"}), "B and C may have elected another one"
        assert one.may_replace({"a", "b"})
        assert self.compose(one, ("a", "b", "d")).former == (NAMES,)

    def test_until_all_know_the_next_what_was_told_counts(self) -> None:
        one = self.told(("a", roster(1)), ("b", roster(1)), ("d", None))
        composed = self.compose(one, ("a", "b", "d"))
        assert composed.former == (NAMES,)
        for name in ("a", "b", "d"):
            one.keeps(name, composed.number)
        assert self.compose(one, ("a", "b", "d")).former == ()

    def test_nobody_is_replaced_before_more_than_half_have_told(self) -> None:
        four = ("a", "b", "c", "d")
        one = Electorate()
        for name, may in (("a", False), ("b", False), ("c", True)):
            one.learn(name, roster(1, four), 4)
            assert one.may_replace(four[:2]) is may

    def test_all_places_are_enough(self) -> None:
        """The two others of four were replaced just before."""
        four = ("a", "b", "c", "d")
        one = Electorate()
        one.learn("a", roster(1, four), 4), one.learn("b", roster(1, four), 4)
        assert not one.may_replace({"a", "b"})
        one.settle()
        assert one.may_replace({"a", "b"})

    @pytest.mark.parametrize(("first", "may"), [(0, False), (1, False), (2, True)])
    def test_who_began_with_the_job_and_knows_no_roster_elects_nobody(
        self, first: int, may: bool
    ) -> None:
        """Who came later may not have been told it."""
        one = self.told(("d", None))
        for name in NAMES[:first]:
            one.learn(name, None, 3, is_first=True)
        assert one.may_replace({"d"}) is may

    def test_where_one_has_no_vote_nobody_is_elected(self) -> None:
        assert self.told(("a", None), is_first=True, has_vote=False).may_replace({"a"})

    def test_it_begins_with_more_than_half_of_those_that_it_is_told_of(self) -> None:
        one = self.told(("a", roster(1)))
        assert one.may_begin({"a", "x"}, 1)
        assert not one.may_begin({"a", "x", "y"}, 0)
        assert not one.may_begin({"x", "y"}, 1)
        assert one.may_begin({"a", "b", "x"}, 0)

    def test_and_with_half_of_those_who_count_beside_them(self) -> None:
        one = self.told(("d", roster(2, ("d", "e", "f"), former=(NAMES,))))
        assert not one.may_begin({"d", "e", "f"}, 0)
        assert not one.may_begin({"d", "e", "c"}, 0)
        assert one.may_begin({"d", "e"}, 2)

    @pytest.mark.parametrize("unsound", [
        roster(1, ("x", "y", "z")), roster(1, term=4), roster(1 << 52), roster(1, (*NAMES, "d")),
    ], ids=["of others", "of a later term", "the last number", "of another size"])  # fmt: skip
    def test_what_no_manager_before_it_has_told_is_not_learnt(self, unsound: Roster) -> None:
        one = self.told(("a", unsound), ("b", unsound), is_first=True)
        assert one.roster is None
        assert not one.may_replace({"a", "b"}), "nor is it known that they know none"

    def test_one_that_tells_a_newer_one_late_is_not_refused_by_it(self) -> None:
        """It was out of reach, and those who were not knew none. Both groups count."""
        one = self.told(*((name, None) for name in ("a", "b", "d")), is_first=True)
        own = self.compose(one, ("a", "b", "d"))
        one.learn("c", roster(7), 3)
        assert not one.may_replace({"a", "d"})
        after = self.compose(one, ("a", "b", "d"))
        assert after.number > 7
        assert set(after.former) == {NAMES, own.names}

    def test_who_has_missed_the_newest_is_told_again(self) -> None:
        one = Electorate()
        assert not one.lacks("a")
        first = self.compose(one, NAMES)
        one.keeps("a", 1)
        one.learn("b", first, 3)
        assert [name for name in (*NAMES, "x") if one.lacks(name)] == ["c"]

    def test_an_elected_one_goes_on_from_what_its_agent_knows(self) -> None:
        known = roster(12, ("a", "b", "d"), term=2, former=(NAMES,))
        won = Won(2, roster(7), ("a", "b")).again(known)
        assert (won.roster.names, won.roster.former) == (known.names, known.former)
        assert won.again(None).roster.number > won.roster.number > 12 + 100
        one = Electorate(won.term, won.roster)
        assert not one.may_replace({"a", "d"})
        assert one.may_replace({"a", "b"})
        assert voter("c", known=roster(40, term=2)).keep(self.compose(one, NAMES))

    def test_an_elected_one_of_two_nodes_is_told_by_its_agents(self) -> None:
        won = Won(2, roster(7, ("a", "b")), ("a", "w"))
        assert won.again(roster(12, ("a", "w"), term=2)) is won
