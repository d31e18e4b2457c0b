"""What a rank reports that is stopped by an exception."""

from __future__ import annotations

import types

import pytest

from taskd.core import events
from taskd.worker.process.orders import Orders
from taskd.worker.process.verdict import Verdict


class CrossingError(RuntimeError):
    """While it is described, the Interrupt of a recovery comes, as to another thread."""

    def __init__(self, orders: Orders) -> None:
        super().__init__("a bad sample")
        self._orders = orders

    def __str__(self) -> str:
        with self._orders.condition:
            self._orders.generation, self._orders.must_gate = 4, True
        return "a bad sample"


@pytest.mark.parametrize("may_advance", [False, True])
def test_an_exception_belongs_to_the_generation_in_which_it_was_raised(may_advance: bool) -> None:
    """Of the later one it would be a new fault if the report is repeated after the Resume."""
    orders = Orders(3, must_gate=False)
    told = []
    life = types.SimpleNamespace(
        rank=1,
        incarnation=0,
        records=types.SimpleNamespace(version=7),
        saving=types.SimpleNamespace(versions=tuple),
    )
    uplink = types.SimpleNamespace(tell=lambda kind, cause, **said: told.append((kind, said)))
    Verdict(life, orders, uplink).await_on(  # type: ignore[arg-type]
        CrossingError(orders), clean=True, may_advance=may_advance
    )
    ((kind, said),) = told
    assert orders.generation == 4, "nothing has crossed"
    assert kind is events.WorkerRaised
    assert (said["generation"], said["fault"].version) == (3, 7)
