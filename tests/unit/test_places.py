"""Which torchruns have no place in a job, and what they are told."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

import taskd
from taskd.config import AgentConfig
from taskd.torchrun.meeting import Meeting
from taskd.torchrun.places import Places

SPEC = types.SimpleNamespace(local_world_size=4)
MEETING = Meeting(0, "prefix", 2, 4, "localhost", 1, torch.__version__, taskd.__version__)


def static(rank: int, world_size: int) -> Places:
    inner = types.SimpleNamespace(
        rank=rank,
        world_size=world_size,
        get_backend=lambda: "static",
        next_rendezvous=lambda: pytest.fail("it waits for the others"),
    )
    return Places(inner, SPEC, AgentConfig.load({}), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [2, 3])
def test_a_number_that_no_node_has_is_refused_before_it_waits(rank: int) -> None:
    with pytest.raises(SystemExit) as ended:
        static(rank, 2).next_rendezvous()
    said = f"taskd: --node-rank={rank} is none of the nodes 0 to 1 that --nnodes=2 says: "
    assert str(ended.value).startswith(said)
    assert "TASKD_SPARE=1" in str(ended.value)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({}, None),
        ({"torch_version": "0.4"}, f"it has torch {torch.__version__}, the job has 0.4"),
        ({"taskd_version": "9.9"}, f"it has taskd {taskd.__version__}, the job has 9.9"),
        ({"local_world_size": 8}, "it has --nproc-per-node 4, the job has 8"),
    ],
)
def test_a_spare_says_in_what_it_differs(theirs: dict[str, object], said: str | None) -> None:
    meeting = dataclasses.replace(MEETING, **theirs)  # type: ignore[arg-type]
    assert meeting.objection(SPEC) == said  # type: ignore[arg-type]
