"""Standbys: what a system that has no room for another process does to them."""

from __future__ import annotations

import errno
import gc
import os

import pytest

from taskd.agent.spawning import processes
from taskd.agent.spawning.standby import Standbys


def test_a_fork_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    standbys = Standbys(2, lambda _: os._exit(1))
    gc.collect()  # what other tests have left must not be closed meanwhile
    before = processes.open_descriptors()
    monkeypatch.setattr(os, "fork", no_room)
    for _ in range(2):
        with pytest.raises(OSError, match="temporarily unavailable"):
            standbys.add()
    assert processes.open_descriptors() == before
    assert not standbys.is_full
