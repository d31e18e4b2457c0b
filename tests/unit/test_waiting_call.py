"""A call in a thread of its own: its end is seen by a descriptor, and its result is had once."""

from __future__ import annotations

import select
import threading

import pytest

from taskd.torchrun.waiting_call import WaitingCall

LIMIT_MS = 60_000


def _is_readable(fd: int, limit_ms: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(limit_ms))


def test_the_descriptor_tells_of_the_end() -> None:
    may_end = threading.Event()
    call = WaitingCall("test", lambda: may_end.wait(LIMIT_MS / 1000))
    assert not _is_readable(call.fd, 0)
    may_end.set()
    assert _is_readable(call.fd, LIMIT_MS)
    assert call.result()


def test_what_it_raised_is_raised_again() -> None:
    call = WaitingCall("test", lambda: {}["nothing"])
    assert _is_readable(call.fd, LIMIT_MS)
    with pytest.raises(KeyError, match="nothing"):
        call.result()
