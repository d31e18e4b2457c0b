"""Training processes are given neither the secret of the job nor a key: nor in their memory."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from taskd import keys
from testbed.proc import descendants
from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

LIMIT_S = 60.0


def holds(pid: int, needle: bytes) -> bool:
    """Whether a process has this anywhere in what it can write to."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            fields = line.split()
            if not fields[1].startswith("rw"):
                continue
            first, last = (int(address, 16) for address in fields[0].split("-"))
            try:
                memory.seek(first)
                data = memory.read(last - first)
            except OSError:
                continue  # not mapped any more, or a device's
            if needle in data:
                return True
    return False


def started(job: harness.Job, count: int) -> list[dict]:
    deadline = time.monotonic() + LIMIT_S
    while len(job.facts("started")) < count:
        assert time.monotonic() < deadline, job.story()
        time.sleep(0.05)
    return job.facts("started")


@pytest.mark.parametrize("forkserver", ["fork", "exec"])
def test_workers_and_replacements_have_neither_the_secret_nor_its_path(
    tmp_path: pathlib.Path, forkserver: str
) -> None:
    path = tmp_path / "secret"
    assert keys.main(["new", "--out", str(path)]) == 0
    secret = path.read_bytes().strip()
    env = {"TASKD_SECRET_FILE": str(path), "TASKD_FORKSERVER": forkserver}
    with harness.job(tmp_path, **env) as job:
        job.start_manager().wait_text("listens on", LIMIT_S)
        agent = job.start_agent("secretless.py", nproc=2, TASKD_MANAGER="auto")  # checks more
        first = started(job, 2)
        agent.wait_text("joined the manager", LIMIT_S)
        os.kill(first[0]["pid"], signal.SIGKILL)
        all_started = started(job, 4)  # both anew: this script knows nothing of taskd
        assert {fact["secret_file"] for fact in all_started} == {None}
        workers = {fact["pid"] for fact in all_started} & descendants(agent.process.pid)
        assert len(workers) == 2
        assert holds(agent.process.pid, secret), "the agent needs it: the search works"
        others = descendants(agent.process.pid)
        assert workers < others, "the forkserver is among them"
        assert {pid for pid in others if holds(pid, secret)} == set()
