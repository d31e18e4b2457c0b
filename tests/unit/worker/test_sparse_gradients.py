"""DDP with an embedding whose gradients are sparse: each has a bucket of its own."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from job import Job, Stop
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from taskd.core.commands import Move
from taskd.worker.state import buckets
from taskd.worker.train_state import TrainState

STEPS = 5
FAULT = 1  # when the layout is foreseen, and DDP has not yet told of its own


class Model(nn.Module):
    """The sparse ones lie between dense ones, in the order of parameters and of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.words = nn.Embedding(10, 4, sparse=True)
        self.bags = nn.EmbeddingBag(9, 4, sparse=True, mode="sum")
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(self.words(x)) + self.bags(x[:, None])
        return self.last(inner).square().mean()  # type: ignore[no-any-return]


def train(member: Any, is_faulty: bool) -> Any:
    """On each rank of a World: weights, and what was logged."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("taskd").addHandler(handler)
    job, stops = Job(member.rank, member.size), [FAULT] if is_faulty else []
    buckets.install()

    def entry() -> Any:
        torch.manual_seed(0)
        model = Model()
        ddp = DistributedDataParallel(model)
        sparse = torch.optim.SparseAdam(
            [*model.words.parameters(), *model.bags.parameters()], lr=0.1
        )
        dense = torch.optim.SGD([*model.first.parameters(), *model.last.parameters()], lr=0.1)
        state = TrainState(model=model, sparse=sparse, dense=dense)
        state.restore()
        while state.step < STEPS:
            sparse.zero_grad()
            dense.zero_grad()
            loss = ddp(torch.tensor([1, 2 + member.rank, state.step]))
            if state.step in stops:
                stops.clear()
                raise Stop
            loss.backward()
            sparse.step()
            dense.step()
            state.commit()
        layout = buckets._layouts_of(job.life).by_order[0].buckets
        return [parameter.tolist() for parameter in model.parameters()], layout

    try:
        job.resume(None)
        result, report = job.enter(entry)
        if result is None:
            member.connect()
            job.resume(report.version, {rank: Move(rank) for rank in range(member.size)})
            result, _ = job.enter(entry)
        return result, lines
    finally:
        buckets.uninstall()
        job.close()
        logging.getLogger("taskd").removeHandler(handler)


@pytest.mark.slow
def test_the_layout_is_the_one_that_ddp_makes(world: Any) -> None:
    """Without a word: `_Confirmation` compares the two."""
    for (_, layout), lines in world.run(train, False, size=2):
        assert lines == []
        assert [len(bucket) for bucket in layout].count(1) >= 2


@pytest.mark.slow
def test_a_fault_changes_nothing(world: Any) -> None:
    undisturbed, disturbed = (world.run(train, is_faulty, size=2) for is_faulty in (False, True))
    assert disturbed == undisturbed
