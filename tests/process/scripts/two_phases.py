"""Two models that are trained in turn, as a GAN is: a critic, and a maker that it judges.

FAULTS  see testbed.script; places: "critic", "maker" (before the backward pass of that phase; in
        the second, when all ranks have done the step of the first)
CASE    "two": a TrainState for each phase, as docs/operations.md says it; "one": a TrainState
        for both
"""

import os
import pathlib
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import taskd
from testbed.facts import facts_in
from testbed.script import FACTS, RANK, die_if_due, fact, planned_faults

STEPS, CASE = 8, os.environ["CASE"]
FAULTS = planned_faults(os.environ.get("FAULTS", ""))


def await_critics(step: int) -> None:
    """The averages are there for all at once, and each rank writes by itself."""
    while (
        sum(
            found["what"] == "critic" and found["step"] == step
            for found in facts_in(pathlib.Path(FACTS))
        )
        < dist.get_world_size()
    ):
        time.sleep(0.001)


def real(step: int) -> torch.Tensor:
    return torch.randn(8, 2, generator=torch.Generator().manual_seed(100 * step + RANK))


class Both:
    """The models, and what is done with them in each phase."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.critic, self.maker = torch.nn.Linear(2, 1), torch.nn.Linear(3, 2)
        self.ddp_critic = DistributedDataParallel(self.critic)
        self.ddp_maker = DistributedDataParallel(self.maker)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        self.maker_optimizer = torch.optim.Adam(self.maker.parameters(), lr=0.01)
        torch.manual_seed(10 + RANK)

    def train_critic(self, step: int) -> None:
        with torch.no_grad():
            made = self.maker(torch.randn(8, 3))
        self.critic_optimizer.zero_grad()
        judged = self.ddp_critic(torch.cat([real(step), made]))
        die_if_due("critic", step)
        (judged[8:].mean() - judged[:8].mean()).backward()
        self.critic_optimizer.step()
        fact("critic", step=step)

    def train_maker(self, step: int) -> None:
        self.maker_optimizer.zero_grad()
        made = self.ddp_maker(torch.randn(8, 3))
        if any((fault.place, fault.step) == ("maker", step) for fault in FAULTS):
            await_critics(step)
        die_if_due("maker", step)
        (-self.critic(made).mean()).backward()
        self.maker_optimizer.step()


def in_two(both: Both) -> None:
    critic = taskd.TrainState("critic", model=both.critic, optimizer=both.critic_optimizer)
    maker = taskd.TrainState("maker", model=both.maker, optimizer=both.maker_optimizer)
    critic.restore()
    maker.restore()
    while maker.step < STEPS:
        if critic.step == maker.step:
            both.train_critic(maker.step)
            critic.commit()
        both.train_maker(maker.step)
        maker.commit()


def in_one(both: Both) -> None:
    state = taskd.TrainState(
        critic=both.critic,
        critic_optimizer=both.critic_optimizer,
        maker=both.maker,
        maker_optimizer=both.maker_optimizer,
    )
    state.restore()
    while state.step < STEPS:
        both.train_critic(state.step)
        both.train_maker(state.step)
        state.commit()


@taskd.recoverable
def train() -> None:
    dist.init_process_group("gloo")
    both = Both()
    (in_two if CASE == "two" else in_one)(both)
    weights = [tensor.tolist() for it in (both.critic, both.maker) for tensor in it.parameters()]
    fact("returned", weights=weights)


train()
