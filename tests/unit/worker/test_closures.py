"""Optimizers that are given a closure.

When the state is torn, when interrupts get through, and when a sharded state votes.
"""

import pytest
import torch
from job import Job, Stop, digest
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from taskd.errors import Interrupted
from taskd.worker.state import closures
from taskd.worker.train_state import TrainState


class ClosureFirst(torch.optim.SGD):
    """Of another library, in the usual order."""

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.1)  # no version counter is raised
        return loss


class WritesFirst(ClosureFirst):
    """As sharpness-aware optimizers: it moves the parameters, and has the gradients taken there."""

    silent = False

    def step(self, closure=None):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                (parameter.data if self.silent else parameter).add_(0.5)
        return super().step(closure)


class WritesFirstSilently(WritesFirst):
    silent = True


class WritesMemoryFirst(ClosureFirst):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = torch.zeros(())
        return super().step(closure)


def train(job, kind, steps, *, stop=None, how=Stop, **options):
    """Train with closures. `stop`: (step, place, which call of the closure).

    Returns the digest, and each report of an entry.
    """
    reports, stops = [], [stop] if stop else []

    def entry():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = kind(model.parameters(), **options)
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        while state.step < steps:
            inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(state.step))
            calls = []

            def here(place, calls=calls):
                if stops and stops[0] == (state.step, place, len(calls)):
                    stops.pop(0)
                    raise how(place)

            def closure(inputs=inputs, calls=calls, here=here):
                calls.append(state.is_clean)
                here("start")
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                here("forward")
                loss.backward()
                here("backward")
                return loss

            optimizer.step(closure)
            assert not state.is_clean
            here("after")
            state.commit()
            reports.append(("step", calls))
        return digest(model)

    job.resume(None)
    while True:
        try:
            result, report = job.enter(entry)
        except ValueError:
            from taskd.worker.restore.parking import ParkReport

            result, report = (
                None,
                ParkReport(
                    job.life.records.version, clean=not job.life.records.is_inconsistent, reason=""
                ),
            )
        if result is not None:
            assert not stops
            return result, reports
        reports.append(("stopped", report.clean))
        if not report.clean:
            return None, reports
        job.resume(report.version)


@pytest.mark.parametrize("how", [Stop, ValueError])
@pytest.mark.parametrize("place", ["start", "forward", "backward"])
@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS, ClosureFirst]
)
def test_the_state_is_whole_until_the_closure_has_returned(job, kind, place, how):
    plain, _ = train(Job(), kind, 4, lr=0.01)
    job.close()
    again, reports = train(Job(), kind, 4, stop=(2, place, 1), how=how, lr=0.01)
    assert again == plain
    assert ("stopped", True) in reports
    assert all(calls[0] for what, calls in reports if what == "step")


@pytest.mark.parametrize("kind", [torch.optim.AdamW, ClosureFirst])
def test_behind_the_closure_it_is_torn(job, kind):
    _, reports = train(job, kind, 4, stop=(2, "after", 1), lr=0.01)
    assert reports[-1] == ("stopped", False)


def test_between_two_evaluations_of_lbfgs_it_is_torn(job):
    _, reports = train(job, torch.optim.LBFGS, 4, stop=(2, "forward", 2), lr=0.01)
    assert reports[-1] == ("stopped", False)
    assert reports[0][1][:2] == [True, False]


@pytest.mark.parametrize("kind", [WritesFirst, WritesFirstSilently, WritesMemoryFirst])
def test_what_an_optimizer_writes_before_its_closure_tears(job, kind):
    _, reports = train(job, kind, 4, stop=(2, "forward", 1), lr=0.01)
    assert reports == [("step", [False]), ("step", [False]), ("stopped", False)]


def step_with(job, story, optimizer=torch.optim.SGD):
    """One step whose closure, and what follows, is interrupted when it says so."""

    def entry():
        model = nn.Linear(2, 1)
        used = optimizer(model.parameters(), lr=0.1)
        state = TrainState(model=model, optimizer=used)
        state.restore()
        used.register_step_post_hook(lambda *_: story("written"))

        def closure():
            story("closure")
            used.zero_grad()
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            return loss

        story("step")
        used.step(closure=closure)
        state.commit()
        story("committed")

    job.resume(None)
    return job.enter(entry)


def test_interrupts_get_through_in_the_closure_and_are_held_off_behind_it(job):
    held = []
    step_with(job, lambda place: held.append((place, job.life.interrupts.is_held)))
    assert held == [("step", False), ("closure", False), ("written", True), ("committed", False)]


@pytest.mark.parametrize("kind", [torch.optim.SGD, ClosureFirst])
def test_an_interrupt_that_came_before_the_closure_is_raised_there(job, kind):
    reached = []

    def story(place):
        reached.append(place)
        if place == "step":
            job.life.interrupts.pending = "a recovery"

    with pytest.raises(Interrupted, match="a recovery"):
        step_with(job, story, kind)
    assert reached == ["step"]
    assert not job.life.records.is_inconsistent


def test_an_interrupt_that_comes_while_it_writes_waits_for_the_commit(job):
    reached = []

    def story(place):
        reached.append(place)
        if place == "written":
            job.life.interrupts.pending = "a recovery"

    with pytest.raises(Interrupted):
        step_with(job, story)
    assert reached == ["step", "closure", "written"]
    assert job.life.records.version == 1


def test_the_closure_of_a_second_optimizer_is_within_the_update(job):
    held = []

    def entry():
        models = nn.Linear(2, 1), nn.Linear(2, 1)
        first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
        state = TrainState(a=models[0], b=models[1], first=first, second=second)
        state.restore()
        for _ in range(2):
            for optimizer, model in zip((first, second), models, strict=True):

                def closure(optimizer=optimizer, model=model):
                    held.append((job.life.interrupts.is_held, state.is_clean))
                    optimizer.zero_grad()
                    model(torch.ones(1, 2)).sum().backward()

                optimizer.step(closure)
            state.commit()

    job.resume(None)
    job.enter(entry)
    assert held == [(False, True), (True, False)] * 2


def test_whose_order_is_known():
    model = nn.Linear(1, 1)
    known = torch.optim.SGD(model.parameters(), lr=1), torch.optim.LBFGS(model.parameters())
    assert all(map(closures.is_known, known))
    assert not closures.is_known(ClosureFirst(model.parameters(), lr=1))


def vote_order(member):
    """On each rank of a World: when the vote of a ZeroRedundancyOptimizer comes."""
    from taskd.worker.state import step as step_module

    job, story = Job(rank=member.rank, world_size=2), []
    real = step_module.vote

    def vote(life, name, **fields):
        story.append("vote")
        return real(life, name, **fields)

    step_module.vote = vote
    try:

        def entry():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
            ddp = nn.parallel.DistributedDataParallel(model)
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
            state = TrainState(model=model, optimizer=optimizer)
            state.restore()

            def closure():
                story.append(f"closure, held: {job.life.interrupts.is_held}")
                optimizer.zero_grad()
                loss = ddp(torch.ones(1, 2) * member.rank).sum()
                loss.backward()
                return loss

            for _ in range(2):
                optimizer.step(closure)
                story.append("written")
                state.commit()
            return digest(model)

        job.resume(None)
        return job.enter(entry)[0], story
    finally:
        step_module.vote = real
        job.close()


@pytest.mark.slow
def test_sharded_state_votes_between_the_closure_and_the_write(world):
    (left, story), (right, other) = world.run(vote_order, size=2)
    assert left == right
    assert story == other == ["closure, held: False", "vote", "written"] * 2
