"""Public fakes for tests of taskd and of programs that use it. Does not import pytest."""

from taskd.testing.clock import FakeClock
from taskd.testing.liveness import Stuck
from taskd.testing.network import MemoryNetwork, NetworkQuality
from taskd.testing.script import FaultScript, Trouble
from taskd.testing.simulation import Result, SimulatedJob

__all__ = [
    "FakeClock",
    "FaultScript",
    "MemoryNetwork",
    "NetworkQuality",
    "Result",
    "SimulatedJob",
    "Stuck",
    "Trouble",
]
