"""Optimizers that hold others, or keep more than `state` and `param_groups`.

Whatever happens to the job, it comes to the same parameters as one to which nothing happened.
"""

from collections import OrderedDict, defaultdict

import pytest
import torch
from job import Job, Stop
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from taskd.core.commands import Move
from taskd.errors import StateError
from taskd.worker.train_state import TrainState

STEPS = 12


class Lookahead(torch.optim.Optimizer):
    """Slow weights and a counter in attributes, given by a state_dict of its own."""

    def __init__(self, inner, every=3):
        self.optimizer, self.every, self.count = inner, every, 0
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.param_groups = inner.param_groups
        self.slow = [parameter.detach().clone() for parameter in self._parameters()]

    def _parameters(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            for slow, parameter in zip(self.slow, self._parameters(), strict=True):
                slow.add_(parameter.detach() - slow, alpha=0.5)
                parameter.data.copy_(slow)
        return loss

    def state_dict(self):
        return {"fast": self.optimizer.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state):
        # as many do: the groups of the inner one are others from now on, and those here are not
        self.optimizer.load_state_dict(state["fast"])
        self.slow = [tensor.clone() for tensor in state["slow"]]
        self.count = state["count"]


class CountsFirst(Lookahead):
    """Has changed when the closure is called."""

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)


class Sharing(Lookahead):
    """Has the memory of the inner one, too, and looks as if it only passed calls on."""

    def __init__(self, inner):
        super().__init__(inner)
        self.state = inner.state


class Sharp(torch.optim.Optimizer):
    """As SAM: its state_dict is torch's, and leaves out the memory of the optimizer within."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {"rho": 0.05})
        self.base_optimizer = inner
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        parameters = [one for group in self.param_groups for one in group["params"]]
        for one in parameters:
            self.state[one]["old"] = one.detach().clone()
            one.add_(one.grad, alpha=self.param_groups[0]["rho"])
        with torch.enable_grad():
            closure()
        for one in parameters:
            one.copy_(self.state[one]["old"])
        self.base_optimizer.step()
        return loss


class Uninitialised(torch.optim.Optimizer):
    """As timm's Lookahead: no Optimizer.__init__, and all in the inner one's memory and groups."""

    def __init__(self, inner):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), {}
        self._base_optimizer = inner
        self.param_groups, self.defaults, self.state = (
            inner.param_groups,
            inner.defaults,
            defaultdict(dict),
        )
        for group in inner.param_groups:
            group["count"] = 0

    def step(self, closure=None):
        loss = self._base_optimizer.step(closure)
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                memory = self._base_optimizer.state[parameter]
                slow = memory.setdefault("slow", parameter.detach().clone())
                if group["count"] % 3 == 0:
                    slow.add_(parameter.detach() - slow, alpha=0.5)
                    parameter.data.copy_(slow)
        return loss

    def state_dict(self):
        return self._base_optimizer.state_dict()

    def load_state_dict(self, state):
        self._base_optimizer.load_state_dict(state)
        self.param_groups = self._base_optimizer.param_groups


class Several(torch.optim.Optimizer):
    """One for the matrices, one for the rest."""

    def __init__(self, inner):
        parameters = [one for group in inner.param_groups for one in group["params"]]
        super().__init__(parameters, {"lr": 0.1})
        self.parts = {
            "matrices": torch.optim.Adam([one for one in parameters if one.dim() > 1], lr=0.05),
            "others": torch.optim.SGD(
                [one for one in parameters if one.dim() < 2], lr=0.1, momentum=0.9
            ),
        }

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for part in self.parts.values():
            part.step()
        return loss


KINDS = [Lookahead, Sharing, Sharp, Uninitialised, Several]


class Rig:
    """Trains. `stop`: (step, place), once; places are "forward" and "closure"."""

    def __init__(self, job, kind, *, stop=None, rank=0, **settings):
        self.job, self.kind, self.rank, self.settings = job, kind, rank, settings
        self.stops = [stop] if stop else []
        self.restored = []

    def entry(self, steps=STEPS):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = self.kind(inner)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        state = TrainState(**objects, **self.settings)
        self.restored.append(str(state.restore()))
        while state.step < steps:
            self.stop(state.step, "forward")

            def closure(state=state):
                self.stop(state.step, "closure")
                optimizer.zero_grad()
                loss = (model(torch.ones(1, 2) * state.step) - 1).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            assert not state.is_clean
            scheduler.step()
            state.commit()
        if self.settings and steps < STEPS:
            state.save()
        return b"".join(p.detach().numpy().tobytes() for p in model.parameters())

    def stop(self, step, place):
        if (step, place) in self.stops:
            self.stops.remove((step, place))
            raise Stop


def undisturbed(kind):
    job = Job()
    try:
        return job.enter(Rig(job, kind).entry)[0]
    finally:
        job.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["forward", "closure"])
def test_the_same_after_a_retry(job, kind, place):
    rig = Rig(job, kind, stop=(7, place))
    _, report = job.enter(rig.entry)
    assert (report.version, report.reason) == (7, "")
    job.resume(7)
    assert job.enter(rig.entry)[0] == undisturbed(kind)


def test_what_has_changed_before_the_closure_is_torn(job):
    _, report = job.enter(Rig(job, CountsFirst, stop=(7, "closure")).entry)
    assert not report.clean


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_from_a_checkpoint(job, kind, tmp_path):
    rig = Rig(job, kind, checkpoint_dir=tmp_path)
    job.enter(rig.entry, 7)
    job.replace()
    assert job.enter(rig.entry)[0] == undisturbed(kind)
    assert "version 7 from" in rig.restored[-1]


def received(member, kind):
    """On each rank of a World: rank 1 is new in the middle, and gets everything from rank 0."""
    job = Job(member.rank, member.size)
    try:
        rig = Rig(job, kind, stop=(7, "forward"))
        job.resume(None)
        job.enter(rig.entry)
        member.connect()
        if member.rank == 1:
            job.replace()
        job.resume(7, {0: Move(0), 1: Move(1, 0)})
        return job.enter(rig.entry)[0], rig.restored[-1]
    finally:
        job.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_on_a_rank_that_receives_it(world, kind):
    (left, _), (right, restored) = world.run(received, kind, size=2)
    assert "from rank 0" in restored
    assert left == right == undisturbed(kind)


def test_memory_is_written_once(job, tmp_path):
    """The state_dict has the inner one's memory, which has names of its own in a checkpoint."""
    from taskd.worker.objects.named import Named
    from taskd.worker.state import flat

    def entry():
        rig = Rig(job, Lookahead)
        rig.entry(4)
        holding = job.life.records.states["train"]
        return flat.flatten(holding, Named(holding.roles))[0]

    found = job.enter(entry)[0]
    addresses = [tensor.data_ptr() for tensor in found.values()]
    assert len(set(addresses)) == len(addresses)
    assert sorted(name for name in found if ".own." in name) == [
        f"train.optimizer.own.own.slow.{index}" for index in range(4)
    ]


def test_what_is_registered_on_its_own_is_not_carried_twice(job):
    def entry():
        model = nn.Linear(1, 1)
        inner = torch.optim.SGD(model.parameters(), lr=1)
        state = TrainState(model=model, inner=inner, outer=Lookahead(inner))
        return state._holding.roles.object_roles()

    assert job.enter(entry)[0] == {"model", "inner", "outer", "outer.own"}


def test_an_ordinary_subclass_has_nothing_beside(job):
    class Renamed(torch.optim.Adam):
        def load_state_dict(self, state):
            raise AssertionError("not called: its memory is put back as it was")

    stops = [Stop]

    def entry():
        model = nn.Linear(1, 1)
        state = TrainState(model=model, optimizer=Renamed(model.parameters()))
        state.restore()
        while stops:
            raise stops.pop()
        return state._holding.roles.object_roles()

    job.enter(entry)
    job.resume(0)
    assert job.enter(entry)[0] == {"model", "optimizer"}


def wrapped_zero(member):
    """On each rank of a World: what a TrainState says of a ZeroRedundancyOptimizer within."""
    job = Job(member.rank, member.size)

    def entry():
        model = nn.Linear(2, 2)
        inner = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1)
        with pytest.raises(StateError) as raised:
            TrainState(model=model, optimizer=Lookahead(inner))
        return str(raised.value)

    try:
        return job.enter(entry)[0]
    finally:
        job.close()


@pytest.mark.slow
def test_a_divided_memory_within_is_refused(world):
    for text in world.run(wrapped_zero, size=2):
        assert "optimizer.optimizer is a ZeroRedundancyOptimizer" in text
        assert "give that to the TrainState" in text


def trained_sharded(member, stop):
    """On each rank of a World: Lookahead over DTensors; `stop`: the step at which all stop."""
    from torch.distributed.fsdp import fully_shard

    job, stops = Job(member.rank, member.size), [stop]

    def entry():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        fully_shard(model)
        optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.05))
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        while state.step < STEPS:
            if state.step in stops:
                stops.clear()
                raise Stop
            optimizer.zero_grad()
            (model(torch.ones(1, 4) * (state.step + member.rank)) - 1).square().sum().backward()
            optimizer.step()
            state.commit()
        return b"".join(p.full_tensor().detach().numpy().tobytes() for p in model.parameters())

    try:
        job.resume(None)
        result, report = job.enter(entry)
        if result is None:
            member.connect()
            job.resume(report.version)
            result, _ = job.enter(entry)
        return result
    finally:
        job.close()


@pytest.mark.slow
def test_the_same_where_the_state_is_sharded(world):
    assert world.run(trained_sharded, 7, size=2) == world.run(trained_sharded, None, size=2)
