"""When a process registers again, and when it counts its manager as lost."""

import pytest

from taskd.core.policy.patience import ManagerLink
from taskd.core.policy.registration import Registration
from taskd.core.timeouts import Timeouts

TIMEOUTS = Timeouts.derive(30.0)


@pytest.fixture
def registration() -> Registration:
    """Accepted by manager "m" at 100 s."""
    registration = Registration(TIMEOUTS)
    registration.heard(100.0)
    registration.accepted("m")
    return registration


def test_a_manager_that_never_answered_cannot_be_lost() -> None:
    registration = Registration(TIMEOUTS)
    assert not registration.is_registered
    assert not registration.loses_manager(1e6)
    assert registration.link is ManagerLink.AWAY


def test_a_silent_manager_is_lost_once_until_it_accepts_again(registration: Registration) -> None:
    limit = 100.0 + TIMEOUTS.manager_silence_s
    assert not registration.loses_manager(limit)
    assert registration.is_registered
    assert registration.loses_manager(limit + 0.1)
    assert not registration.is_registered
    assert not registration.loses_manager(limit + 0.2)
    registration.heard(limit + 1)
    registration.accepted("m")
    assert registration.is_registered
    assert not registration.loses_manager(limit + 1)
    assert registration.loses_manager(limit + 2 + TIMEOUTS.manager_silence_s)


@pytest.mark.parametrize(
    ("is_known", "incarnation", "registers"),
    [(True, "m", False), (False, "m", True), (True, "n", True), (False, "n", True)],
)
def test_who_is_forgotten_or_meets_another_manager_registers_again(
    registration: Registration, is_known: bool, incarnation: str, registers: bool
) -> None:
    found = registration.acknowledged(is_known=is_known, manager_incarnation=incarnation)
    assert found is registers
    assert registration.is_registered is not registers
    assert registration.link is ManagerLink.PRESENT  # it speaks: a fault goes on waiting for it


def test_a_manager_that_forgot_us_and_falls_silent_is_lost_too(registration: Registration) -> None:
    assert registration.acknowledged(is_known=False, manager_incarnation="n")
    later = 100.0 + TIMEOUTS.manager_silence_s + 1
    assert registration.loses_manager(later)
    assert registration.patience_ends_at(100.0) == later + TIMEOUTS.fallback_connected_s


def test_a_refusal_ends_the_registration_and_the_patience(registration: Registration) -> None:
    registration.refused()
    assert registration.is_refused
    assert not registration.is_registered
    assert not registration.loses_manager(1e6)
    assert registration.patience_ends_at(7.0) == 7.0


def asked(registration: Registration, connections: list[int]) -> list[int]:
    """At which of these heartbeats it asks; each with the connection that is up then."""
    return [beat for beat, number in enumerate(connections) if registration.asks(number)]


def test_nothing_is_asked_without_a_connection_and_once_with_each_new_one() -> None:
    registration = Registration(TIMEOUTS)
    assert asked(registration, [0, 0, 0, 1, 0, 0, 2]) == [3, 6]


def test_who_hears_nothing_asks_ever_more_seldom() -> None:
    assert asked(Registration(TIMEOUTS), [1] * 70) == [0, 1, 3, 7, 15, 31, 47, 63]


def test_who_is_not_taken_yet_asks_with_each_heartbeat() -> None:
    registration = Registration(TIMEOUTS)
    assert asked(registration, [1] * 8) == [0, 1, 3, 7]
    for now in range(8):
        registration.heard(float(now))
        assert registration.asks(1)


def test_who_has_lost_its_manager_asks_at_once(registration: Registration) -> None:
    assert asked(registration, [1] * 6) == [0, 1, 3]
    assert registration.loses_manager(101.0 + TIMEOUTS.manager_silence_s)
    assert asked(registration, [1] * 4) == [0, 1, 3]
