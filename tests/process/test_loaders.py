"""Which samples a job reads that has lost a process within a pass over its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.process import harness

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.slow

PASSES, BATCHES, BATCH = 3, 6, 4
WARNED = "a pass of a DataLoader that draws its order from a generator"


def read_by(facts: Iterable[dict[str, Any]]) -> dict[tuple[int, int], list[int]]:
    """By rank and step, the samples of its batch: the same each time that it is tried."""
    found: dict[tuple[int, int], list[int]] = {}
    for fact in facts:
        if fact["what"] == "commits":
            step = fact["rank"], fact["step"]
            assert found.setdefault(step, fact["ids"]) == fact["ids"], step
    return found


def weights(facts: Iterable[dict[str, Any]]) -> dict[int, Any]:
    return {fact["rank"]: fact["weights"] for fact in facts if fact["what"] == "returned"}


def passes(read: dict[tuple[int, int], list[int]], rank: int) -> list[list[int]]:
    """The samples of each pass of this rank, in order."""
    samples = [sample for step in range(PASSES * BATCHES) for sample in read[rank, step]]
    size = BATCHES * BATCH
    return [samples[begin : begin + size] for begin in range(0, len(samples), size)]


@pytest.mark.parametrize("case", ["stateful", "sampler"])
def test_each_sample_is_read_once_in_each_pass_as_without_a_fault(tmp_path, case: str) -> None:
    """Both ranks die, one after the other, in different passes; the first batch of one, too."""
    if case == "stateful":
        pytest.importorskip("torchdata.stateful_dataloader")
    plain = tmp_path / "plain"
    plain.mkdir()
    script = str(harness.SCRIPTS / "loading.py")
    harness.run_plainly(plain, script, nproc=2, FACTS=str(plain), CASE=case)
    expected = harness.facts_in(plain)
    with harness.job(
        tmp_path / "job", CASE=case, FAULTS="1@3:forward;0@6:forward;0@10:forward"
    ) as job:
        finished = job.run("loading.py", nproc=2)
        assert finished.returncode == 0, job.story()
        assert len(job.facts("fault")) == 3
        assert [record["steps_redone"] for record in job.recoveries()] == [0, 0, 0]
        found = harness.facts_in(job.facts_dir)
        assert WARNED not in finished.output
    read = read_by(found)
    assert read == read_by(expected)
    assert weights(found) == weights(expected)
    for rank in range(2):
        for samples in passes(read, rank):
            assert len(set(samples)) == BATCHES * BATCH
    orders = [order for rank in range(2) for order in passes(read, rank)]
    assert len({tuple(order) for order in orders}) == 2 * PASSES, "nothing was shuffled"


def test_an_order_that_nothing_carries_is_warned_of(tmp_path) -> None:
    with harness.job(tmp_path, CASE="shuffled", FAULTS="1@3:forward") as job:
        finished = job.run("loading.py", nproc=2)
        assert finished.returncode == 0, job.story()
        assert len(job.facts("fault")) == 1
        assert WARNED in finished.output
        found = job.facts("commits")
        samples = [
            sample
            for fact in found
            if fact["rank"] == 1 and fact["step"] < BATCHES
            for sample in fact["ids"]
        ]
        assert len(samples) == BATCHES * BATCH
        assert len(set(samples)) < len(samples), "it is exact: the warning is for nothing"
