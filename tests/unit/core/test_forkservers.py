"""How long a forkserver is waited for, and when another one is started."""

import pytest

from taskd.core.policy.forkservers import (
    ANSWER_S,
    DEATHS,
    DEATHS_WITHIN_S,
    PRELOAD_AGAIN_S,
    PRELOAD_S,
    STOPPED_S,
    Forkservers,
)


def replaced_after(
    step_s: float,
    limit_s: float,
    *,
    owes: bool = True,
    is_ready: bool = True,
    is_stopped: bool = False,
) -> tuple[float, str] | None:
    """When it is replaced, and why, if it is asked about every `step_s`."""
    limits, now = Forkservers(), 100.0
    while now < 100 + limit_s:
        reason = limits.why_replace(now, owes=owes, is_ready=is_ready, is_stopped=is_stopped)
        if reason is not None:
            return now - 100, reason
        now += step_s
    return None


def test_one_that_is_stopped_and_owes_an_answer_is_replaced_soon() -> None:
    assert replaced_after(0.5, 60, is_stopped=True) == (STOPPED_S, "has been stopped for 1 s")
    assert replaced_after(0.5, 60, is_stopped=True, is_ready=False) == (
        STOPPED_S,
        "has been stopped for 1 s",
    )


def test_one_that_does_not_answer_is_replaced_and_one_that_still_imports_has_longer() -> None:
    assert replaced_after(0.5, 60) == (ANSWER_S, "has not answered for 10 s")
    assert replaced_after(1.0, 1000, is_ready=False) == (PRELOAD_S, "has not been ready for 900 s")


def test_what_waits_for_one_that_has_had_its_time_to_import_is_started_without_it() -> None:
    limits, now = Forkservers(), 0.0
    for limit_s in (PRELOAD_S, PRELOAD_AGAIN_S):  # the next one finds more in memory
        until = now + limit_s
        while limits.why_replace(now, owes=True, is_ready=False, is_stopped=False) is None:
            assert not limits.is_late
            now += 1
        assert limits.is_late
        assert now == pytest.approx(until, abs=1)
        limits.died(now)
        assert not limits.is_late
    for second in range(int(ANSWER_S) + 5):
        limits.why_replace(now + second, owes=True, is_ready=True, is_stopped=False)
        assert not limits.is_late, "one that is ready is replaced, and the next one asked"


def test_one_that_owes_nothing_is_left_alone() -> None:
    assert replaced_after(1.0, 1000, owes=False, is_stopped=True) is None


def test_a_time_in_which_we_did_not_run_ourselves_does_not_count() -> None:
    assert replaced_after(3600.0, 3 * 3600) is None
    assert replaced_after(3600.0, 24 * 3600) == (5 * 3600.0, "has not answered for 10 s")


def test_every_answer_begins_the_wait_anew() -> None:
    limits = Forkservers()
    for second in range(100):
        assert limits.why_replace(float(second), owes=True, is_ready=True, is_stopped=False) is None
        if second % 8 == 0:
            limits.heard()


def test_the_time_of_its_imports_does_not_count_when_it_is_ready() -> None:
    limits = Forkservers()
    for second in range(200):
        assert (
            limits.why_replace(float(second), owes=True, is_ready=second >= 100, is_stopped=False)
            is None
            or second >= 100 + ANSWER_S
        )
    assert (
        limits.why_replace(200.0, owes=True, is_ready=True, is_stopped=False)
        == "has not answered for 100 s"
    )


def test_deaths_count_for_a_while_only() -> None:
    limits = Forkservers()
    for number in range(DEATHS):
        limits.died(float(number))
        assert limits.why_none(float(number)) is None
    limits.died(10.0)
    assert limits.why_none(10.0) == (
        f"{DEATHS + 1} forkservers were lost within {DEATHS_WITHIN_S:.0f} s"
    )
    assert limits.why_none(DEATHS_WITHIN_S - 0.1) is not None
    assert limits.why_none(DEATHS_WITHIN_S) is None


def test_one_death_an_hour_is_never_too_many() -> None:
    limits = Forkservers()
    for hour in range(1000):
        limits.died(hour * 3600.0)
        assert limits.why_none(hour * 3600.0) is None
