"""Where a spare looks for the manager: at several addresses, at names that change their meaning.

As of a pod that was replaced: for a while its name still means the address of the former one.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.process import harness

if TYPE_CHECKING:
    import pathlib

LIMIT_S = 60
# In a mount namespace with an /etc/hosts of its own.
_WITH_HOSTS = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'
_WAIT = """
from taskd import log
from taskd.agent.clients.spare import SpareClient
from taskd.agent.link.electing import Electing
from taskd.clock import MonotonicClock
from taskd.config import AgentConfig

config = AgentConfig.load()
log.setup(config.log, job_id=config.job_id, role="spare")
electing = Electing(config, MonotonicClock(), "a spare")
with SpareClient(config, "here", MonotonicClock(), electing=electing) as client:
    print(client.wait())
electing.close()
"""

pytestmark = pytest.mark.slow


def _spare(job: harness.Job, address: str, *prefix: str) -> harness.Output:
    """A spare without torch, which looks for the manager there."""
    spare = harness.Output(
        [*prefix, sys.executable, "-c", _WAIT],
        job.env | {"TASKD_MANAGER_ADDR": address},
        job.directory / "spare.out",
        job.directory,
    )
    job.agents.append(spare)
    return spare


def _means(names: pathlib.Path, address: str) -> None:
    """From now on the name of the manager means this. In place: the file is mounted."""
    names.write_text(f"127.0.0.1 localhost\n{address} the-manager\n")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="a private /etc/hosts needs root and unshare(1)",
)
def test_a_spare_finds_the_manager_at_the_address_that_its_name_gets(
    tmp_path: pathlib.Path,
) -> None:
    """At first nobody is where the name points; then the manager moves, with its name."""
    names = tmp_path / "hosts"
    _means(names, "127.0.0.9")
    with harness.job(tmp_path / "job", TASKD_RECOVER_STRATEGY="recover") as job:
        first = job.start_manager(POD_IP="127.0.0.2")
        first.wait_text("listens on", LIMIT_S)
        with_hosts = ("unshare", "--mount", "sh", "-c", _WITH_HOSTS, "sh", str(names))
        spare = _spare(job, "the-manager", *with_hosts)
        spare.wait_text(f"looked for at the-manager:{job.port} (127.0.0.9)", LIMIT_S)
        assert "joined" not in spare.text
        _means(names, "127.0.0.2")
        first.wait_text("a spare waits on here", LIMIT_S)
        os.kill(first.process.pid, signal.SIGKILL)
        assert first.wait(LIMIT_S).returncode == -signal.SIGKILL
        _means(names, "127.0.0.3")
        second = job.start_manager(POD_IP="127.0.0.3")
        second.wait_text("a spare waits on here", LIMIT_S)


def test_a_spare_looks_for_the_manager_at_one_address_after_the_other(
    tmp_path: pathlib.Path,
) -> None:
    """Also when it is somewhere else later: all are asked again."""
    with harness.job(tmp_path, TASKD_RECOVER_STRATEGY="recover", TASKD_FAULT_TIMEOUT="6") as job:
        first = job.start_manager(POD_IP="127.0.0.3")
        first.wait_text("listens on", LIMIT_S)
        spare = _spare(job, "127.0.0.2,127.0.0.3,127.0.0.4")
        first.wait_text("a spare waits on here", LIMIT_S)
        os.kill(first.process.pid, signal.SIGKILL)
        assert first.wait(LIMIT_S).returncode == -signal.SIGKILL
        second = job.start_manager(POD_IP="127.0.0.2")
        second.wait_text("a spare waits on here", LIMIT_S)
        assert f"looked for at 127.0.0.4:{job.port}" in spare.text
