"""How long the end of a step is waited for, where TaskD has started the process and elsewhere."""

import pytest

from mindx_elastic.termination import patience_s, stuck_after_s
from taskd.config.names import DOOR_ENV, FAULT_TIMEOUT_ENV
from taskd.core.timeouts import DEFAULT_FAULT_TIMEOUT_S, Timeouts

WAIT_ENV = "MINDX_ELASTIC_STEP_WAIT_S"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (DOOR_ENV, FAULT_TIMEOUT_ENV, WAIT_ENV):
        monkeypatch.delenv(name, raising=False)


def test_three_steps_and_at_least_five_seconds() -> None:
    assert patience_s(0.1) == 5
    assert patience_s(10) == 30


@pytest.mark.parametrize("t", [None, 0.6, 6, 30, 600])
@pytest.mark.parametrize("step_s", [0.1, 10])
def test_under_an_agent_of_taskd_most_of_its_grace_is_left_for_the_file(
    monkeypatch, t, step_s
) -> None:
    monkeypatch.setenv(DOOR_ENV, "a door")
    if t is not None:
        monkeypatch.setenv(FAULT_TIMEOUT_ENV, str(t))
    grace_s = Timeouts.derive(t or DEFAULT_FAULT_TIMEOUT_S).restart_grace_s
    assert patience_s(step_s) == pytest.approx(grace_s / 5)
    assert stuck_after_s(step_s) == max(5, 3 * step_s)  # where no signal has come


@pytest.mark.parametrize("wrong", ["", "soon"])
def test_a_wrong_value_is_taken_for_none(monkeypatch, wrong) -> None:
    monkeypatch.setenv(WAIT_ENV, wrong)
    assert patience_s(0.1) == 5
    monkeypatch.setenv(DOOR_ENV, "a door")
    monkeypatch.setenv(FAULT_TIMEOUT_ENV, wrong)
    assert patience_s(0.1) == 1


def test_what_the_user_says_counts_more(monkeypatch) -> None:
    monkeypatch.setenv(DOOR_ENV, "a door")
    monkeypatch.setenv(WAIT_ENV, "7")
    assert patience_s(0.1) == 7
    monkeypatch.setenv(WAIT_ENV, "-1")
    assert patience_s(0.1) == 0
