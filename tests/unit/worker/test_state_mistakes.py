"""TrainState used in a wrong way: each mistake says what to do."""

import pytest
import torch
from job import Sampler
from torch import nn

from taskd.errors import StateError
from taskd.worker.state import TrainState


class StrangeOptimizer(torch.optim.SGD):
    """Shards its memory as it likes."""

    def consolidate_state_dict(self):
        pass


class TestMistakes:
    def test_unsupported_objects_say_what_to_do(self, job):
        dataset = torch.utils.data.TensorDataset(torch.arange(4))

        def entry(value):
            TrainState(thing=value)

        for value, text in [
            (object(), "state_dict"), (torch.utils.data.DataLoader(dataset), "stateful loader"),
            (torch.utils.data.DistributedSampler(dataset, 1, 0), "set_epoch"), (nn.Parameter(torch.ones(1)), "optimizer"),
            (nn.LazyLinear(2), "forward pass"), (StrangeOptimizer(nn.Linear(1, 1).parameters()), "ZeroRedundancyOptimizer"),
        ]:
            with pytest.raises(StateError, match=text):
                job.enter(entry, value)
            job.life.states.clear()

    def test_outside_a_recoverable_function(self, job):
        with pytest.raises(StateError, match=r"@taskd\.recoverable"):
            TrainState(epoch=1)

    def test_mirrors_of_snapshots_that_are_not_made(self):
        with pytest.raises(ValueError, match=r"TrainState\('train'\): snapshot_buddy=True mirrors snapshots, and none are made: give snapshot_every=k, too"):
            TrainState(snapshot_buddy=True)

    def test_the_same_name_twice(self, job):
        def entry():
            TrainState(epoch=1)
            TrainState(epoch=1)

        with pytest.raises(StateError, match="twice"):
            job.enter(entry)

    def test_objects_assigned_later(self, job):
        def entry():
            state = TrainState(model=nn.Linear(1, 1))
            with pytest.raises(StateError, match="constructor"):
                state.model = nn.Linear(1, 1)
            with pytest.raises(StateError, match="plain value"):
                state.sampler = Sampler()
            with pytest.raises(AttributeError, match="no 'nothing':"):
                _ = state.nothing

        job.enter(entry)

    def test_commit_before_restore(self, job):
        def entry():
            TrainState(epoch=1).commit()

        with pytest.raises(StateError, match="restore"):
            job.enter(entry)

    def test_a_state_of_an_earlier_entry(self, job):
        old = []

        def entry():
            old.append(TrainState(epoch=1))
            old[0].restore()

        job.enter(entry)
        with pytest.raises(StateError, match="earlier entry"):
            job.enter(old[0].commit)

    def test_another_shape_names_the_tensor(self, job):
        widths = [3, 4]

        def entry():
            TrainState(model=nn.Sequential(nn.Linear(2, widths.pop(0)))).restore()

        job.enter(entry)
        job.resume(0)
        with pytest.raises(StateError, match=r"model\.0\.weight has shape \(4, 2\) now and had \(3, 2\)"):
            job.enter(entry)

    def test_another_optimizer_or_role(self, job):
        model = nn.Linear(2, 2)

        def entry(groups, **more):
            TrainState(model=model, optimizer=torch.optim.SGD(groups, lr=0.1), **more).restore()

        job.enter(entry, [model.weight, model.bias])
        job.resume(0)
        with pytest.raises(StateError, match="optimizer has 1 parameters"):
            job.enter(entry, [model.weight])
        job.resume(0)
        with pytest.raises(StateError, match="register the same objects"):
            job.enter(lambda: entry([model.weight, model.bias], sampler=Sampler()))

    def test_parameters_written_before_restore(self, job):
        model = nn.Linear(2, 2)

        def entry():
            nn.init.zeros_(model.weight)
            TrainState(model=model).restore()

        job.enter(entry)
        job.resume(0)
        with pytest.raises(StateError, match=r"model\.weight was written to"):
            job.enter(entry)
