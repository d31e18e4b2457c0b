"""Switches, codes, answers, and when a rank is told again."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd.core.profiling import (
    ALL_OFF,
    CODES,
    COMMUNICATION,
    DEFAULT_DOMAIN,
    RESEND_S,
    SWITCHES,
    Domain,
    Domains,
    Exchange,
    Switchboard,
    asked_by,
    code_of,
    overall,
    said_by,
    status_of,
)

KNOWN = (Domain.OFF, Domain.ON, Domain.EXCEPTION)
STATUSES = [status_of(Domains(*pair)) for pair in itertools.product(KNOWN, KNOWN)]


@pytest.mark.parametrize(
    "on", [set(some) for size in range(6) for some in itertools.combinations(SWITCHES, size)]
)
def test_the_default_domain_is_on_unless_all_five_are_off(on: set[str]) -> None:
    code = code_of({name: name in on for name in SWITCHES})
    assert code == (700 if not on else 711 if COMMUNICATION in on else 710)
    assert asked_by(code).communication is (Domain.ON if COMMUNICATION in on else Domain.OFF)


def test_a_switch_that_is_not_named_is_off() -> None:
    assert code_of({}) == ALL_OFF
    assert code_of({DEFAULT_DOMAIN[0]: True}) == 710


def test_the_codes_and_answers_are_those_of_the_contract() -> None:
    assert {
        code: (asked_by(code).default.value, asked_by(code).communication.value) for code in CODES
    } == {700: (0, 0), 701: (0, 1), 710: (1, 0), 711: (1, 1)}
    assert STATUSES == [1400, 1401, 1402, 1410, 1411, 1412, 1420, 1421, 1422]
    for status in STATUSES:
        assert status_of(said_by(status)) == status


@given(st.integers())
def test_any_other_number_is_refused(number: int) -> None:
    if number not in CODES:
        with pytest.raises(ValueError, match="is no profiling code"):
            asked_by(number)
    if number not in STATUSES:
        with pytest.raises(ValueError, match="is no profiling status"):
            said_by(number)


@given(st.lists(st.sampled_from(Domain)))
def test_the_overall_state(states: list[Domain]) -> None:
    found = overall(states)
    if Domain.EXCEPTION in states:
        assert found is Domain.EXCEPTION
    elif states and all(state is states[0] for state in states):
        assert found is states[0]
    else:
        assert found is Domain.UNKNOWN


def test_no_ranks_are_in_no_state() -> None:
    assert Switchboard().state([]) == Domains(Domain.UNKNOWN, Domain.UNKNOWN)


def test_who_does_not_answer_is_told_again_after_30_s_until_the_answer_fits() -> None:
    board = Switchboard()
    assert board.ask(711, 100.0)
    assert board.next_deadline([0, 1]) == 100.0 + RESEND_S
    board.heard(0, 0, 1411)
    assert not board.take_due([0, 1], 129.9)
    assert board.take_due([0, 1], 130.0)
    assert not board.take_due([0, 1], 130.0)
    board.heard(1, 0, 1412)
    assert board.take_due([0, 1], 160.0), "an exception is tried again"
    assert board.excepted([0, 1]) == [1]
    board.heard(1, 0, 1411)
    assert board.is_met([0, 1])
    assert board.next_deadline([0, 1]) is None
    assert not board.take_due([0, 1], 1e9)
    assert board.next_deadline([0, 1, 2]) is not None, "a rank that is new has not answered"


def test_nothing_is_asked_for_until_somebody_wants_something() -> None:
    board = Switchboard()
    assert not board.ask(ALL_OFF, 1.0)
    assert board.wanted is None
    assert board.next_deadline([0]) is None
    assert board.ask(710, 2.0)
    assert not board.ask(710, 3.0)
    assert board.ask(ALL_OFF, 4.0)
    assert board.wanted == ALL_OFF


def test_a_new_manager_switches_off_what_the_one_before_had_switched_on() -> None:
    board = Switchboard()
    board.heard(0, 0, 1410)
    assert board.wanted == ALL_OFF
    assert board.take_due([0], 0.0)


def test_an_earlier_life_does_not_count() -> None:
    board = Switchboard()
    board.ask(710, 0.0)
    assert board.heard(0, 1, 1410)
    assert not board.heard(0, 0, 1420)
    assert board.is_met([0])


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(CODES)),
        st.tuples(
            st.just("heard"), st.integers(0, 3), st.integers(0, 2), st.sampled_from(STATUSES)
        ),
        st.tuples(st.just("wait"), st.floats(0, 40)),
    ),
    max_size=60,
)


@given(MOVES)
def test_it_is_told_again_exactly_while_the_newest_lives_do_not_do_what_is_wanted(
    moves: list[tuple],
) -> None:
    board, now, ranks = Switchboard(), 0.0, range(4)
    newest: dict[int, tuple[int, int]] = {}
    wanted = told_at = None
    for move in moves:
        if move[0] == "ask":
            if board.ask(move[1], now):
                wanted, told_at = move[1], now
        elif move[0] == "heard":
            _, rank, incarnation, status = move
            board.heard(rank, incarnation, status)
            if incarnation >= newest.get(rank, (-1,))[0]:
                newest[rank] = (incarnation, status)
            if wanted is None and status != 1400 and board.wanted == ALL_OFF:
                wanted, told_at = ALL_OFF, float("-inf")
        else:
            now += move[1]
        assert board.wanted == wanted
        fits = wanted is None or all(
            newest.get(rank, (0, 0))[1] == wanted - 700 + 1400 for rank in ranks
        )
        assert board.is_met(ranks) == fits
        due = board.take_due(ranks, now)
        assert due == (not fits and now >= told_at + RESEND_S)
        if due:
            told_at = now


def test_a_node_passes_on_what_is_wanted_to_new_workers_and_keeps_answers_for_a_new_manager() -> (
    None
):
    exchange = Exchange()
    assert exchange.for_new_worker() is None
    exchange.ask(711)
    assert exchange.for_new_worker() == 711
    exchange.heard(3, 0, 1411)
    exchange.heard(3, 1, 1421)
    exchange.heard(1, 0, 1411)
    assert exchange.answers() == [(1, 0, 1411), (3, 1, 1421)]
    exchange.ask(ALL_OFF)
    assert exchange.for_new_worker() is None
    with pytest.raises(ValueError, match="702"):
        exchange.ask(702)
    with pytest.raises(ValueError, match="1433"):
        exchange.heard(0, 0, 1433)
