"""What process tests have of `testbed`, and what only tests need.

A result shared by test processes, and a training without taskd to compare with.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import sys
import time
from typing import TYPE_CHECKING, TypeVar

import pytest

from testbed.facts import facts_in
from testbed.hosts import Hosts, missing
from testbed.job import SCRIPTS, Job, job
from testbed.proc import MARK_ENV, descendants, marked, state_of
from testbed.processes import ROOT, TORCHRUNS, Finished, Output, environment, free_port

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

__all__ = [
    "MARK_ENV",
    "ROOT",
    "SCRIPTS",
    "TORCHRUNS",
    "Finished",
    "Job",
    "Output",
    "descendants",
    "environment",
    "facts_in",
    "free_port",
    "hosts",
    "job",
    "marked",
    "once",
    "run_plainly",
    "silence_of",
    "state_of",
    "wait_for_step",
    "wait_until",
]

T = TypeVar("T")


def once(folder: pathlib.Path, name: str, make: Callable[[], T]) -> T:
    """What `make` returns (as JSON), made once for all test processes that share `folder`."""
    path = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(json.dumps(make()))
        return json.loads(path.read_text())


@contextlib.contextmanager
def hosts(directory: pathlib.Path, count: int) -> Iterator[Hosts]:
    """So many hosts; skips the test where there can be none."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(directory, count) as found:
        yield found


def silence_of(node_rank: int, least_s: float, text: str) -> str:
    """The words in `text` for a node that was lost because its agent was silent for so long.

    Longer, where the manager itself stood still meanwhile.
    """
    found = re.search(rf"the agent of node {node_rank} has been silent for (\d+) s", text)
    assert found is not None, text
    assert int(found[1]) >= least_s, text
    return found[0]


def run_plainly(
    directory: pathlib.Path,
    script: str,
    *arguments: str,
    nproc: int,
    timeout_s: float = 120,
    **env: str,
) -> str:
    """Train without taskd: `nproc` processes with the variables that torchrun sets.

    Returns what they printed; all ended with 0.
    """
    group = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        Output(
            [sys.executable, str(ROOT / "testbed" / "plainly.py"), script, *arguments],
            environment(**group, RANK=str(rank), LOCAL_RANK=str(rank), **env),
            directory / f"plain{rank}.out",
            directory,
            warm=TORCHRUNS,
        )
        for rank in range(nproc)
    ]
    try:
        ended = [rank.wait(timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    text = "\n".join(finished.output for finished in ended)
    assert all(finished.returncode == 0 for finished in ended), text[-6000:]
    return text


def wait_for_step(job: Job, step: int) -> None:
    """Until every rank has committed `step`."""

    def everyone() -> bool:
        done = {fact["rank"] for fact in job.facts("committed") if fact["step"] >= step}
        return len(done) >= 2 and done == {fact["rank"] for fact in job.facts("entered")}

    wait_until(job, everyone)


def wait_until(job: Job, said: Callable[[], T]) -> T:
    """Until `said` returns something true; what it returned.

    With a deadline, and the job's own words when it passes.
    """
    patience = job.patience(60)
    while not (answer := said()):
        if not patience.left_s():
            raise TimeoutError(f"not within {patience}:\n{job.story()}")
        time.sleep(0.02)  # between two looks at the facts
    return answer
