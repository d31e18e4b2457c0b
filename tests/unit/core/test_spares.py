"""Who gets the place of a lost node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from taskd.core.policy import spares as module
from taskd.core.policy.spares import Offer, Spares
from taskd.core.timeouts import Timeouts

TIMEOUTS = Timeouts.derive(6.0)
LEASE_S = TIMEOUTS.agent_lease_s


def waiting(*names: str) -> Spares:
    """Spares, each on a host of its own, that joined at 0."""
    spares = Spares(TIMEOUTS, 0.0)
    for name in names:
        spares.join(name, f"host of {name}", 0.0)
    return spares


def test_the_one_that_came_first_is_offered_the_place() -> None:
    spares = waiting("a", "b")
    assert spares.offers([], 1.0) == []
    assert spares.offers([3], 1.0) == [Offer("a", 3)]
    assert spares.offers([3], 1.0) == [], "offered once"


def test_only_those_who_may_have_a_place_are_offered_it() -> None:
    spares = waiting("a", "b")
    assert spares.offers([3], 1.0, ()) == []
    assert spares.expected == set()
    assert spares.offers([3], 1.0, ("b",)) == [Offer("b", 3)]
    assert spares.expected == {3}
    spares.leave("b", 1.0, takes_place=True)
    assert spares.expected == {3}, "it is on its way"


def test_two_places_and_one_spare() -> None:
    spares = waiting("a")
    assert spares.offers([2, 1], 1.0) == [Offer("a", 1)]
    spares.join("b", "host of b", 2.0)
    assert spares.offers([1, 2], 2.0) == [Offer("b", 2)]


def test_the_place_of_a_spare_that_ends_is_offered_to_the_next() -> None:
    spares = waiting("a", "b")
    assert spares.offers([1], 1.0) == [Offer("a", 1)]
    spares.leave("a", 2.0)
    assert spares.offers([1], 2.0) == [Offer("b", 1)]


def test_a_silent_spare_is_not_waited_for() -> None:
    spares = waiting("a", "b")
    assert spares.offers([1], 1.0) == [Offer("a", 1)]
    assert spares.heard("b", LEASE_S - 1)
    assert spares.next_deadline() == LEASE_S
    assert spares.offers([1], LEASE_S) == [Offer("b", 1)]
    assert not spares.heard("a", LEASE_S), "it has to introduce itself again"


def test_a_spare_on_its_way_has_time_to_arrive() -> None:
    spares = waiting("a", "b")
    assert spares.offers([1], 1.0) == [Offer("a", 1)]
    spares.leave("a", 1.0, takes_place=True)
    until = spares.next_deadline()
    assert until == LEASE_S, "the lease of the other one comes first"
    spares.heard("b", 1.0 + 2 * LEASE_S - 1)
    assert spares.offers([1], 1.0 + 2 * LEASE_S - 1) == []
    assert spares.offers([1], 1.0 + 2 * LEASE_S) == [Offer("b", 1)]


def test_who_lost_its_connection_is_offered_the_place_again() -> None:
    """The offer may have been on its way."""
    spares = waiting("a")
    assert spares.offers([1], 1.0) == [Offer("a", 1)]
    spares.join("a", "host of a", 2.0)
    assert spares.offers([1], 2.0) == [Offer("a", 1)]


def test_an_offer_ends_when_the_node_comes_back() -> None:
    spares = waiting("a")
    assert spares.offers([1], 1.0) == [Offer("a", 1)]
    assert spares.offers([], 2.0) == []
    assert spares.offers([2], 3.0) == [Offer("a", 2)]


def test_a_host_that_loses_its_places_gets_none_any_more() -> None:
    spares = Spares(TIMEOUTS, 0.0)
    for now in (1.0, 2.0):
        spares.join(f"spare {now}", "bad host", now)
        assert spares.offers([1], now) == [Offer(f"spare {now}", 1)]
        spares.leave(f"spare {now}", now, takes_place=True)
        assert spares.offers([], now) == [], "it has arrived"
    assert spares.offers([1], 3.0) == []
    assert spares.is_barred("bad host")
    assert spares.unserved([1]) == {1: "no spare waits"}
    spares.join("once more", "bad host", 3.0)
    assert spares.offers([1], 3.0) == []
    barred = "the spares that wait are on hosts that have lost 2 places before"
    assert spares.unserved([1, 2]) == {1: barred, 2: barred}
    spares.join("another", "good host", 3.0)
    assert spares.offers([1], 3.0) == [Offer("another", 1)]
    assert spares.unserved([1]) == {}
    spares.leave("another", 3.0, takes_place=True)
    assert spares.unserved([1]) == {}, "it is on the way"
    spares.join("a third", "third host", 3.0)
    assert spares.unserved([1, 2]) == {}, "it may be offered that of node 2 yet"


def test_there_is_a_limit() -> None:
    spares = Spares(TIMEOUTS, 0.0)
    for number in range(module.MAX_SPARES):
        assert spares.refusal(str(number)) is None
        spares.join(str(number), "host", 0.0)
    assert spares.refusal("one more") == f"{module.MAX_SPARES} spares wait already"
    assert spares.refusal("0") is None, "it waits already"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "take", "lose", "return", "beat"]),
            st.integers(0, 3),
            st.floats(0.0, 4.0),
        ),
        max_size=60,
    )
)
def test_no_place_is_offered_twice_and_every_deadline_passes(steps) -> None:
    spares, lost, now = Spares(TIMEOUTS, 0.0), set[int](), 0.0
    offered: dict[str, int] = {}
    for what, number, later in steps:
        now += later
        name = f"spare {number}"
        match what:
            case "join":
                spares.join(name, name, now)
                offered.pop(name, None)
            case "beat":
                assert spares.heard(name, now) == (name in spares)
            case "leave" | "take":
                spares.leave(name, now, takes_place=what == "take")
                offered.pop(name, None)
            case "lose":
                lost.add(number)
            case "return":
                lost.discard(number)
        for offer in spares.offers(sorted(lost), now):
            assert offer.node_rank in lost
            assert offer.spare in spares
            holders = [one for one in offered if offered[one] == offer.node_rank and one in spares]
            assert holders == []
            offered[offer.spare] = offer.node_rank
        offered = {one: place for one, place in offered.items() if one in spares and place in lost}
        deadline = spares.next_deadline()
        assert deadline is None or deadline > now, "nothing is due that was just looked at"
