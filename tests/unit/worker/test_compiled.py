"""A compiled module: its hooks are compiled away, and its steps are followed all the same."""

import pytest
import torch
from job import Stop
from torch import nn

from taskd.worker.state import extras, logbook
from taskd.worker.train_state import TrainState


@pytest.mark.parametrize("backend", [None, "eager"])
def test_extras_are_known_before_the_gradients_can_have_reached_anybody(job, backend) -> None:
    drawn = []

    def entry():
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model=model, optimizer=optimizer, read=0)
        state.restore()
        run = model if backend is None else torch.compile(model, backend=backend)
        while True:
            state.read += 1
            run(torch.ones(1, 2)).sum().backward()
            drawn.append(torch.get_rng_state())
            if state.step == 2:
                raise Stop  # before the optimizer begins
            optimizer.step()
            state.commit()

    job.enter(entry)
    job.replace()  # to a version that the others have completed
    found = job.life.records.inherited_extras
    assert sorted(found) == [1, 2, 3]
    pending = extras.decode(found[3])
    assert pending.pending == {"train"}
    assert pending.random["torch"] == drawn[-1].numpy().tobytes()
    assert extras.decode_part(pending.parts["train"]).values == {"read": 3}


class Loader:
    """Walks through data."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return torch.ones(1, 2)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


MICRO_BATCHES = 4


def accumulate(runs_of):
    """Gradients of several micro-batches in each step; stops before the third optimizer step.

    `runs_of`: makes of the modules what is called one after the other.
    """
    modules = [nn.Sequential(nn.Linear(2, size), nn.Dropout(0.5)) for size in (2, 1)]
    parameters = [one for module in modules for one in module.parameters()]
    optimizer, loader = torch.optim.SGD(parameters, lr=0.1), Loader()
    state = TrainState(body=modules[0], head=modules[1], optimizer=optimizer, loader=loader)
    state.restore()
    body, head = runs_of(*modules)
    while True:
        for _ in range(MICRO_BATCHES):
            head(body(next(loader))).sum().backward()
        if state.step == 2:
            raise Stop
        optimizer.step()
        state.commit()


def compiled(module):
    return torch.compile(module, backend="eager")


WAYS = {
    "visible": lambda body, head: (body, head),
    "compiled": lambda body, head: (compiled(body), compiled(head)),
    "body compiled": lambda body, head: (compiled(body), head),
    "head compiled": lambda body, head: (body, compiled(head)),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_last_of_several_backward_passes_counts(job, way) -> None:
    drawn = []

    def entry():
        try:
            accumulate(WAYS[way])
        finally:
            drawn.append(torch.get_rng_state())

    job.enter(entry)
    job.replace()
    pending = extras.decode(job.life.records.inherited_extras[3])
    assert extras.decode_part(pending.parts["train"]).positions == {
        "loader": {"at": 3 * MICRO_BATCHES}
    }
    assert pending.random["torch"] == drawn[0].numpy().tobytes()


@pytest.mark.parametrize(("way", "captures"), [("visible", 2), ("compiled", 2)])
def test_there_is_one_capture_of_a_module_in_each_pass(job, monkeypatch, way, captures) -> None:
    captured, write = [], logbook.Logbook.write_pending

    def count(self, version, parts, *, is_forward=False):
        captured.extend([version] if is_forward else [])
        write(self, version, parts, is_forward=is_forward)

    monkeypatch.setattr(logbook.Logbook, "write_pending", count)
    job.enter(accumulate, WAYS[way])
    assert captured.count(3) == captures * MICRO_BATCHES
