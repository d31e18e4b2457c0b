"""Whether the host of a silent manager answers."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

from taskd.agent.link.reach import Reach
from tests.descriptors import none_free

if TYPE_CHECKING:
    import pytest

LIMIT_S = 20.0


def heard(reach: Reach, address: str) -> bool:
    """What the next event says."""
    reach.miss()
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for event in reach.turn(1.0, address, is_over=False):
            return event.answers
        time.sleep(0.01)
    raise AssertionError(f"nothing is said of {address} within {LIMIT_S} s")


def test_a_host_at_which_somebody_listens_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert heard(Reach(is_wanted=True), f"127.0.0.1:{server.getsockname()[1]}")


def test_a_host_at_which_nobody_listens_answers_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert heard(Reach(is_wanted=True), address)


def test_a_host_that_is_not_there_does_not_answer() -> None:
    assert not heard(Reach(is_wanted=True), "nowhere.invalid:9601")


def test_what_has_not_changed_is_said_once_for_each_silence() -> None:
    reach, address = Reach(is_wanted=True), "nowhere.invalid:9601"
    assert not heard(reach, address)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert heard(reach, f"127.0.0.1:{server.getsockname()[1]}"), "it has changed"
    assert list(reach.turn(2.0, address, is_over=True)) == []
    assert not heard(reach, address)


def test_nothing_is_tried_before_a_manager_is_missed() -> None:
    reach = Reach(is_wanted=True)
    assert [*reach.turn(1.0, "nowhere.invalid:1", is_over=False)] == []
    assert reach._try is None


def test_nothing_is_tried_where_nobody_asks_for_it() -> None:
    reach = Reach(is_wanted=False)
    reach.miss()
    assert [*reach.turn(1.0, "nowhere.invalid:1", is_over=False)] == []
    assert reach._try is None


def doubted(reach: Reach, address: str, caplog: pytest.LogCaptureFixture) -> str:
    """What is said of a host of which nothing is known."""
    reach.miss()
    deadline = time.monotonic() + LIMIT_S
    while not caplog.records:
        assert time.monotonic() < deadline
        assert list(reach.turn(1.0, address, is_over=False)) == [], "that says nothing of the host"
        time.sleep(0.01)
    (record,) = caplog.records
    return record.getMessage()


def test_without_a_free_descriptor_nothing_is_known_of_the_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else this node would count as cut off."""
    reach = Reach(is_wanted=True)
    with none_free():
        said = doubted(reach, "nowhere.invalid:9601", caplog)
    assert "at nowhere.invalid:9601 answers is not known: [Errno 24] Too many open files" in said
    assert not heard(reach, "nowhere.invalid:9601")


def test_without_a_thread_nothing_is_known_of_the_host(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    reach = Reach(is_wanted=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert "answers is not known: can't start new thread" in doubted(
            reach, "127.0.0.1:1", caplog
        )
    assert heard(reach, "127.0.0.1:1")
