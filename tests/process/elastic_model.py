"""What the trainings of test_elastic.py train, and the same in a single process."""

from __future__ import annotations

import torch

import taskd

SIZE, BATCH = 96, 24  # a global batch can be divided by every number of ranks of the tests


def make() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A model, and its data."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    inputs = torch.randn(SIZE, 8)
    return model, inputs, torch.randn(SIZE, 2)


def sampler() -> taskd.ElasticSampler:
    """Several micro-batches for each rank."""
    return taskd.ElasticSampler(SIZE, BATCH, micro_batch_size=3, seed=1)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """With memory, so that it is state."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def losses_alone(steps: int) -> list[float]:
    """The loss of each global batch, as one process trains them."""
    model, inputs, targets = make()
    optimizer, order = optimizer_of(model), sampler()
    losses = []
    for step in range(steps):
        batch = order.global_batch(step)
        optimizer.zero_grad()
        loss = (model(inputs[batch]) - targets[batch]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
