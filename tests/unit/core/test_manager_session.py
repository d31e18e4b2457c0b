"""When a process registers again, and when it counts its manager as lost."""

import pytest

from taskd.core.manager_session import ManagerSession
from taskd.core.policy.patience import ManagerLink
from taskd.core.timeouts import Timeouts

TIMEOUTS = Timeouts.derive(30.0)


@pytest.fixture
def session() -> ManagerSession:
    """Accepted by manager "m" at 100 s."""
    session = ManagerSession(TIMEOUTS)
    session.heard(100.0)
    session.accepted("m")
    return session


def test_a_manager_that_never_answered_cannot_be_lost() -> None:
    session = ManagerSession(TIMEOUTS)
    assert not session.is_registered
    assert not session.loses_manager(1e6)
    assert session.link is ManagerLink.AWAY


def test_a_silent_manager_is_lost_once_until_it_accepts_again(session: ManagerSession) -> None:
    limit = 100.0 + TIMEOUTS.manager_silence_s
    assert not session.loses_manager(limit)
    assert session.is_registered
    assert session.loses_manager(limit + 0.1)
    assert not session.is_registered
    assert not session.loses_manager(limit + 0.2)
    session.heard(limit + 1)
    session.accepted("m")
    assert session.is_registered
    assert not session.loses_manager(limit + 1)
    assert session.loses_manager(limit + 2 + TIMEOUTS.manager_silence_s)


@pytest.mark.parametrize(
    ("is_known", "incarnation", "registers"),
    [(True, "m", False), (False, "m", True), (True, "n", True), (False, "n", True)],
)
def test_who_is_forgotten_or_meets_another_manager_registers_again(
    session: ManagerSession, is_known: bool, incarnation: str, registers: bool
) -> None:
    found = session.acknowledged(is_known=is_known, manager_incarnation=incarnation)
    assert found is registers
    assert session.is_registered is not registers
    assert session.link is ManagerLink.PRESENT  # it speaks: a fault goes on waiting for it


def test_a_manager_that_forgot_us_and_falls_silent_is_lost_too(session: ManagerSession) -> None:
    assert session.acknowledged(is_known=False, manager_incarnation="n")
    later = 100.0 + TIMEOUTS.manager_silence_s + 1
    assert session.loses_manager(later)
    assert session.patience_ends_at(100.0) == later + TIMEOUTS.fallback_connected_s


def test_a_refusal_ends_the_registration_and_the_patience(session: ManagerSession) -> None:
    session.refused()
    assert session.is_refused
    assert not session.is_registered
    assert not session.loses_manager(1e6)
    assert session.patience_ends_at(7.0) == 7.0
