"""Kills in the middle of a pass through data, with random numbers from global generators.

The final weights are those of plain torch, without a job.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

STEPS = 6  # of a pass; there are three
SCRIPT = "loading.py"


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, shared_folder: pathlib.Path):
    """The digest without taskd."""

    def digest_of(**env: str) -> str:
        def train() -> list[str]:
            directory = tmp_path_factory.mktemp("reference")
            script = str(harness.SCRIPTS / SCRIPT)
            harness.run_plainly(directory, script, nproc=2, FACTS=str(directory), **env)
            found = harness.facts_in(directory)
            return sorted({fact["digest"] for fact in found if fact["what"] == "returned"})

        (digest,) = harness.once(shared_folder, f"{SCRIPT} {sorted(env.items())}", train)
        return digest

    return digest_of


@pytest.mark.parametrize(
    "faults",
    [
        "1@3:batch:kill",
        f"0@{STEPS - 1}:update:kill",
        f"1@{STEPS}:batch:kill",
        f"1@1:update:kill;0@{STEPS + 2}:batch:kill;1@{2 * STEPS}:batch:kill",
    ],
)
@pytest.mark.parametrize(("data", "workers"), [("skip", "0"), ("skip", "2"), ("stateful", "0")])
def test_a_pass_goes_on_as_if_there_had_been_no_fault(
    tmp_path: pathlib.Path, reference, data: str, workers: str, faults: str
) -> None:
    if data == "stateful" and importlib.util.find_spec("torchdata") is None:
        pytest.skip("there is no torchdata")
    env = {"DATA": data, "LOADER_WORKERS": workers}
    with harness.job(tmp_path, FAULTS=faults, **env) as job:
        finished = job.run(SCRIPT, nproc=2)
        assert finished.returncode == 0, finished.output[-6000:]
        assert len(job.facts("fault")) == len(faults.split(";"))
        assert set(job.digests().values()) == {reference(**env)}
        steps = [(fact["rank"], fact["step"]) for fact in job.facts("committed")]
        assert len(steps) == len(set(steps)), "a step was done again"
        assert {record["strategy"] for record in job.recoveries()} == {"recover-in-place"}
        assert job.manager is not None
        assert job.manager.wait(20).returncode == 0, job.manager.text
        assert job.leftovers() == set()
