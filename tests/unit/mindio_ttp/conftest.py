import sys
from pathlib import Path

import pytest
from mindio_ttp import notices, process

sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))

from job import Job

from tests.unit.mindio_ttp.entries import REGISTER


class Steps:
    """A state that counts, as `mindio_ttp.process.State` asks for."""

    def __init__(self):
        self.step, self.calls = 0, []

    def refuse(self, reason):
        self.calls.append(("refuse", reason))

    def spoil(self, reason):
        self.calls.append(("spoil", reason))

    def begin_update(self):
        self.calls.append("begin")

    def end_update(self, number):
        self.step = number
        self.calls.append(number)


@pytest.fixture(autouse=True)
def record():
    """A process that has said nothing yet."""
    notices.forget()
    yield process.reset()
    process.reset()


@pytest.fixture
def steps(record):
    record.state = Steps()
    return record.state


@pytest.fixture
def job(record):
    job = Job()
    job.resume(None)
    yield job
    job.close()


@pytest.fixture
def called(record):
    """What was called, in order; all handlers are registered."""
    called = []
    for name, register in REGISTER.items():
        register(lambda *given, name=name: called.append((name, *given)), f"ctx of {name}")
    return called
