"""The loop of Megatron's kind: equal weights after a kill; a dump, and what goes on from it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.examples.test_examples import (
    EXAMPLES,
    ended_well,
    finals,
    run_and_kill,
    run_plainly,
    start,
)
from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

SCRIPT = EXAMPLES / "megatron_ttp.py"
PATH = f"{harness.ROOT}:{harness.ROOT / 'packages' / 'mindio_ttp'}"


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were installed."""
    monkeypatch.setenv("PYTHONPATH", PATH)


def test_it_loses_a_rank_and_ends_with_the_same_weights(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path, PYTHONPATH=PATH) as job:
        hurt = run_and_kill(job, SCRIPT, "--train-iters", "60", rank=0, at=("optimizer", 40))
        (record,) = job.recoveries()
        assert (record["strategy"], record["steps_redone"]) == ("recover-in-place", 0)
    assert finals(hurt) == finals(run_plainly(tmp_path, SCRIPT, "--train-iters", "60")) != []


def test_it_is_saved_by_its_handlers_and_goes_on_from_that(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path, PYTHONPATH=PATH, TASKD_RECOVER_STRATEGY="dump") as job:
        arguments = ("--train-iters", "60", "--save", str(tmp_path / "saved"))
        finished = start(job, SCRIPT, *arguments, rank=1, at=("optimizer", 40))
        assert finished.returncode == 2, finished.output[-4000:]
        assert job.manager is not None
        job.manager.wait(20)
        (name,) = os.listdir(tmp_path / "saved")
        assert name in {"iter_0000039.pt", "iter_0000040.pt"}
        finished = start(job, SCRIPT, *arguments, rank=1, at=("optimizer", 40))
        ended_well(job, finished)
        assert finished.output.count(f"goes on from {tmp_path / 'saved' / name}") == 2
    assert finals(finished.output) == finals(run_plainly(tmp_path, SCRIPT, "--train-iters", "60"))
