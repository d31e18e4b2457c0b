"""TrainState used in a wrong way: each mistake says what to do."""

import pytest
import torch
from job import Sampler
from torch import nn

from taskd.errors import StateError
from taskd.worker.train_state import TrainState


class StrangeOptimizer(torch.optim.SGD):
    """Shards its memory as it likes."""

    def consolidate_state_dict(self):
        pass


class Passing(torch.optim.Optimizer):
    """Passes everything on, as trainers' optimizers do.

    Never initialised as an optimizer itself.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


class SlowWeights(Passing):
    """Keeps memory of its own."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.slow = {}

    state = property(lambda self: self.slow)


class Circular(Passing):
    def __init__(self):
        super().__init__(self)

    state = property(lambda self: self.__dict__)
    param_groups = property(lambda self: self.__dict__)


class TestOptimizersOfTrainers:
    @pytest.mark.parametrize("wrap", [Passing, lambda inner: Passing(Passing(inner))])
    def test_what_only_passes_calls_on_is_unwrapped(self, job, wrap):
        def entry(wrapped, model):
            optimizer = torch.optim.Adam(model.parameters())
            given = wrapped(optimizer)
            state = TrainState(model=model, optimizer=given)
            assert state.optimizer is optimizer
            state.restore()
            model(torch.ones(1, 2)).sum().backward()
            given.step()
            assert not state.is_clean
            state.commit()
            assert state.is_clean
            return True

        assert job.enter(entry, wrap, nn.Linear(2, 2))[0]

    def test_what_keeps_memory_of_its_own_is_refused_by_name(self, job):
        def entry(value):
            TrainState(optimizer=value)

        inner = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)
        with pytest.raises(
            StateError,
            match=r"optimizer is a SlowWeights, .* Give the optimizer "
            r"that it wraps \(optimizer\.optimizer, a SGD\)",
        ):
            job.enter(entry, SlowWeights(inner))
        with pytest.raises(
            StateError, match="optimizer is a Circular, which is no complete torch optimizer"
        ):
            job.enter(entry, Circular())

    def test_a_scheduler_is_not_taken_for_a_wrapper(self, job):
        def entry():
            optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            assert TrainState(scheduler=scheduler).scheduler is scheduler
            return True

        assert job.enter(entry)[0]


class TestMistakes:
    def test_unsupported_objects_say_what_to_do(self, job):
        dataset = torch.utils.data.TensorDataset(torch.arange(4))

        def entry(value):
            TrainState(thing=value)

        for value, text in [
            (object(), "state_dict"),
            (torch.utils.data.DataLoader(dataset), "stateful loader"),
            (torch.utils.data.DistributedSampler(dataset, 1, 0), "set_epoch"),
            (nn.Parameter(torch.ones(1)), "optimizer"),
            (nn.LazyLinear(2), "forward pass"),
            (StrangeOptimizer(nn.Linear(1, 1).parameters()), "ZeroRedundancyOptimizer"),
        ]:
            with pytest.raises(StateError, match=text):
                job.enter(entry, value)
            job.life.records.states.clear()

    def test_outside_a_recoverable_function(self, job):
        with pytest.raises(StateError, match=r"@taskd\.recoverable"):
            TrainState(epoch=1)

    def test_mirrors_of_snapshots_that_are_not_made(self):
        with pytest.raises(
            ValueError,
            match=r"TrainState\('train'\): snapshot_buddy=True mirrors "
            r"snapshots, and none are made: give "
            r"snapshot_every=k, too",
        ):
            TrainState(snapshot_buddy=True)

    def test_an_option_that_is_misspelt_is_warned_of_once(self, job, caplog):
        def entry():
            TrainState(checkpoint_evry=10, snapshot_every=2, checkpoint_step=3, shard=1)

        job.enter(entry)
        job.life.records.states.clear()
        job.enter(entry)
        (said,) = [line for line in caplog.messages if "did you mean" in line]
        assert said == (
            "TrainState('train'): checkpoint_evry is no option of it and is kept as a plain value: "
            "did you mean checkpoint_every?"
        )

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
        with pytest.raises(
            StateError,
            match=r"model\.0\.weight has shape \(4, 2\) now and had "
            r"\(3, 2\)",
        ):
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


def with_buffer(tensor, **options):
    model = nn.Linear(2, 2)
    model.register_buffer("far", tensor, **options)
    return {"model": model}


class LargeObject:
    def __init__(self, tensor):
        self.tensor = tensor

    def state_dict(self):
        return {"tensor": self.tensor, "dense": torch.zeros(8192)}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]


class TestLayouts:
    """What has not one piece of memory can be kept, but not sent: before, at the first death."""

    @pytest.mark.filterwarnings("ignore:(Sparse|The PyTorch API of nested):UserWarning")
    @pytest.mark.parametrize(
        ("objects", "named"),
        [
            (lambda: with_buffer(torch.eye(2).to_sparse()), "model.far .* sparse_coo"),
            (lambda: with_buffer(torch.eye(2).to_sparse_csr()), "model.far .* sparse_csr"),
            (
                lambda: with_buffer(torch.eye(2).to_sparse(), persistent=False),
                "model.far .* sparse_coo",
            ),
            (
                lambda: with_buffer(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
                "model.far .* nested",
            ),
            (
                lambda: {"model": nn.ParameterList([torch.eye(2).to_sparse()])},
                "model.0 .* sparse_coo",
            ),
            (
                lambda: {
                    "optimizer": torch.optim.SGD(
                        [torch.eye(2).to_sparse().requires_grad_()], lr=0.1
                    )
                },
                "optimizer.parameter 0 .* sparse_coo",
            ),
            (
                lambda: {"average": LargeObject(torch.eye(2).to_sparse())},
                r"average.state_dict\(\) .* sparse_coo",
            ),
        ],
    )
    def test_others_than_strided_are_refused(self, job, objects, named):
        with pytest.raises(StateError, match=named) as raised:
            job.enter(lambda: TrainState(**objects()))
        assert "keep it in a plain attribute" in str(raised.value)

    def test_sparse_gradients_are_not(self, job):
        def entry():
            model = nn.Embedding(4, 2, sparse=True)
            optimizer = torch.optim.SparseAdam(list(model.parameters()))
            model(torch.tensor([1])).sum().backward()
            state = TrainState(model=model, optimizer=optimizer)
            state.restore()
            optimizer.step()
            state.commit()
            return model.weight.grad.is_sparse

        assert job.enter(entry)[0]

    def test_what_the_text_says_works(self, job):
        def entry():
            model = with_buffer(torch.eye(2).to_sparse().indices())["model"]
            model.register_buffer("values", torch.ones(2))
            model.whole = torch.eye(2).to_sparse()
            TrainState(model=model, small=Small(torch.eye(2).to_sparse())).restore()
            return True

        assert job.enter(entry)[0]


class Small(LargeObject):
    """Each rank's own, and never sent."""

    def state_dict(self):
        return {"tensor": self.tensor}
