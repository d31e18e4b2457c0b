"""When a manager that an agent has started ends with its agent."""

from __future__ import annotations

import select
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from taskd.manager.starter import Starter, _door_of, ask_to_leave
from tests.descriptors import none_free

if TYPE_CHECKING:
    from collections.abc import Iterator


_DEADLINE_S = 30.0


@pytest.fixture
def gone() -> Iterator[Starter]:
    """Its agent, of node 1, has ended."""
    ours, theirs = socket.socketpair()
    starter = Starter(theirs, 1)
    assert not starter.ends([], {1}, 10.0)
    ours.close()
    yield starter
    assert theirs.fileno() == -1


def test_what_its_agent_says_last_is_waited_for(gone: Starter) -> None:
    """The job may have succeeded by it, and spares are told."""
    assert not gone.ends(gone.fds, {1}, 10.0)
    assert gone.next_deadline is not None
    assert not gone.ends([], {1}, 10.5)
    assert gone.ends([], set(), 10.6)


def test_an_agent_that_was_killed_says_nothing(gone: Starter) -> None:
    assert not gone.ends(gone.fds, {1}, 10.0)
    until = gone.next_deadline
    assert until is not None
    assert not gone.ends([], {1}, until - 0.01)
    assert gone.ends([], {1}, until)


def test_one_that_has_said_it_before_is_not_waited_for(gone: Starter) -> None:
    assert gone.ends(gone.fds, set(), 10.0)


@pytest.mark.parametrize("nodes", [{0}, {0, 1}])
def test_it_stays_for_others(gone: Starter, nodes: set[int]) -> None:
    assert not gone.ends(gone.fds, nodes, 10.0)
    assert gone.next_deadline is None
    assert not gone.ends([], set(), 20.0)


def test_it_stays_for_others_that_come_meanwhile(gone: Starter) -> None:
    assert not gone.ends(gone.fds, {1}, 10.0)
    assert not gone.ends([], {0, 1}, 20.0)
    assert gone.next_deadline is None


def test_one_that_has_asked_and_gone_does_not_end_it() -> None:
    """It has given up before it was let in."""
    ours, theirs = socket.socketpair()
    starter = Starter(theirs, 0)
    starter.open("test-gone", "127.0.0.1:9601")
    with ours, theirs:
        (_, door) = starter.fds
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(_door_of("test-gone", "127.0.0.1:9601"))
        assert not starter.ends([door], {0}, 10.0)
        assert starter._door is not None
        starter._door.close()


def test_without_a_free_descriptor_it_stays_and_looks_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager.py asks meanwhile, and does not give up: to collect garbage may take seconds."""
    monkeypatch.setattr("taskd.manager.starter._LEAVE_S", _DEADLINE_S)
    ours, theirs = socket.socketpair()
    starter = Starter(theirs, 0)
    starter.open("test-descriptors", "127.0.0.1:9601")
    with ours, theirs:
        (_, door) = starter.fds
        asking = threading.Thread(target=ask_to_leave, args=("test-descriptors", "127.0.0.1:9601"))
        asking.start()
        assert select.select([door], [], [], _DEADLINE_S)[0], "who asks needs a descriptor, too"
        with none_free():
            assert not starter.ends([door], {0}, 10.0)
        assert "cannot be answered: [Errno 24] Too many open files" in caplog.text
        assert starter.fds == [theirs.fileno()], "not looked at again and again"
        until = starter.next_deadline
        assert until is not None
        assert not starter.ends([], {0}, until)
        assert starter.fds == [theirs.fileno(), door]
        assert starter.ends([door], {0}, until)
        assert starter._asking is not None
        assert starter._door is not None
        starter._asking.close()
        starter._door.close()
        asking.join()
