"""Whose process MindSpore's scheduler is, and how it ends, by a process that stands in for it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from taskd.msrun.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def running() -> Iterator[subprocess.Popen[bytes]]:
    """A scheduler that does not end by itself."""
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env={**os.environ, "MS_ROLE": "MS_SCHED"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # while a program is begun its environment cannot be read yet
        yield process
        process.kill()


def test_one_that_outlives_its_workers_is_ended_and_that_is_said(
    running: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    Scheduler(None).end(0.05)
    assert running.wait() == -9
    assert f"MindSpore's scheduler (pid {running.pid}) runs 0 s after its workers" in caplog.text


def test_one_that_ends_by_itself_is_let_end(
    running: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    assert running.stdin is not None
    running.stdin.write(b"\n")
    running.stdin.flush()
    Scheduler(None).end(20.0)
    assert running.wait() == 0
    assert not caplog.records


def test_another_child_is_none() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"],
        env={**os.environ, "MS_ROLE": "MS_WORKER"},
        stdin=subprocess.PIPE,
    ) as process:
        Scheduler(None).end(0.0)
        assert process.poll() is None
        process.kill()
