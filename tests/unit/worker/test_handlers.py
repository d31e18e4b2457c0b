"""Signal handlers of the script that raise while taskd's own code runs."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from job import Stop
from torch import nn

from taskd.worker.objects import shards
from taskd.worker.process.handlers import Handlers
from taskd.worker.train_state import TrainState

if TYPE_CHECKING:
    from collections.abc import Iterator

SAID = "rank 3: a signal handler of the script has raised between two entries"


class LateError(RuntimeError):
    """What the handler raises."""


def give_up(_number: int, _frame: Any) -> None:
    raise LateError("too late")


@pytest.fixture
def handlers() -> Iterator[Handlers]:
    former = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    signal.signal(signal.SIGUSR1, give_up)
    handlers = Handlers(3)
    yield handlers
    handlers.put_back()
    for number, handler in former.items():
        signal.signal(number, handler)


def raise_signal(number: int = signal.SIGUSR1) -> None:
    os.kill(os.getpid(), number)


def park(job: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Park the state of an entry; the signal comes in the middle."""
    forget = shards.forget_meshes

    def interrupted() -> None:
        raise_signal()
        forget()

    monkeypatch.setattr(shards, "forget_meshes", interrupted)

    def entry() -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.commit()
        raise Stop

    return job.enter(entry)[1]


def test_parking_is_complete_all_the_same(job, monkeypatch, handlers, caplog) -> None:
    handlers.replace()
    report = park(job, monkeypatch)
    assert (report.version, report.clean) == (1, True)
    assert list(job.life.records.parked) == ["train"]
    assert SAID in caplog.text
    assert "is dropped: LateError: too late" in caplog.text


def test_without_that_it_is_cut_short(job, monkeypatch, handlers) -> None:
    with pytest.raises(LateError):
        park(job, monkeypatch)
    handlers.put_back()  # nothing to do


def test_the_same_is_said_once(handlers, caplog) -> None:
    handlers.replace()
    handlers.replace()
    raise_signal()
    raise_signal()
    assert caplog.text.count(SAID) == 1


def test_the_script_has_its_own_again(handlers) -> None:
    handlers.replace()
    assert signal.getsignal(signal.SIGUSR1) is not give_up
    handlers.put_back()
    assert signal.getsignal(signal.SIGUSR1) is give_up
    with pytest.raises(LateError):
        raise_signal()


def test_one_that_came_meanwhile_stays(handlers) -> None:
    handlers.replace()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    handlers.put_back()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_process_gets_through(handlers, kind) -> None:
    def end(_number: int, _frame: Any) -> None:
        raise kind

    signal.signal(signal.SIGUSR1, end)
    handlers.replace()
    with pytest.raises(kind):
        raise_signal()


def test_those_that_are_to_end_it_are_left_alone(handlers) -> None:
    signal.signal(signal.SIGTERM, give_up)
    handlers.replace()
    assert signal.getsignal(signal.SIGTERM) is give_up


def test_one_that_raises_while_it_is_replaced(handlers, monkeypatch, caplog) -> None:
    """A signal comes before its handler's turn."""
    real, pending = signal.signal, [signal.SIGUSR1]

    def set_handler(number: int, handler: Any) -> Any:
        if pending and number == signal.SIGUSR1:
            raise_signal(pending.pop())
        return real(number, handler)

    monkeypatch.setattr(signal, "signal", set_handler)
    handlers.replace()
    assert SAID in caplog.text
    raise_signal()


def test_what_empties_caches_is_imported_before(job, monkeypatch) -> None:
    import torch.distributed.tensor.debug

    monkeypatch.delitem(sys.modules, "torch.distributed.tensor.debug")
    monkeypatch.delattr(torch.distributed.tensor, "debug")
    job.enter(lambda: TrainState(model=nn.Linear(1, 1)))
    assert "torch.distributed.tensor.debug" in sys.modules
