"""Positions in the data.

When they are asked for, and that every sample comes once whatever is interrupted.
"""

import logging
import random

import pytest
import torch
from job import Job, Sampler, Stop
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

from taskd.worker.state.step import capture_pending
from taskd.worker.train_state import TrainState

SAMPLES, BATCH, EPOCHS = 48, 4, 2


class Ids(Dataset):
    """Each sample is its number."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    """The same as a stream in its epoch's order; worker k of n reads every n-th sample."""

    def __init__(self):
        self.epoch, self.begin, self.done = 0, 0, 0

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        order = torch.randperm(
            SAMPLES, generator=torch.Generator().manual_seed(100 + self.epoch)
        ).tolist()[first::step]
        begin, self.begin = self.begin, 0
        for self.done, sample in enumerate(order[begin:], begin + 1):
            yield sample

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.begin = state["done"]


class Walk:
    """A stand-in for a loader: notes when its state is asked for."""

    def __init__(self, story):
        self.story, self.position = story, 0

    def __iter__(self):
        while self.position < 100:
            self.position += 1
            self.story.append(f"sample {self.position}")
            yield self.position

    def state_dict(self):
        self.story.append("asked")
        return {"position": self.position}

    def load_state_dict(self, state):
        self.story.append("told")
        self.position = state["position"]


class Cursor:
    """One that is iterated by means of something within."""

    def __init__(self, loader):
        self.loader = loader

    def state_dict(self):
        raise AssertionError("asked before the first step")

    def load_state_dict(self, state):
        pass


class EpochSampler(DistributedSampler):
    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.set_epoch(state["epoch"])


def loader_of(kind, workers):
    """(loader, what is told the epoch)."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    if kind == "stream":
        stream = Stream()
        return stateful.StatefulDataLoader(
            stream, batch_size=BATCH, num_workers=workers
        ), lambda epoch: setattr(stream, "epoch", epoch)
    if kind == "shuffle":
        return stateful.StatefulDataLoader(
            Ids(), batch_size=BATCH, shuffle=True, num_workers=workers
        ), lambda _: None
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    classes = {"stateful sampler": StatefulDistributedSampler, "sampler": DistributedSampler}
    sampler = classes[kind](Ids(), num_replicas=2, rank=1, seed=5)
    return stateful.StatefulDataLoader(
        Ids(), batch_size=BATCH, sampler=sampler, num_workers=workers
    ), sampler.set_epoch


def ids_of(kind, workers, stops, *, replace=False):
    """Train two epochs, interrupted before the commits of `stops`.

    Returns the samples of each committed step, and the sources.
    """
    job, stops, trained, sources, loaders = Job(), list(stops), {}, [], []

    def entry():
        torch.manual_seed(3)
        loader, set_epoch = loader_of(kind, workers)
        loaders.append(loader)
        state = TrainState(model=nn.Linear(1, 1), loader=loader, epoch=0, done=0)
        sources.append(state.restore().source)
        for epoch in range(state.epoch, EPOCHS):
            set_epoch(epoch)
            for batch in loader:
                torch.rand(3)  # a step draws random numbers
                if stops and state.done == stops[0]:
                    stops.pop(0)
                    raise Stop
                trained[state.done] = batch.tolist()
                state.done += 1
                state.commit()
            state.epoch = epoch + 1
        return True

    try:
        job.resume(None)
        while True:
            result, report = job.enter(entry)
            if result:
                return trained, sources
            version = report.version
            if replace:
                job.replace()
                loaders[-1]._iterator = None  # a process that is gone has none that reads for it
            job.resume(version)
    finally:
        job.close()


@pytest.mark.parametrize("replace", [False, True], ids=["survivor", "replacement"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["stateful sampler", "sampler", "stream", "shuffle"])
def test_every_sample_comes_once_whatever_is_interrupted(kind, workers, replace):
    plain, _ = ids_of(kind, workers, [])
    steps = len(plain)
    interrupted, sources = ids_of(kind, workers, [2, steps // 2 + 3], replace=replace)
    assert len(sources) == 3
    assert interrupted == plain
    share = 1 if kind in {"stream", "shuffle"} else 2
    ids = [number for step in sorted(plain) for number in plain[step]]
    assert len(ids) == EPOCHS * SAMPLES // share
    assert len(set(ids[: len(ids) // 2])) == SAMPLES // share, "an epoch has each sample once"


def test_a_position_is_asked_for_within_a_step_only(job):
    story = []

    def entry(stop):
        model = nn.Linear(1, 1)
        walk = Walk(story)
        state = TrainState(model=model, loader=walk)
        state.restore()
        story.append("restored")
        for _ in walk:
            model(torch.ones(1, 1))
            if state.step == stop:
                raise Stop
            state.commit()

    job.resume(None)
    _, report = job.enter(entry, 2)
    assert story[:3] == ["restored", "sample 1", "asked"]
    assert story.count("sample 3") == 1
    story.clear()
    job.resume(report.version)
    _, report = job.enter(entry, 3)
    assert story[:4] == ["told", "restored", "sample 3", "asked"]


def test_what_was_restored_stands_until_the_first_step(job):
    """Entries that end before their first step lose no position, wherever it came from."""
    stops = [1, 0, 0, 5]
    begins = []

    def entry():
        walk = Walk([])
        state = TrainState(loader=walk)
        state.restore()
        begins.append(walk.position)
        stop = state.step + stops.pop(0)
        for _ in walk:
            if state.step == stop:
                raise Stop
            state.commit()

    job.resume(None)
    for replace in (False, False, True, False):
        _, report = job.enter(entry)
        if replace:
            job.replace()
        job.resume(report.version)
    assert begins == [0, 1, 1, 1]


def test_a_position_that_was_given_away_is_not_changed_by_who_got_it(job):
    class Keeper(Walk):
        def __init__(self, story):
            super().__init__(story)
            self.state = {"position": 0}

        def load_state_dict(self, state):
            self.state = state
            self.state["position"] += 100

        def state_dict(self):
            return self.state

    def entry(steps):
        keeper = Keeper([])
        state = TrainState(loader=keeper)
        state.restore()
        for _ in range(steps):
            keeper.state = {"position": 7}
            state.commit()
        return keeper.state["position"]

    job.resume(None)
    assert job.enter(entry, 1)[0] == 7
    for _ in range(2):
        job.resume(1)
        assert job.enter(entry, 0)[0] == 107


def test_what_holds_a_loader_is_not_asked_either(job):
    def entry():
        TrainState(cursor=Cursor(DataLoader(Ids()))).restore()
        return True

    job.resume(None)
    assert job.enter(entry)[0]


def test_a_loader_of_another_phase_of_the_training_is_left_alone(job):
    """Commits come while it has not begun.

    Asking would start it, before the script has told it its epoch.
    """

    def entry():
        loader, set_epoch = loader_of("stateful sampler", 0)
        state = TrainState(later=loader)
        state.restore()
        for _ in range(3):
            state.commit()
        assert loader._iterator is None
        set_epoch(1)
        for _ in loader:
            state.commit()
            break
        return True

    job.resume(None)
    assert job.enter(entry)[0]


def test_objects_that_do_not_walk_have_a_position_from_the_start(job):
    def entry():
        sampler, generator = Sampler(), random.Random(1)
        state = TrainState(counter=sampler, generator=generator)
        state.restore()
        drawn = sampler.position, generator.random()
        sampler.position += 5
        return drawn

    job.resume(None)
    first, report = job.enter(entry)
    job.resume(report.version)
    assert job.enter(entry)[0] == first


def test_a_used_loader_without_a_noted_position_is_named(job, caplog):
    walk = Walk([])

    def entry():
        state = TrainState(loader=walk)
        state.restore()
        for _ in walk:
            capture_pending(job.life, state._holding)
            raise Stop

    job.resume(None)
    _, report = job.enter(entry)
    assert not caplog.records
    job.resume(report.version)
    with caplog.at_level(logging.WARNING):
        job.enter(entry)
    assert [record.getMessage() for record in caplog.records] == [
        (
            "rank 0: TrainState 'train': loader was built outside the recoverable function, and "
            "where "
            "it was at version 0 is not known: "
            "samples may be left out. Build it inside the function"
        )
    ]


def test_a_sampler_whose_state_is_no_position_is_named(job, caplog):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    def entry(kind, name):
        loader = stateful.StatefulDataLoader(
            Ids(), batch_size=BATCH, sampler=kind(Ids(), num_replicas=2, rank=0)
        )
        TrainState(name, loader=loader)

    job.enter(
        lambda: [
            entry(kind, kind.__name__)
            for kind in (EpochSampler, StatefulDistributedSampler, DistributedSampler)
        ]
    )
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "TrainState('EpochSampler'): loader: its sampler "
        "EpochSampler has a state_dict(), and begins each pass"
    )


def drawing_loader(kind):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    from torchdata.stateful_dataloader.sampler import RandomSampler

    generator, other = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    options = {
        "shuffle": {"shuffle": True},
        "shuffle, generator": {"shuffle": True, "generator": generator},
        "sampler, generator": {
            "sampler": RandomSampler(Ids(), generator=generator),
            "generator": generator,
        },
        "sampler alone": {"sampler": RandomSampler(Ids(), generator=generator)},
        "each its own": {
            "sampler": RandomSampler(Ids(), generator=generator),
            "generator": other,
        },
        "in order, generator": {"generator": generator},
    }[kind]
    return stateful.StatefulDataLoader(Ids(), batch_size=BATCH, **options)


def drawn_ids(kind, stops):
    job, trained = Job(), {}

    def entry():
        torch.manual_seed(3)
        loader = drawing_loader(kind)
        state = TrainState(loader=loader, epoch=0)
        state.restore()
        for _ in range(state.epoch, 3):
            for batch in loader:
                if state.step in stops:
                    stops.remove(state.step)
                    raise Stop
                trained[state.step] = batch.tolist()
                state.commit()
            state.epoch += 1
        return trained

    job.resume(None)
    result, report = job.enter(entry)
    while result is None:
        job.resume(report.version)
        result, report = job.enter(entry)
    job.close()
    return result


@pytest.mark.parametrize(
    ("kind", "is_exact"),
    [
        ("shuffle", True),
        ("shuffle, generator", False),
        ("sampler, generator", False),
        ("sampler alone", True),
        ("each its own", True),
        ("in order, generator", True),
    ],
)
def test_a_loader_and_a_sampler_with_one_generator_are_named(kind, is_exact, caplog):
    """The next pass of such a one has another order, by torchdata itself."""
    expected = drawn_ids(kind, [])
    lines = [record.getMessage() for record in caplog.records]
    assert (drawn_ids(kind, [3]) == expected) is is_exact
    assert len(lines) == (not is_exact)
    if lines:
        assert lines[0].startswith(
            "TrainState('train'): loader: it and its RandomSampler draw from one generator: after "
            "a fault each later pass"
        )
