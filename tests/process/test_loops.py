"""The loops that docs/operations.md shows: evaluations, and two optimizers that step in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow


def run(directory: pathlib.Path, script: str, case: str, fault: str) -> dict[str, Any]:
    """Two ranks: what they returned, and how the job recovered from the fault, if there was one."""
    with harness.job(directory, CASE=case, FAULTS=fault) as job:
        finished = job.run(script, nproc=2)
        assert finished.returncode == 0, job.story()
        assert len(job.facts("fault")) == bool(fault)
        keys = ("rank", "what", "pid", "time")
        best = job.facts_dir / "best.pt"
        return {
            "returned": [
                {key: value for key, value in fact.items() if key not in keys}
                for fact in sorted(job.facts("returned"), key=lambda fact: fact["rank"])
            ],
            "strategies": [record["strategy"] for record in job.recoveries()],
            "saved": torch.load(best) if best.exists() else None,
            "evaluated": [fact["step"] for fact in job.facts("evaluated") if fact["rank"] == 0],
        }


@pytest.fixture(scope="module")
def without_fault(tmp_path_factory):
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def find(script: str, case: str) -> dict[str, Any]:
        if (script, case) not in known:
            known[script, case] = run(tmp_path_factory.mktemp("plain"), script, case, "")
        return known[script, case]

    return find


@pytest.mark.parametrize("fault", ["1@4:evaluation", "1@8:forward", "0@8:forward"])
def test_an_evaluation_at_the_head_of_the_loop_is_done_again_if_its_result_is_lost(
    tmp_path, without_fault, fault
) -> None:
    expected = without_fault("evaluating.py", "head")
    found = run(tmp_path, "evaluating.py", "head", fault)
    assert found["strategies"] == ["recover-in-place"]
    assert found["returned"] == expected["returned"]
    assert found["saved"] == expected["saved"] == {"loss": found["returned"][0]["best"], "step": 8}
    assert sorted(set(found["evaluated"])) == expected["evaluated"] == [4, 8]


def test_one_behind_commit_is_not(tmp_path, without_fault) -> None:
    found = run(tmp_path, "evaluating.py", "behind", "1@8:forward")
    assert found["strategies"] == ["recover-in-place"]
    assert found["evaluated"] == [4, 8]
    assert found["saved"]["step"] == 8
    assert found["saved"]["loss"] < found["returned"][0]["best"], "it fell back to that of step 4"


@pytest.mark.parametrize("fault", ["1@3:critic", "1@3:maker", "0@5:maker"])
def test_a_train_state_for_each_phase_keeps_the_survivors(tmp_path, without_fault, fault) -> None:
    found = run(tmp_path, "two_phases.py", "two", fault)
    assert found["strategies"] == ["recover-in-place"]
    assert found["returned"] == without_fault("two_phases.py", "two")["returned"]


@pytest.mark.parametrize(
    ("fault", "strategy"), [("1@3:critic", "recover-in-place"), ("1@3:maker", "restart")]
)
def test_one_for_both_phases_keeps_them_in_the_first_alone(tmp_path, fault, strategy) -> None:
    assert run(tmp_path, "two_phases.py", "one", fault)["strategies"] == [strategy]
