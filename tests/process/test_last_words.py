"""A rank that crashes in a real job.

It is recovered, and the log tells where it was, in Python and below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskd.native import library
from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library.load() is None, reason="libtaskd is not built"),
]


def check(job: harness.Job, finished: harness.Finished) -> dict:
    """The job ended well, one fault happened; returns it."""
    assert finished.returncode == 0, finished.output[-6000:]
    assert len(job.facts("fault")) == 1
    assert sorted(job.digests()) == [0, 1, 2, 3]
    assert job.manager is not None
    assert job.manager.wait(20).returncode == 0, job.manager.text
    assert job.leftovers() == set()
    ((fault,),) = (record["faults"] for record in job.recoveries())
    return fault


def test_a_null_pointer_is_recovered_and_the_log_has_both_stacks(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path, FAULTS="1@4:forward:null") as job:
        fault = check(job, job.run())
        assert fault["kind"] == "crashed"
        assert fault["detail"] == "SIGSEGV at address 0x0 (SEGV_MAPERR) in the main thread"
        assert fault["signature"] == "SIGSEGV"
        assert fault["exit_code"] == -11
        log = job.manager.text
        assert (
            "rank 1 crashed (SIGSEGV at address 0x0 (SEGV_MAPERR) in the main thread) in step 4"
        ) in log
        lines = [line for line in log.splitlines() if "  rank 1: " in line]
        assert any("in here" in line for line in lines), log
        assert any("ffi_call" in line for line in lines), log


def test_an_exit_is_explained_if_the_library_is_preloaded_into_everything(
    tmp_path: pathlib.Path,
) -> None:
    with harness.job(
        tmp_path, FAULTS="2@4:forward:exit3", LD_PRELOAD=str(library.LIBRARY_PATH)
    ) as job:
        fault = check(job, job.run())
        assert (fault["kind"], fault["signature"], fault["exit_code"]) == ("exited", "exit 3", 3)
        assert fault["detail"] == "exit 3 called in the main thread"
        assert "in here" in fault["traceback"]
        assert "Native stack" in fault["traceback"]


def test_a_damaged_black_box_silences_nobody_and_its_death_is_recovered_in_place(
    tmp_path: pathlib.Path,
) -> None:
    """Version -7 of a dead worker, generation -7 of a living one.

    All reports of the node were refused, and all processes restarted.
    """
    with harness.job(
        tmp_path, FAULTS="2@2:forward:damage;1@12:forward:damaged-kill", STEPS="16", SLEEP_S="0.2"
    ) as job:
        finished = job.run()
        assert finished.returncode == 0, finished.output[-6000:]
        assert sorted(fact["offset"] for fact in job.facts("damaged")) == [128, 144, 152, 168]
        (record,) = job.recoveries()
        assert (record["strategy"], record["version"]) == ("recover-in-place", 12)
        ((fault,),) = (record["faults"],)
        assert (fault["rank"], fault["kind"], fault["version"], fault["phase"]) == (
            1,
            "killed",
            None,
            "unknown",
        )
        assert (
            "the black box of rank 2 (incarnation 0) is damaged: generation -7 cannot be"
        ) in finished.output
        assert "the black box of rank 1 (incarnation 0) is damaged" in finished.output
        assert "silent" not in finished.output
        assert job.manager is not None
        assert job.manager.wait(20).returncode == 0, job.manager.text
        assert "refused in all: nothing" in job.manager.text
        assert job.leftovers() == set()
