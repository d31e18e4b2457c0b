"""When a manager that is asked to end leaves."""

from __future__ import annotations

from taskd.core.policy.leaving import GRACE_IS_OVER, Leaving, NotJoined


def test_it_stays_once_for_sigterm_where_the_job_is_saved() -> None:
    leaving = Leaving(("dump",), 25.0)
    assert leaving.overdue(1e9) is None
    assert leaving.stays("SIGTERM", 100.0)
    assert leaving.deadline == 125.0
    assert leaving.overdue(124.9) is None
    assert leaving.overdue(125.0) == GRACE_IS_OVER
    assert leaving.stays("SIGTERM", 104.9), "the same one, in another way"
    assert leaving.deadline == 125.0
    assert not leaving.stays(GRACE_IS_OVER, 125.0)
    assert not leaving.stays("SIGTERM", 105.0)


def test_it_leaves_at_once_for_anything_else() -> None:
    assert not Leaving(("dump",), 25.0).stays("SIGINT", 100.0)
    for strategies in ((), ("recover",)):
        leaving = Leaving(strategies, 25.0)
        assert not leaving.stays("SIGTERM", 100.0)
        assert leaving.deadline is None


def test_a_manager_that_nobody_joins_leaves_at_its_limit() -> None:
    waiting = NotJoined(1800.0, 100.0)
    assert waiting.deadline == 1900.0
    assert waiting.overdue(1899.9) is None
    assert waiting.overdue(1900.0) == "nobody has joined it within 1800 s"


def test_an_orphan_that_nobody_joins_leaves_sooner() -> None:
    waiting = NotJoined(1800.0, 100.0)
    waiting.orphaned(200.0)
    waiting.orphaned(300.0)
    assert waiting.deadline == 500.0
    assert waiting.overdue(499.9) is None
    assert waiting.overdue(500.0) == (
        "nobody has joined it within 300 s of the end of the process that started it"
    )


def test_a_manager_whose_limit_is_near_gets_no_longer_one_as_an_orphan() -> None:
    waiting = NotJoined(1800.0, 100.0)
    waiting.orphaned(1800.0)
    assert waiting.deadline == 1900.0
    assert waiting.overdue(1900.0) == "nobody has joined it within 1800 s"


def test_a_manager_that_somebody_has_joined_never_leaves() -> None:
    waiting = NotJoined(1800.0, 100.0)
    waiting.joined()
    waiting.orphaned(200.0)
    assert waiting.deadline is None
    assert waiting.overdue(1e9) is None
