"""What is put around models and optimizers to follow them, and taken off again."""

import copy
import pickle

import torch
from job import Stop
from torch import nn

from taskd.worker.train_state import TrainState


def test_rank_versions_beyond_a_cut_do_not_leak_hooks_into_objects_built_outside(job):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def entry():
        TrainState(model=model, optimizer=optimizer).restore()

    for _ in range(3):
        job.enter(entry)
        job.resume(0)
    assert not model._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks


class Stepper:
    """An optimizer that is not torch's."""

    def __init__(self, parameter):
        self.parameter, self.count = parameter, 0

    def zero_grad(self):
        pass

    def step(self):
        self.count += 1
        with torch.no_grad():
            self.parameter += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_an_optimizer_that_is_not_of_torch_is_followed_too(job):
    stepper_of = []

    def entry():
        model = nn.Linear(1, 1)
        stepper = Stepper(model.bias)
        stepper_of.append(stepper)
        state = TrainState(model=model, optimizer=stepper)
        state.restore()
        if len(stepper_of) == 1:
            stepper.step()
            assert not state.is_clean
            state.commit()
            raise Stop
        return stepper.count

    _, report = job.enter(entry)
    assert "step" not in vars(stepper_of[0])
    job.resume(report.version)
    assert job.enter(entry)[0] == 1


def test_a_followed_model_can_be_copied_and_pickled(job):
    def entry():
        model = nn.Linear(2, 2)
        state = TrainState(model=model)
        state.restore()
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied(torch.ones(1, 2))
            assert torch.equal(copied.weight, model.weight)

    job.enter(entry)


def test_the_ddp_wrapper_is_installed_once_and_can_be_taken_off():
    from torch.nn.parallel import DistributedDataParallel

    from taskd.worker.state import buckets

    original = DistributedDataParallel.__init__
    buckets.install()
    wrapped = DistributedDataParallel.__init__
    buckets.install()
    assert DistributedDataParallel.__init__ is wrapped is not original
    buckets.uninstall()
    buckets.uninstall()
    assert DistributedDataParallel.__init__ is original
