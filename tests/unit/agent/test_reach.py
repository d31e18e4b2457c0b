"""Whether the host of a silent manager answers."""

from __future__ import annotations

import socket
import time

from taskd.agent.link.reach import Reach

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
