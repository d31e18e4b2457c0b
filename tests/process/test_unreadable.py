"""Checkpoints that cannot be read for a moment, when the job starts from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

# A file is in the place of the folder when rank 0 looks for checkpoints the first time.
SCRIPT = """
import os, pathlib, runpy

from taskd.worker.restore import loading
from testbed.script import RANK, fact, is_first

folder = pathlib.Path(os.environ["TASKD_CHECKPOINT_DIR"])
choose = loading.choose


def choose_once_in_vain(*arguments):
    if RANK or not is_first("unreadable"):
        return choose(*arguments)
    away = folder.rename(folder.with_suffix(".away"))
    folder.touch()
    try:
        return choose(*arguments)
    except BaseException as error:
        fact("unreadable", error=repr(error))
        raise
    finally:
        folder.unlink()
        away.rename(folder)


if os.environ["STEPS"] == "16":
    loading.choose = choose_once_in_vain
runpy.run_path(os.environ["TRAIN"], run_name="__main__")
"""


def test_a_job_does_not_begin_again_because_its_checkpoint_could_not_be_read_once(
    tmp_path: pathlib.Path,
) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    env = {
        "TASKD_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        "TRAIN": str(harness.SCRIPTS / "train.py"),
        "SAVE_EVERY": "4",
    }
    with harness.job(tmp_path / "whole", STEPS="16", **env | {"SAVE_EVERY": "0"}) as job:
        assert job.run(nproc=2).returncode == 0
        digests = job.digests()
    with harness.job(tmp_path / "first", STEPS="8", **env) as job:
        assert job.run(str(script), nproc=2).returncode == 0
    with harness.job(tmp_path / "second", STEPS="16", **env) as job:
        finished = job.run(str(script), nproc=2)
        assert finished.returncode == 0, finished.output[-6000:]
        (unreadable,) = job.facts("unreadable")
        assert "CheckpointError" in unreadable["error"]
        assert min(fact["step"] for fact in job.facts("committed")) == 9
        assert job.digests() == digests
