"""A job whose nodes find each other, and the manager, by an IPv6 address."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.harness import wait_for_step, wait_until
from tests.process.test_recovery import (
    check_recovered,
    reference,  # noqa: F401
)

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

pytestmark = pytest.mark.slow

LIMIT_S = 90


def _missing() -> str | None:
    """Why there can be no such job here."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        return f"there is no IPv6 on the loopback interface: {error}"
    return None


@pytest.mark.parametrize(
    ("bind", "find"),
    [
        ("[::1]", "::1"),
        ("::", "[::1]"),
        pytest.param("", "", id="automatic"),
    ],
)
def test_a_rank_and_then_a_whole_node_are_replaced(
    tmp_path: pathlib.Path,
    reference: Callable[..., dict[int, str]],  # noqa: F811
    bind: str,
    find: str,
) -> None:
    """`bind` and `find`: settings of the manager and of the agents; "": they choose themselves."""
    reason = _missing()
    if reason is not None:
        pytest.skip(reason)
    settings = {"TASKD_RECOVER_STRATEGY": "recover-in-place,recover", "TASKD_FAULT_TIMEOUT": "6"}
    faults = "3@5:forward:told-kill;0@30:step:told-go-on"
    settings |= {"STEPS": "40", "SLEEP_S": "0.05", "FAULTS": faults}
    settings |= {"TASKD_MANAGER_ADDR": find} if find else {"TASKD_MANAGER": "auto"}
    with harness.job(tmp_path, **settings) as job:
        if bind:
            job.start_manager(TASKD_BIND_ADDR=bind)

        def start(node_rank: int) -> harness.Output:
            options = ("--nnodes=2", f"--node-rank={node_rank}")
            options += ("--master-addr=::1", f"--master-port={job.master_port}")
            return job.start_agent("train.py", nproc=2, options=options)

        nodes = [start(node_rank) for node_rank in range(2)]
        for node in nodes:  # a fault does not wait long for a manager that never was
            node.wait_text("joined the manager at", LIMIT_S)
        job.tell(0)
        wait_for_step(job, 12)
        (record,) = wait_until(job, job.recoveries)
        assert record["strategy"] == "recover-in-place"
        os.kill(nodes[1].process.pid, signal.SIGKILL)
        job.tell(1)
        assert nodes[1].wait(LIMIT_S).returncode == -signal.SIGKILL
        nodes[1] = start(1)
        assert nodes[1].wait(LIMIT_S).returncode == 0, nodes[1].text
        finished = nodes[0].wait(LIMIT_S)
        if bind:
            check_recovered(job, finished, reference(STEPS="40"), faults=2, replaced={2, 3})
            assert "joined the manager at [::1]:" in nodes[0].text
        else:
            assert finished.returncode == 0, finished.output
            assert job.digests() == reference(STEPS="40")
            assert f"listens on [::]:{job.port}" in nodes[0].text
        strategies = [record["strategy"] for record in job.recoveries()]
        assert strategies == ["recover-in-place", "recover"]
