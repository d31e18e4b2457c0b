"""Bytes that are not UTF-8: file names, variables and arguments on Linux may have them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.test_recovery import check_recovered, reference  # noqa: F401

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

ODD = os.fsdecode(b"odd \xff\xfe")
_NOTE = """
fact(
    "bytes",
    variable=os.environb[b"VARIABLE"].hex(),
    script=os.fsencode(sys.argv[0]).hex(),
    argument=os.fsencode(sys.argv[1]).hex(),
)
"""


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_a_worker_and_its_replacement_get_the_same_bytes(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
    start: str,
) -> None:
    """The script, what it is told, where it runs, where it saves, where log and records go."""
    script = tmp_path / ODD / f"{ODD}.py"
    script.parent.mkdir()
    script.write_text((harness.SCRIPTS / "train.py").read_text() + _NOTE)
    env = {"VARIABLE": ODD, "FAULTS": "1@5:forward:kill", "SAVE_EVERY": "4"}
    with harness.job(script.parent, **env, TASKD_FORKSERVER=start) as job:
        job.start_manager()
        finished = job.start_agent(str(script), ODD).wait(90)
        check_recovered(job, finished, reference(), faults=1, replaced={1})
        odd = os.fsencode(ODD)
        facts = job.facts("bytes")
        assert {fact["rank"] for fact in facts} == {0, 1, 2, 3}
        for fact in facts:
            assert bytes.fromhex(fact["variable"]) == bytes.fromhex(fact["argument"]) == odd
            assert bytes.fromhex(fact["script"]) == os.fsencode(script)
        (record,) = job.recoveries()
        assert record["steps_redone"] == 0
        assert os.listdir(script.parent / "taskd_checkpoints")


def test_a_job_whose_folders_have_such_names_is_saved_and_goes_on(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    faults = "1@3:step:always-kill"
    with harness.job(tmp_path / ODD, FAULTS=faults, TASKD_RECOVER_STRATEGY="dump") as job:
        ended = job.run()
        assert ended.returncode == 2, ended.output[-4000:]
        assert "step 3 was saved in" in ended.last_line
        assert job.manager is not None
        assert job.manager.wait(20).returncode == 1
        assert len(os.listdir(tmp_path / ODD / "taskd_checkpoints")) == 1
        finished = job.run(FAULTS="")
        assert finished.returncode == 0, finished.output[-4000:]
        assert {fact["step"] for fact in job.facts("restored")[-4:]} == {3}
        assert job.manager.wait(20).returncode == 0
        assert job.digests() == reference()
        assert job.leftovers() == set()


@pytest.mark.parametrize("variable", ["MINDX_TASK_ID", "TASKD_HOST", "POD_IP"])
def test_a_name_that_others_are_told_is_refused_before_anything_runs(
    tmp_path: pathlib.Path, variable: str
) -> None:
    with harness.job(tmp_path, **{variable: ODD}) as job:
        finished = job.start_agent("train.py").wait(60)
        assert finished.returncode == 1
        assert finished.last_line.endswith(
            rf"{variable}='odd \udcff\udcfe' is not accepted: "
            r"expected text in UTF-8; \udcXX is a byte XX that is none"
        )
        assert job.facts() == []
        if variable != "TASKD_HOST":  # no business of the manager's
            manager = job.start_manager().wait(60)
            assert manager.returncode == 2
            assert variable in manager.last_line
        assert job.leftovers() == set()
