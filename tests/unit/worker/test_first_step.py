"""first_step: told once, whatever optimizer it is."""

import torch

from taskd.worker.process import first_step


def test_the_first_step_of_any_optimizer_is_told_once() -> None:
    told = []
    first_step.watch(lambda: told.append("step"))
    weight = torch.nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD([weight]), torch.optim.Adam([weight])]
    assert told == []
    for optimizer in [*optimizers, *optimizers]:
        weight.grad = torch.ones(2)
        optimizer.step()
    assert told == ["step"]
