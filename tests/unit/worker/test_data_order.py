"""Loaders that draw their order themselves.

The warning comes where, and only where, an entry that goes on would draw another one.
"""

import logging

import pytest
import torch
from job import Job, Stop
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    WeightedRandomSampler,
)

from taskd.worker.state import data_order, phases
from taskd.worker.train_state import TrainState

SAMPLES, BATCH, EPOCHS = 24, 4, 2
STEPS = SAMPLES // BATCH


class Ids(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index


class Seedable(RandomSampler):
    """As trainers have it: an order of its own."""

    epoch = 0

    def __iter__(self):
        return iter(
            torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        )


def plain(_state, workers=0):
    return DataLoader(Ids(), BATCH, shuffle=True, num_workers=workers)


class Variant:
    """How a script orders its data: a loader, and what it does before each pass."""

    def __init__(
        self, make=plain, before=lambda _state, _loader, _epoch: None, values=None, **options
    ):
        self.make, self.before, self.values, self.options = make, before, values or {}, options

    def loader(self, state):
        return self.make(state, **self.options)


def own_generator(_state, seed=1):
    return DataLoader(Ids(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(seed))


def keep_or_set(state, loader, _epoch):
    if state.batch == 0:
        state.order = loader.generator.get_state()
    else:
        loader.generator.set_state(state.order)


VARIANTS = {
    "shuffle": Variant(),
    "shuffle, workers": Variant(workers=2),
    "weighted": Variant(
        lambda _: DataLoader(
            Ids(), BATCH, sampler=WeightedRandomSampler(torch.ones(SAMPLES), SAMPLES)
        )
    ),
    "seeded once": Variant(own_generator),
    "seeded by epoch": Variant(before=lambda _state, _loader, epoch: torch.manual_seed(7 + epoch)),
    "own, seeded by epoch": Variant(
        own_generator, lambda _state, loader, epoch: loader.generator.manual_seed(7 + epoch)
    ),
    "own, kept": Variant(own_generator, keep_or_set, {"order": None}),
    "no shuffle": Variant(lambda _: DataLoader(Ids(), BATCH)),
    "distributed": Variant(
        lambda _: DataLoader(Ids(), BATCH, sampler=DistributedSampler(Ids(), 1, 0)),
        lambda _state, loader, epoch: loader.sampler.set_epoch(epoch),
    ),
    "a sampler of its own": Variant(
        lambda _: DataLoader(Ids(), BATCH, sampler=Seedable(Ids())),
        lambda _state, loader, epoch: setattr(loader.sampler, "epoch", epoch),
    ),
}


def ids_of(variant, stops, *, rank=0):
    """Samples of each step of two epochs, skipping the batches done on re-entry.

    Interrupted before the commits of `stops`.
    """
    job, stops, trained = Job(rank=rank), list(stops), {}

    def entry():
        torch.manual_seed(3)
        model = nn.Linear(1, 1)
        state = TrainState(model=model, epoch=0, batch=0, **variant.values)
        loader = variant.loader(state)
        state.restore()
        for epoch in range(state.epoch, EPOCHS):
            variant.before(state, loader, epoch)
            for number, batch in enumerate(loader):
                if number < state.batch:
                    continue
                torch.rand(2)
                if stops and state.step == stops[0]:
                    stops.pop(0)
                    raise Stop
                trained[state.step] = batch.tolist()
                state.batch = number + 1
                state.commit()
            state.epoch, state.batch = epoch + 1, 0
        return trained

    try:
        result, _ = job.run(entry)
        return result
    finally:
        job.close()


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    phases.install()
    data_order.install()
    monkeypatch.setattr(data_order, "_is_said", False)
    torch.set_num_threads(1)


def said(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and record.name == data_order.__name__
    ]


@pytest.mark.parametrize("name", VARIANTS)
def test_who_would_get_another_order_is_warned_in_time_and_nobody_else(name, caplog):
    variant = VARIANTS[name]
    expected = ids_of(variant, [])
    warnings = said(caplog)  # of the run without a fault: before it does harm
    interrupted = ids_of(variant, [2, STEPS + 3])
    is_exact = interrupted == expected
    assert is_exact == (name not in {"shuffle", "shuffle, workers", "weighted", "seeded once"})
    assert len(warnings) == (0 if is_exact else 1)
    assert len(said(caplog)) == len(warnings), "it is said once"
    if warnings:
        assert warnings[0].startswith(
            "rank 0: steps are committed within a pass of a DataLoader "
            "that draws its order from a generator"
        )


def test_what_is_seeded_before_restore_is_not_seeded_for_the_pass(caplog):
    """The first entry goes through the data in the order of the seed.

    Restore() puts the generator back in later ones.
    """

    def entry(job):
        state = TrainState(epoch=0)
        torch.manual_seed(5)
        state.restore()
        for _ in DataLoader(Ids(), BATCH, shuffle=True):
            state.commit()

    job = Job()
    job.resume(None)
    job.enter(entry, job)
    job.close()
    assert len(said(caplog)) == 1


def test_a_pass_that_begins_before_restore_has_the_order_that_the_script_seeds(caplog):
    """In each entry; and restore() may change the version as commits do."""
    stops, orders = [2, 4], []

    def entry():
        torch.manual_seed(5)
        state = TrainState(model=nn.Linear(1, 1), epoch=0)
        order = []
        orders.append(order)
        batches = iter(DataLoader(Ids(), BATCH, shuffle=True))
        order += next(batches).tolist()
        state.restore()
        for number, batch in enumerate(batches):
            order += batch.tolist()
            if number < state.step:
                continue
            if state.step in stops:
                stops.remove(state.step)
                raise Stop
            state.commit()
        return True

    job = Job()
    job.resume(None)
    result, report = job.enter(entry)
    while not result:
        job.resume(report.version)
        result, report = job.enter(entry)
    job.close()
    assert all(order == orders[-1][: len(order)] for order in orders)
    assert len(orders) == 3
    assert said(caplog) == []


def test_a_validation_between_commits_is_no_matter(caplog):
    def entry():
        state = TrainState(epoch=0)
        state.restore()
        for _ in range(3):
            list(DataLoader(Ids(), BATCH, shuffle=True))
            state.commit()
        return True

    job = Job()
    job.resume(None)
    assert job.enter(entry)[0]
    job.close()
    assert said(caplog) == []


@pytest.mark.parametrize("registered", [False, True])
def test_a_loader_that_carries_its_order_is_registered(registered, caplog):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def entry():
        loader = stateful.StatefulDataLoader(Ids(), BATCH, shuffle=True)
        state = TrainState(epoch=0, **({"loader": loader} if registered else {}))
        state.restore()
        # it seeds itself when it is made: only the order of the second pass depends on how far it
        # is
        for _ in range(2):
            for _ in loader:
                state.commit()

    job = Job()
    job.resume(None)
    job.enter(entry)
    job.close()
    assert len(said(caplog)) == (not registered)


@pytest.mark.parametrize("seeded", [False, True])
def test_one_that_carries_how_far_it_is_but_not_its_order_is_named(seeded, caplog):
    """Torchdata skips what a sampler of torch gives, which draws from another place by then."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def entry(stops):
        torch.manual_seed(3)
        loader = stateful.StatefulDataLoader(Ids(), BATCH, sampler=RandomSampler(Ids()))
        state = TrainState(epoch=0, loader=loader)
        state.restore()
        for epoch in range(state.epoch, 2):
            if seeded:
                torch.manual_seed(7 + epoch)
            for batch in loader:
                if state.step in stops:
                    stops.remove(state.step)
                    raise Stop
                trained[state.step] = batch.tolist()
                state.commit()
            state.epoch += 1
        return dict(trained)

    runs = []
    for stops in ([], [2, STEPS + 3]):
        job, trained = Job(), {}
        job.resume(None)
        result, report = job.enter(entry, stops)
        while result is None:
            job.resume(report.version)
            result, report = job.enter(entry, stops)
        job.close()
        runs.append(result)
        assert len(said(caplog)) == (not seeded)
    assert (runs[0] == runs[1]) is seeded


def test_persistent_workers_begin_a_new_pass_each_time(caplog):
    def entry():
        loader = DataLoader(Ids(), BATCH, shuffle=True, num_workers=1, persistent_workers=True)
        state = TrainState(epoch=0)
        state.restore()
        torch.manual_seed(11)
        for _ in loader:  # seeded for this pass
            state.commit()
        assert said(caplog) == []
        torch.rand(1)
        for _ in loader:
            state.commit()
        return True

    job = Job()
    job.resume(None)
    assert job.enter(entry)[0]
    job.close()
    assert len(said(caplog)) == 1


def test_one_rank_says_it(caplog):
    ids_of(VARIANTS["shuffle"], [], rank=1)
    assert said(caplog) == []
