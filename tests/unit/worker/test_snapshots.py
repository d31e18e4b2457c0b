"""Snapshots of TrainStates in one process.

What is made when, and that a state is put back from one to the last bit.
"""

import logging

import pytest
import torch
from job import Average, Job, Sampler, Stop
from torch import nn

from taskd.core import commands
from taskd.core.commands import Move
from taskd.errors import StateError
from taskd.native import node_memory
from taskd.native.arena_copy import AWAITED, UNMIRRORED
from taskd.native.arenas import Arenas
from taskd.worker.saving.dumping import Dumping
from taskd.worker.train_state import TrainState

STEPS = 9


@pytest.fixture
def job():
    job = Job()
    job.life.job_id = "job"
    job.life.saving.arenas = Arenas.create()
    job.resume(None)
    yield job
    job.life.saving.arenas.close()
    job.close()


class Training:
    """One entry: two TrainStates, everything that a state can consist of."""

    def __init__(self, every=2, stop=None, grow_at=None, tear=None, folder=None):
        self.every, self.stop, self.grow_at, self.tear, self.folder = (
            every,
            stop,
            grow_at,
            tear,
            folder,
        )

    def __call__(self):
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 4)
        )
        self.other, self.late = nn.Linear(4, 4), nn.Linear(300, 300)
        self.optimizers = [
            torch.optim.Adam(self.model.parameters(), lr=0.01),
            torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.9),
        ]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2)
        self.sampler, self.average = Sampler(), Average(self.model)
        self.first = TrainState(
            model=self.model,
            optimizer=self.optimizers[0],
            scheduler=self.scheduler,
            sampler=self.sampler,
            average=self.average,
            late=self.late,
            snapshot_every=self.every,
            checkpoint_dir=self.folder,
            losses=[],
        )
        self.second = TrainState("second", model=self.other, optimizer=self.optimizers[1])
        self.restored = [str(state.restore()) for state in (self.first, self.second)]
        if self.grow_at is not None and self.first.step > self.grow_at:
            raise AssertionError("the model of this test has another form after that step")
        while self.first.step < STEPS:
            self.step()
        return self.found()

    def step(self):
        if self.first.step == self.grow_at:
            self.optimizers[0].add_param_group({"params": list(self.late.parameters())})
        loss = (
            self.other(self.model(torch.randn(8, 64))).square().mean()
            + self.late(torch.ones(1, 300)).square().mean()
        )
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        if self.first.step == self.stop:
            self.stop = None
            raise Stop
        for optimizer in self.optimizers:
            optimizer.step()
        if self.first.step == self.tear:
            self.tear = None
            raise Stop
        self.average.update(self.model)
        self.scheduler.step()
        self.sampler.position += 8
        self.first.losses = [*self.first.losses, loss.item()]
        self.first.commit()
        self.second.commit()

    def found(self):
        objects = (
            self.model,
            self.other,
            *self.optimizers,
            self.scheduler,
            self.average,
            self.sampler,
        )
        return [value.state_dict() for value in objects], self.first.losses, torch.rand(3)


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def undisturbed():
    job = Job()
    job.resume(None)
    try:
        return job.enter(Training(every=0))[0]
    finally:
        job.close()


@pytest.mark.parametrize("is_dead", [True, False])
def test_the_state_is_put_back_to_the_last_bit(job, is_dead):
    """Version 12 is two commits of each of six steps.

    Every second step the second TrainState completes an even one.
    """
    training = Training(stop=6)
    _, report = job.enter(training)
    assert (report.version, report.clean) == (12, True)
    assert job.life.saving.arenas.versions() == (10, 12)
    if is_dead:
        job.replace()
    job.resume(10, {0: Move(0, snapshot=10)})
    again = Training()
    result, _ = job.enter(again)
    assert again.restored == ["loaded version 10 from the memory of its node"] * 2
    assert same(result, undisturbed())
    assert job.life.saving.arenas.versions() == (16, 18)


def test_what_was_newer_is_forgotten(job):
    job.enter(Training(stop=6))
    job.resume(10, {0: Move(0, snapshot=10)})
    job.enter(Training(stop=5))
    assert job.life.saving.arenas.versions() == (10,)


def test_a_fresh_start_forgets_everything(job):
    job.enter(Training(stop=6))
    job.resume(None)
    job.enter(Training(stop=0))
    assert job.life.saving.arenas.versions() == ()


def test_a_new_parameter_group_takes_a_larger_arena(job):
    """The first one is kept until the second one holds two.

    Others may have only what the first one has.
    """
    job.enter(Training(stop=4, grow_at=3))
    assert job.life.saving.arenas.versions() == (4, 6, 8)
    assert len(job.life.saving.arenas.all()) == 2
    job.resume(None)
    job.enter(Training(stop=7, grow_at=3))
    assert job.life.saving.arenas.versions() == (12, 14)
    assert len(job.life.saving.arenas.all()) == 1  # the first one was given back


def test_a_snapshot_that_is_not_there_is_an_error(job):
    job.enter(Training(stop=6))
    job.resume(4, {0: Move(0, snapshot=4)})
    with pytest.raises(
        StateError,
        match=r"rank 0: its snapshot of version 4 is gone: there is "
        r"only \[10, 12\]",
    ):
        job.enter(Training())


def test_too_little_memory_is_told_before_the_training_begins(job, monkeypatch):
    monkeypatch.setattr(node_memory, "limits", lambda *_: [node_memory.Limit("the test", 0)])
    with pytest.raises(
        StateError,
        match=r"rank 0: no node memory for snapshots: .* the test "
        r"leaves",
    ):
        job.enter(Training())


@pytest.mark.parametrize("every", [-1, 1.5, True])
def test_not_a_number_of_steps(job, every):
    with pytest.raises(StateError, match="snapshot_every="):
        job.enter(Training(every=every))


def test_a_state_that_cannot_be_had_costs_a_snapshot_and_no_training(job, caplog, monkeypatch):
    def fail(_self):
        raise RuntimeError("the device is gone")

    class Late(Training):
        def step(self):
            with monkeypatch.context() as patch:
                if self.first.step == 4:
                    patch.setattr(Average, "state_dict", fail)
                super().step()

    with caplog.at_level(logging.WARNING):
        result, _ = job.enter(Late())
    assert same(result[1:], undisturbed()[1:])
    (record,) = (
        record for record in caplog.records if record.name == "taskd.worker.saving.snapshots"
    )
    assert (
        "rank 0: no snapshot of version 10 could be made: the device is gone. The one "
        "before it "
        "stays; training goes on"
    ) in record.getMessage()
    assert job.life.saving.arenas.versions() == (16, 18)


def test_one_that_falls_due_half_way_is_made_at_the_end_of_the_step(job):
    job.enter(Training(every=5, stop=5))
    assert job.life.saving.arenas.versions() == (6, 10)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_dump_never_takes_what_is_torn(job, tmp_path, is_replaced):
    """The optimizers have stepped, the commit has not come: only the snapshot is version 10.

    A replacement has nothing else anyway.
    """
    _, report = job.enter(Training(tear=5, folder=tmp_path))
    assert (report.version, report.clean) == (10, False)
    assert job.life.saving.arenas.versions() == (8, 10)
    if is_replaced:
        job.replace()
        job.life.job_id = "job"
    dumping = Dumping(job.life, "job")
    assert dumping.obey(commands.Dump("", 1, 10, (0,), 1, "a test", "attempt")) == ("written", "")
    assert dumping.obey(commands.Publish("", 1, 0, 0, 0)) == (
        "published",
        str(tmp_path / "dump-000000000010"),
    )
    job.resume(None)
    again = Training(folder=tmp_path)
    result, _ = job.enter(again)
    assert again.restored == [f"read version 10 from {tmp_path}/dump-000000000010"] * 2
    assert same(result, undisturbed())


def test_an_order_that_the_manager_repeats_is_obeyed_once_and_answered_again(job, tmp_path):
    """It does so when an agent registers again; to write twice would cost the dump."""
    job.enter(Training(tear=5, folder=tmp_path))
    dumping = Dumping(job.life, "job")
    dump = commands.Dump("", 1, 10, (0,), 1, "a test", "attempt")
    publish = commands.Publish("", 1, 0, 0, 0)
    said = [dumping.obey(order) for order in (dump, dump, publish, publish)]
    published = ("published", str(tmp_path / "dump-000000000010"))
    assert said == [("written", ""), ("written", ""), published, published]


def test_what_is_written_anew_because_a_writer_has_died_is_not_there_twice(job, tmp_path):
    job.enter(Training(tear=5, folder=tmp_path))
    dumping, said = Dumping(job.life, "job"), []
    for attempt, writers in (("1", (0, 1, 2)), ("2", (0, 1)), ("3", (0,))):
        said.append(dumping.obey(commands.Dump("", 1, 10, writers, 3, "a test", attempt)))
        (part,) = tmp_path.glob(".*/__0_0.distcp")
        assert part.parent.name.endswith(f"-{attempt}")
    assert said == [("written", "")] * 3
    assert len(list(tmp_path.iterdir())) == 1
    assert dumping.obey(commands.Publish("", 1, 0, 0, 0))[0] == "published"
    assert [path.name for path in tmp_path.iterdir()] == ["dump-000000000010"]


def test_too_little_memory_in_a_recovery_costs_snapshots_only(job, monkeypatch, caplog):
    job.enter(Training(every=100, stop=6))
    job.resume(12)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(node_memory, "limits", lambda *_: [node_memory.Limit("the test", 0)])
        result, _ = job.enter(Training())
    assert same(result, undisturbed())
    assert "the test leaves" in caplog.text
    assert job.life.saving.arenas.versions() == ()


def test_a_state_that_is_made_later_drops_no_snapshot(job):
    class Late(Training):
        def step(self):
            if self.first.step == 8:
                TrainState("late", model=nn.Linear(1, 1)).restore()
            super().step()

    job.enter(Training(stop=6))
    job.resume(10, {0: Move(0, snapshot=10)})
    job.enter(Late(stop=8))
    assert job.life.saving.arenas.versions() == (14, 16)


@pytest.mark.parametrize(("mark", "kept"), [
    (lambda _: UNMIRRORED, (2, 3)),  # no buddy was found: as if none had been asked for
    (lambda _: AWAITED, (1, 2)),                         # the agent has begun
    (lambda arena: arena.newest_seal(), (2, 3)),         # the mirror of the newest one is there
])  # fmt: skip
def test_the_older_snapshot_stays_until_the_newer_one_has_its_mirror(job, mark, kept):
    def train():
        model = nn.Linear(4, 4)
        state = TrainState(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            snapshot_every=1,
            snapshot_buddy=True,
        )
        state.restore()
        snapshots = job.life.saving.snapshots
        while state.step < 3:
            if state.step == 2:
                (arena,) = job.life.saving.arenas.all()
                arena.mirror_mark = mark(arena)
            snapshots.is_allowed = snapshots.may_replace()  # as in a vote of one
            model(torch.ones(4)).sum().backward()
            state._holding.roles.optimizers["optimizer"].step()
            state.commit()
            snapshots.wait()

    job.enter(train)
    assert job.life.saving.arenas.versions() == kept
