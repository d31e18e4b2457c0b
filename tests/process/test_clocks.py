"""A job of two nodes whose clocks are an hour apart."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from testbed.processes import torchrun
from tests.process import harness
from tests.process.test_recovery import check_recovered, reference  # noqa: F401

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

pytestmark = pytest.mark.slow

LIMIT_S = 90
AHEAD_S = 3600
# A time namespace (time_namespaces(7)), for all that the command starts.
LATER = ("unshare", "--time", f"--monotonic={AHEAD_S}", f"--boottime={AHEAD_S}", "--fork")


def _uptime(*prefix: str) -> float:
    text = subprocess.run(
        [*prefix, "cat", "/proc/uptime"], check=True, capture_output=True, text=True
    ).stdout
    return float(text.split()[0])


@pytest.mark.extended("nearest: test_nodes.py: nodes whose clocks agree")
@pytest.mark.parametrize("lost", [1, 3])
def test_a_rank_is_replaced_on_either_node(
    tmp_path: pathlib.Path,
    reference: Callable[..., dict[int, str]],  # noqa: F811
    lost: int,
) -> None:
    if shutil.which("unshare") is None or subprocess.run([*LATER, "true"], check=False).returncode:
        pytest.skip("unshare(1) cannot make a time namespace here")
    assert _uptime(*LATER) - _uptime() > AHEAD_S - 60
    settings = {"TASKD_FAULT_TIMEOUT": "6", "FAULTS": f"{lost}@5:forward:told-kill"}
    with harness.job(tmp_path, STEPS="20", SLEEP_S="0.05", **settings) as job:
        job.start_manager()
        options = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={job.master_port}")
        first = job.start_agent("train.py", nproc=2, options=(*options, "--node-rank=0"))
        script = str(harness.SCRIPTS / "train.py")
        second = harness.Output(
            [*LATER, *torchrun(script, *options, "--node-rank=1", nproc=2)],
            job.env,
            tmp_path / "later.out",
            tmp_path,
        )
        job.agents.append(second)
        for node in (first, second):  # a fault does not wait long for a manager that never was
            node.wait_text("joined the manager at", LIMIT_S)
        job.tell()
        assert second.wait(LIMIT_S).returncode == 0, second.text
        finished = first.wait(LIMIT_S)
        check_recovered(job, finished, reference(STEPS="20"), faults=1, replaced={lost})
        (record,) = job.recoveries()
        assert record["strategy"] == "recover-in-place"
        assert record["steps_redone"] == 0
        parts = [value for name, value in record.items() if name.endswith("_s")]
        assert parts
        assert all(value is None or 0 <= value < LIMIT_S for value in parts), record
