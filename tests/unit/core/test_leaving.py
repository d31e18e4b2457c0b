"""When a manager that is asked to end leaves."""

from __future__ import annotations

from taskd.core.policy.leaving import GRACE_IS_OVER, Leaving


def test_it_stays_once_for_sigterm_where_the_job_is_saved() -> None:
    leaving = Leaving(("dump",), 25.0)
    assert leaving.overdue(1e9) is None
    assert leaving.stays("SIGTERM", 100.0)
    assert leaving.deadline == 125.0
    assert leaving.overdue(124.9) is None
    assert leaving.overdue(125.0) == GRACE_IS_OVER
    assert not leaving.stays(GRACE_IS_OVER, 125.0)
    assert not leaving.stays("SIGTERM", 101.0)


def test_it_leaves_at_once_for_anything_else() -> None:
    assert not Leaving(("dump",), 25.0).stays("SIGINT", 100.0)
    for strategies in ((), ("recover",)):
        leaving = Leaving(strategies, 25.0)
        assert not leaving.stays("SIGTERM", 100.0)
        assert leaving.deadline is None
