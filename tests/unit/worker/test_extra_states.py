"""What a module carries beside tensors, and what is changed outside of steps."""

import pytest
import torch
from job import Stop
from torch import nn
from torch.optim.swa_utils import AveragedModel

from taskd.worker.train_state import TrainState


class Heated(nn.Module):
    def __init__(self, extra=1.0):
        super().__init__()
        self.line, self.extra = nn.Linear(2, 2), extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

    def forward(self, x):
        return self.line(x)


def make(extra=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(Heated(extra), nn.Linear(2, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_an_extra_state_is_that_of_the_commit(job) -> None:
    seen = []

    def entry():
        model, optimizer = make()
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        seen.append(model[0].extra)
        while state.step < 3:
            model[0].extra *= 2  # before the forward pass, and taken back by an interrupt
            if state.step == 2 and len(seen) == 1:
                raise Stop
            step(model, optimizer)
            state.commit()
        return model[0].extra

    assert job.enter(entry)[0] is None
    job.resume(2)
    assert job.enter(entry)[0] == 8.0
    assert seen == [1.0, 4.0]


def test_an_extra_state_is_read_from_a_checkpoint(job, tmp_path) -> None:
    def entry(steps):
        model, optimizer = make()
        state = TrainState(
            model=model, optimizer=optimizer, checkpoint_every=2, checkpoint_dir=tmp_path
        )
        state.restore()
        while state.step < steps:
            step(model, optimizer)
            model[0].extra += state.step
            state.commit()
        return model[0].extra

    assert job.enter(entry, 2)[0] == 2.0
    job.replace()
    assert job.enter(entry, 2)[0] == 2.0


@pytest.mark.parametrize("extra", [torch.zeros(2), {"a": [torch.zeros(1)]}, object()])
def test_others_are_named(job, caplog, extra) -> None:
    def entry():
        model, optimizer = make(extra)
        TrainState(model=model, optimizer=optimizer)

    job.enter(entry)
    assert "TrainState('train'): model: the extra state of 0 (get_extra_state)" in caplog.text


def averaging(job, caplog, *, is_late):
    """An average that is updated once, before a commit or behind it; then a fault."""

    def entry():
        model, optimizer = make()
        average = AveragedModel(model)
        state = TrainState(model=model, optimizer=optimizer, average=average)
        state.restore()
        while state.step < 3:
            step(model, optimizer)
            if state.step == 1 and not is_late:
                average.update_parameters(model)
            state.commit()
            if state.step == 2 and is_late:
                average.update_parameters(model)
                if not caplog.text:
                    raise Stop

    report = job.enter(entry)[1]
    job.resume(report.version)
    job.enter(entry)
    return caplog.text


def test_averages_that_are_changed_behind_a_commit_are_named(job, caplog) -> None:
    text = averaging(job, caplog, is_late=True)
    assert "TrainState('train'): average was changed since the last commit() and stays so" in text
    assert "torn" not in text


def test_also_without_a_fault_and_once(job, caplog) -> None:
    def entry():
        model, optimizer = make()
        average = AveragedModel(model)
        state = TrainState(model=model, optimizer=optimizer, average=average)
        state.restore()
        while state.step < 4:
            step(model, optimizer)
            state.commit()
            average.update_parameters(model)

    job.enter(entry)
    said = "TrainState('train'): average was changed after commit() and before the next step"
    assert caplog.text.count(said) == 1


def test_averages_that_are_changed_before_it_are_not(job, caplog) -> None:
    assert averaging(job, caplog, is_late=False) == ""


class Counting(torch.optim.Adam):
    """Has more in its state_dict() than torch's."""

    def state_dict(self):
        return {"torch": super().state_dict(), "count": 1}


def test_a_rate_that_is_set_between_two_steps_is_no_average(job, caplog) -> None:
    """It is a tensor, it is rolled back, and it is in what such an optimizer gives."""

    def entry():
        model, _ = make()
        optimizer = Counting(
            model.parameters(), lr=torch.tensor(0.1), capturable=False, foreach=False
        )
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        while state.step < 3:
            step(model, optimizer)
            state.commit()
            optimizer.param_groups[0]["lr"].mul_(0.5)

    job.enter(entry)
    assert "was changed" not in caplog.text
