"""What steps draw from torch's generator within passes through data.

The warning comes where, and only where, it would be something else after a fault.
"""

import logging

import pytest
import torch
from job import Job, Stop
from torch import nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from taskd.worker.life import current
from taskd.worker.state import phases, step_randoms
from taskd.worker.state.randoms import RandomStates
from taskd.worker.train_state import TrainState

SAMPLES, BATCH, EPOCHS = 24, 4, 2
STEPS = SAMPLES // BATCH


class Ids(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index


def nothing(*_):
    pass


def rand(_state):
    return torch.rand(1).item()


def plain(**options):
    return DataLoader(Ids(), BATCH, **options)


def own(**options):
    return plain(generator=torch.Generator(), **options)


class Script:
    """Two epochs; batches that are done are skipped when it is entered again.

    `make`: the loader. `draw`: in each step. `before`: a step. `between`: epochs. `begin`: how a
    pass does. `behind`: a commit.
    """

    def __init__(
        self, draw=rand, make=plain, *, before=nothing, between=nothing, behind=nothing, begin=iter
    ):
        self.draw, self.make, self.before, self.between = draw, make, before, between
        self.behind, self.begin = behind, begin

    def run(self, state, stops, trained):
        loader = self.make()
        state.restore()
        for epoch in range(state.epoch, EPOCHS):
            for number, _ in enumerate(self.begin(loader)):
                if number < state.batch:
                    continue
                self.before(state)
                drawn = self.draw(state)
                stop_at(state, stops)
                trained[state.step] = drawn
                state.batch = number + 1
                state.commit()
                self.behind(state)
            self.between(state)
            state.epoch, state.batch = epoch + 1, 0


class Stateful(Script):
    """The loader is carried, and goes on where it was."""

    def run(self, state, stops, trained):
        state.restore()
        loader = state._holding.roles.positions["loader"]
        for epoch in range(state.epoch, EPOCHS):
            for _ in loader:
                drawn = self.draw(state)
                stop_at(state, stops)
                trained[state.step] = drawn
                state.commit()
            state.epoch = epoch + 1


class BegunBefore(Script):
    """Each entry begins its pass before restore(), which puts the generator back behind it."""

    def run(self, state, stops, trained):
        batches = iter(self.make())
        state.restore()
        for number, _ in enumerate(batches):
            if number >= state.step:
                drawn = self.draw(state)
                stop_at(state, stops)
                trained[state.step] = drawn
                state.commit()


class WithoutLoader(Script):
    """A loop over steps."""

    def run(self, state, stops, trained):
        state.restore()
        while state.step < 2 * STEPS:
            drawn = self.draw(state)
            stop_at(state, stops)
            trained[state.step] = drawn
            state.commit()


class APassForEachStep(WithoutLoader):
    """The first batch of one."""

    def draw(self, state):
        next(iter(plain()))
        return rand(state)


class ACommitForEachPass(Script):
    """At its last batch: what comes after it, with a fault or without, is another pass."""

    def run(self, state, stops, trained):
        loader = self.make()
        state.restore()
        for epoch in range(state.epoch, STEPS):
            for number, _ in enumerate(loader):
                drawn = self.draw(state)
                if number == len(loader) - 1:
                    stop_at(state, stops)
                    trained[state.step] = drawn
                    state.epoch = epoch + 1
                    state.commit()


def stop_at(state, stops):
    if stops and state.step == stops[0]:
        stops.pop(0)
        raise Stop


def begin_and_put_back(loader):
    with torch.random.fork_rng(devices=[]):
        return iter(loader)


def begin_and_set(loader):
    """What is kept with each commit is set behind the beginning of a pass."""
    (holding,) = current().records.states.values()
    batches = iter(loader)
    if holding.roles.values["random"] is not None:
        torch.set_rng_state(holding.roles.values["random"])
    return batches


def keep(state):
    state.random = torch.get_rng_state()


def draw_and_keep(state):
    drawn = rand(state)
    keep(state)
    return drawn


def evaluate(_state):
    for _ in plain(shuffle=True):
        pass


def evaluate_apart(state):
    with torch.random.fork_rng(devices=[]):
        evaluate(state)
        rand(state)


def make_parameters(state):
    """In the first step of an entry, as a lazy module does."""
    if not hasattr(current(), "has_parameters"):
        current().has_parameters = True
        rand(state)
    return 0


SCRIPTS = {
    "dropout": Script(),
    "order of its own": Script(make=lambda: plain(sampler=SequentialSampler(Ids()))),
    "workers": Script(make=lambda: plain(num_workers=1)),
    "torch's generator": Script(make=lambda: plain(generator=torch.default_generator)),
    "seeded by epoch": Script(between=lambda state: torch.manual_seed(7 + state.epoch)),
    "with an evaluation": Script(behind=evaluate),
    "a generator of its own": Script(make=own),
    "no draws": Script(nothing),
    "no draws, evaluation": Script(nothing, behind=evaluate),
    "no draws, evaluation apart": Script(nothing, behind=evaluate_apart),
    "parameters": Script(make_parameters),
    "seeded by step": Script(before=lambda state: torch.manual_seed(7 + state.step)),
    "seeded alike": Script(before=lambda _: torch.manual_seed(0)),
    "its generator": Script(
        lambda state: torch.rand(1, generator=torch.Generator().manual_seed(state.step)).item()
    ),
    "forked": Script(evaluate_apart),
    "put back": Script(begin=begin_and_put_back),
    "kept": Script(draw_and_keep, begin=begin_and_set, between=keep),
    "begun before restore()": BegunBefore(),
    "no loader": WithoutLoader(),
    "a pass for each step": APassForEachStep(),
    "a commit for each pass": ACommitForEachPass(),
}
OTHERS = {
    "dropout",
    "order of its own",
    "workers",
    "torch's generator",
    "seeded by epoch",
    "with an evaluation",
    "stateful",
}


def train(script, stops, *, rank=0, objects=dict):
    """What is drawn in each step; interrupted before the commits of `stops`."""
    job, stops, trained = Job(rank=rank), list(stops), {}

    def entry():
        torch.manual_seed(3)
        state = TrainState(model=nn.Linear(1, 1), epoch=0, batch=0, random=None, **objects())
        script.run(state, stops, trained)
        return trained

    try:
        result, _ = job.run(entry)
        return result
    finally:
        job.close()


@pytest.fixture(autouse=True)
def fresh():
    phases.install()
    step_randoms.install()
    torch.set_num_threads(1)


def said(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and record.name == step_randoms.__name__
    ]


def check(name, script, caplog, **options):
    expected = train(script, [], **options)
    warnings = said(caplog)  # of the run without a fault: before it does harm
    interrupted = train(script, [2, STEPS + 3], **options)
    assert len(expected) in (STEPS, 2 * STEPS)
    assert (interrupted == expected) == (name not in OTHERS)
    assert len(warnings) == (name in OTHERS)
    assert len(said(caplog)) == 2 * len(warnings), "it is said once in each process"
    for text in warnings:
        assert text.startswith(
            "rank 0: steps draw from torch's generator within a pass of a DataLoader that has none"
        )


@pytest.mark.parametrize("name", SCRIPTS)
def test_who_would_draw_something_else_is_warned_in_time_and_nobody_else(name, caplog):
    check(name, SCRIPTS[name], caplog)


@pytest.mark.parametrize("name", ["stateful", "stateful, its generator"])
def test_a_loader_that_is_carried_begins_its_pass_anew_too(name, caplog):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def objects():
        generator = torch.Generator() if name != "stateful" else None
        return {"loader": stateful.StatefulDataLoader(Ids(), BATCH, generator=generator)}

    check(name, Stateful(), caplog, objects=objects)


def test_what_is_drawn_between_passes_is_no_matter_of_steps(caplog):
    train(Script(nothing, between=rand), [])
    assert said(caplog) == []


def test_persistent_workers_begin_a_new_pass_each_time(caplog):
    """The second pass of theirs draws nothing; after a fault it begins with new ones."""

    def entry():
        loader = plain(num_workers=1, persistent_workers=True)
        state = TrainState(epoch=0)
        state.restore()
        for _ in loader:
            state.commit()
        for _ in loader:
            torch.rand(1)
            state.commit()

    job = Job()
    job.resume(None)
    job.enter(entry)
    job.close()
    assert len(said(caplog)) == 1


def test_one_rank_says_it(caplog):
    train(SCRIPTS["dropout"], [], rank=1)
    assert said(caplog) == []


def test_nothing_is_drawn_for_it():
    """Nor is the generator read again while nobody draws."""
    randoms = RandomStates()
    randoms.capture()
    before = torch.get_rng_state()
    assert randoms.torch_state() is randoms.torch_state()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert randoms.torch_state() == torch.get_rng_state().numpy().tobytes()


@pytest.mark.xdist_group("torch's generator")
@pytest.mark.parametrize("again", [False, True])
def test_no_test_begins_with_what_another_has_drawn(again):
    """Half of a pair of normal deviates, above all: while one is held back, all is read anew."""
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(0).get_state())
    torch.randn(1)
