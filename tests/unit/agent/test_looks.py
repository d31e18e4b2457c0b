"""What an agent remembers from one look at its workers to the next."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import pytest

from taskd.agent.vitals import activity as kernel
from taskd.agent.vitals import progress as vitals
from taskd.native.black_box import BlackBox, Phase


@dataclass
class Worker:
    pid: int | None
    box: BlackBox
    incarnation: int = 0


@pytest.fixture
def box():
    made = BlackBox.create()
    made.begin(os.getpid(), 0)
    made.mark_phase(Phase.FORWARD)
    made.mark_phase(Phase.BACKWARD)
    yield made
    made.close()


def test_the_time_in_each_phase_is_told_every_ten_seconds(box) -> None:
    """It makes a heartbeat larger, and changes little from one to the next."""
    eyes, now = vitals.Vitals(), time.monotonic()
    told = [
        bool(eyes.look(now + after_s, 1.0, {0: Worker(None, box)})[0].times)
        for after_s in (0.0, 1.0, 9.9, 10.0, 11.0, 20.0)
    ]
    assert told == [True, False, False, True, False, True]


def test_a_life_that_is_gone_is_forgotten(box) -> None:
    """Thousands come and go in a long job."""
    eyes, now = vitals.Vitals(), time.monotonic()
    for incarnation in range(3):
        worker = Worker(os.getpid(), box, incarnation)
        eyes.look(now + 60.0, 1.0, {0: worker})
        eyes.look(now + 61.0, 1.0, {0: worker})
        assert set(eyes._activity) == {(0, incarnation)}, "it stands, and is looked at closely"
        eyes._held_at[0, incarnation] = now
    eyes.look(now + 62.0, 1.0, {})
    assert eyes._activity == {}
    assert eyes._held_at == {}


def test_without_threads_there_is_nothing_that_wants_a_processor() -> None:
    looks = [kernel.Activity(at, 1.0, 1.0, 0.0, 0, 0) for at in (100.0, 102.0)]
    assert looks[1].longest_runnable_s(looks[0]) == 0.0
