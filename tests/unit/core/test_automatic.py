"""When an agent starts a manager of its own, and when it does not, or not again."""

from __future__ import annotations

import pytest

from taskd.core.policy.automatic import (
    EXIT_LEFT,
    EXIT_PORT_TAKEN,
    EXIT_WRONG_SETTINGS,
    MAX_AT_ONCE,
    MAX_STARTS_IN_VAIN,
    SPACING_S,
    WINDOW_S,
    AutomaticManager,
)


def manager(*, is_wanted: bool = True, is_alone: bool = True) -> AutomaticManager:
    return AutomaticManager(100.0, is_wanted=is_wanted, is_alone=is_alone)


def test_it_is_started_at_once_where_it_is_wanted() -> None:
    assert manager().due_at == 100
    assert manager(is_wanted=False).due_at is None


def test_a_manager_of_the_users_ends_the_matter() -> None:
    policy = manager()
    policy.port_is_taken()
    policy.joined()
    assert not policy.moves(101)
    assert policy.due_at is None


def test_joining_ours_changes_nothing() -> None:
    policy = manager()
    policy.started()
    policy.joined()
    assert policy.ended(-9, 110)
    assert policy.due_at == 110


def test_one_that_never_accepts_the_node_is_started_later_each_time_and_not_for_ever() -> None:
    policy, delays = manager(), []
    for _ in range(MAX_STARTS_IN_VAIN):
        policy.started()
        assert policy.ended(1, 200)
        assert policy.due_at is not None
        delays.append(policy.due_at - 200)
    assert delays == list(range(MAX_STARTS_IN_VAIN))
    policy.started()
    assert not policy.ended(1, 300)
    assert policy.due_at is None


def test_one_that_has_served_is_started_at_once_however_often_it_was_before() -> None:
    policy, now = manager(), 200.0
    for _ in range(10 * MAX_STARTS_IN_VAIN):
        policy.started()
        policy.joined()
        now += WINDOW_S / MAX_AT_ONCE
        assert policy.ended(-9, now)
        assert policy.due_at == now
        assert policy.in_vain == 0


def test_one_that_serves_and_dies_again_and_again_is_started_once_a_minute() -> None:
    policy = manager()
    for number in range(2 * MAX_AT_ONCE):
        policy.started()
        policy.joined()
        assert policy.ended(-9, 200.0 + number)
        due = 200.0 + number if number < MAX_AT_ONCE else 200.0 + number + SPACING_S
        assert policy.due_at == due
    policy.started()
    policy.joined()
    late = 200.0 + 2 * MAX_AT_ONCE + WINDOW_S
    assert policy.ended(-9, late)
    assert policy.due_at == late


@pytest.mark.parametrize("status", [EXIT_LEFT, EXIT_WRONG_SETTINGS])
def test_one_that_left_or_cannot_start_is_not_started_again(status: int) -> None:
    policy = manager()
    policy.started()
    assert not policy.ended(status, 110)
    assert policy.due_at is None
    assert not policy.moves(111)


def test_it_moves_once_if_the_port_is_held_by_somebody_who_does_not_serve_this_job() -> None:
    policy = manager()
    policy.started()
    assert not policy.ended(EXIT_PORT_TAKEN, 101)
    assert policy.moves(105)
    assert (policy.due_at, policy.is_elsewhere) == (105, True)
    assert not policy.moves(106)


def test_it_does_not_move_while_it_runs_nor_where_others_have_to_find_it() -> None:
    running, one_of_many, unwanted = manager(), manager(is_alone=False), manager(is_wanted=False)
    running.started()
    for policy in (one_of_many, unwanted):
        policy.port_is_taken()
    assert not any(policy.moves(105) for policy in (running, one_of_many, unwanted))
    running.ended(-9, 110)
    assert not running.moves(110), "nobody else listens there: it is started again"
