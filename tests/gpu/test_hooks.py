"""What the preloaded libtaskd sees of the real NCCL, and that it leaves its results alone."""

from __future__ import annotations

import pathlib
import re
from typing import TYPE_CHECKING

from taskd.native.library import LIBRARY_PATH
from tests.gpu.test_recovery import NCCL, RANKS
from tests.process import harness

if TYPE_CHECKING:
    from collections.abc import Sequence

SCRIPT = str(pathlib.Path(__file__).parent / "scripts" / "collectives.py")


def facts_of(tmp_path: pathlib.Path, *faults: str, preload: bool = True) -> Sequence[dict]:
    """What the ranks noted at the end of a job with these collectives."""
    env = NCCL | {"BACKEND": "nccl", "FAULTS": ";".join(faults)}
    if preload:
        env["LD_PRELOAD"] = str(LIBRARY_PATH)
    with harness.job(tmp_path, **env) as job:
        finished = job.run(SCRIPT, nproc=RANKS["nccl"], timeout_s=120)
        assert finished.returncode == 0, finished.output[-6000:]
        return job.facts("seen")


def test_every_collective_is_seen_under_its_name(tmp_path: pathlib.Path) -> None:
    seen = facts_of(tmp_path)
    assert len(seen) == RANKS["nccl"]
    for fact in seen:
        assert fact["preloaded"]
        names = [call["name"] for call in fact["calls"]]
        assert {"ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclSend", "ncclRecv"} & {
            *names
        } == {"ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclSend", "ncclRecv"} - {
            "ncclSend" if fact["rank"] else "ncclRecv"
        }, names
        assert any(re.fullmatch("nccl, 2 ranks", one["name"]) for one in fact["communicators"])
    # one identity on both ranks, and as many collectives
    first, second = ({(c["id"], c["entered"]) for c in fact["communicators"]} for fact in seen)
    assert first & second


def test_results_are_those_without_it(tmp_path: pathlib.Path) -> None:
    with_it = facts_of(tmp_path / "with")
    without = facts_of(tmp_path / "without", preload=False)
    assert not any(fact["preloaded"] for fact in without)
    assert {fact["rank"]: fact["sums"] for fact in with_it} == {
        fact["rank"]: fact["sums"] for fact in without
    }
