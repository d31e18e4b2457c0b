"""A replicated TrainState beside a sharded one: the step of each is voted on."""

import pytest
import torch
from job import Job, Stop
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from taskd.worker.restore.parking import ParkReport
from taskd.worker.state import step as step_module
from taskd.worker.state.vote import vote
from taskd.worker.train_state import TrainState


class Mixed:
    """A replicated state beside a sharded one, on one rank of a World.

    Rank 1 stops in the second step, between the backward pass and the optimizer step of the
    replicated one.
    """

    def __init__(self, member):
        self.rank, self.votes = member.rank, []

    def __call__(self):
        torch.manual_seed(0)
        models = {name: nn.Linear(2, 2) for name in ("g", "d")}
        wrapped = {name: nn.parallel.DistributedDataParallel(one) for name, one in models.items()}
        optimizers = {
            "g": torch.optim.SGD(models["g"].parameters(), lr=1.0),
            "d": ZeroRedundancyOptimizer(models["d"].parameters(), torch.optim.SGD, lr=1.0),
        }
        states = {
            name: TrainState(name, model=models[name], optimizer=optimizers[name])
            for name in ("g", "d")
        }
        for state in states.values():
            state.restore()
        for number in range(2):
            for name, state in states.items():
                optimizers[name].zero_grad()
                wrapped[name](torch.ones(1, 2)).sum().backward()
                if self.rank == number == 1:
                    raise Stop
                optimizers[name].step()
                state.commit()
                if number == 1:
                    raise Stop

    def vote(self, life, name, **fields):
        self.votes.append(name)
        if len(self.votes) == 3:
            raise Stop  # as where rank 1 does not come
        return vote(life, name, **fields)


def train_mixed(member):
    mixed, job = Mixed(member), Job(member.rank, member.size)
    job.resume(None)
    step_module.vote = mixed.vote
    try:
        return mixed.votes, job.enter(mixed)[1]
    finally:
        step_module.vote = vote
        job.close()


@pytest.mark.slow
def test_a_step_of_a_replicated_state_is_voted_on_where_another_one_is_sharded(world):
    """The cut goes by the shards of a rank: they must not be left at two versions."""
    (votes, report), (other, same) = world.run(train_mixed, size=2)
    assert (votes, other) == (["g", "d", "g"], ["g", "d"])
    assert report == same == ParkReport(2, clean=True, reason="")
