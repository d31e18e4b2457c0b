"""Periodic checkpoints in one process, or a few.

When they are made, and what happens when they cannot be.
"""

import logging
import threading
import time

import pytest
import sharded_saving
import torch
from job import Job
from torch import nn

from taskd.checkpoint.draft import Draft
from taskd.checkpoint.load import load
from taskd.errors import StateError
from taskd.native.black_box import Phase
from taskd.worker.train_state import TrainState


@pytest.fixture
def job():
    job = Job()
    job.life.job_id = "job"
    job.resume(None)
    yield job
    job.close()


def test_no_checkpoint_is_made_while_another_state_is_half_way(job, tmp_path):
    def entry():
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        states = [
            TrainState(
                name, model=model, optimizer=optimizer, checkpoint_dir=tmp_path, checkpoint_every=3
            )
            for name, model, optimizer in zip("ab", models, optimizers, strict=True)
        ]
        for state in states:
            state.restore()
        versions = []
        for _ in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            # version 3 is complete when "a" is: the optimizer of "b" has stepped already
            for state in states:
                state.commit()
                job.life.saving.periodic.wait()
                versions.append(sorted(path.name for path in tmp_path.iterdir()))
        return versions

    versions, _ = job.enter(entry)
    four, six = "step-000000000004", "step-000000000006"
    assert versions == [[], [], [], [four], [four], [four, six], [four, six], [four, six]]


class Fragile:
    """A replica whose state can be had only sometimes."""

    def __init__(self):
        self.tensor, self.problem = torch.zeros(10_000), None

    def state_dict(self):
        if self.problem:
            raise self.problem
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]


@pytest.mark.parametrize("problem", [OSError("the device is gone"), StateError("not now")])
def test_a_state_that_cannot_be_had_costs_a_checkpoint_and_no_training(
    job, tmp_path, caplog, problem
):
    def entry():
        model, fragile = nn.Linear(2, 2), Fragile()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(
            model=model,
            optimizer=optimizer,
            fragile=fragile,
            checkpoint_dir=tmp_path,
            checkpoint_every=2,
        )
        state.restore()
        while state.step < 4:
            fragile.problem = problem if state.step < 2 else None
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.commit()
        job.life.saving.periodic.wait()
        return state.step

    with caplog.at_level(logging.WARNING):
        assert job.enter(entry)[0] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000004"]
    (record,) = (
        record for record in caplog.records if record.name == "taskd.worker.saving.periodic"
    )
    assert (
        f"rank 0: the checkpoint of version 2 could not be saved, the previous ones stay: {problem}"
    ) in record.getMessage()


@pytest.fixture
def disk(monkeypatch):
    """An event: until it is set, no saver begins to write."""
    is_ready, join = threading.Event(), Draft.join

    def join_when_ready(draft, rank):
        assert is_ready.wait(60)
        join(draft, rank)

    monkeypatch.setattr(Draft, "join", join_when_ready)
    return is_ready


def test_a_checkpoint_has_the_plain_values_of_its_own_step(job, tmp_path, disk):
    """And not what training has made of them while it was written."""

    def entry():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        state = TrainState(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            losses=[1.0],
            seen={"first": [1, 2]},
            average=torch.tensor([1.0, 2.0]),
            checkpoint_dir=tmp_path,
            checkpoint_every=1,
        )
        state.restore()
        state.commit()
        state.losses.append(2.0)
        state.seen["first"].append(3)
        state.average.mul_(3)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
        disk.set()
        job.life.saving.periodic.wait()

    job.enter(entry)
    (path,) = tmp_path.iterdir()
    saved = load(path, {}, ["taskd.state.train"])["taskd.state.train"]
    assert saved["values"]["losses"] == [1.0]
    assert saved["values"]["seen"] == {"first": [1, 2]}
    assert saved["values"]["average"].tolist() == [1.0, 2.0]
    (group,) = saved["optimizers"]["optimizer"]["groups"]
    assert group["lr"].item() == 0.5
    assert saved["states"]["scheduler"]["last_epoch"] == 0


def test_a_checkpoint_has_the_lists_in_an_optimizers_memory_of_its_own_step(job, tmp_path, disk):
    def entry():
        model, data = nn.Linear(2, 2), torch.randn(8, 2)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure():
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            return loss

        state = TrainState(
            model=model, optimizer=optimizer, checkpoint_dir=tmp_path, checkpoint_every=1
        )
        state.restore()
        optimizer.step(closure)
        state.commit()
        (memory,) = optimizer.state.values()
        before = [direction.clone() for direction in memory["old_dirs"]]
        for _ in range(3):
            optimizer.step(closure)
        assert len(memory["old_dirs"]) > len(before)
        disk.set()
        job.life.saving.periodic.wait()
        return before

    before, _ = job.enter(entry)
    (path,) = tmp_path.iterdir()
    (saved,) = load(path, {}, ["taskd.state.train"])["taskd.state.train"]["optimizers"][
        "optimizer"
    ]["state"].values()
    assert torch.equal(torch.stack(saved["old_dirs"]), torch.stack(before))


def test_a_value_that_cannot_be_saved_is_named(job, tmp_path, caplog):
    def entry():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["mine"] = object()
        state = TrainState(
            model=model, optimizer=optimizer, checkpoint_dir=tmp_path, checkpoint_every=1
        )
        state.restore()
        state.commit()
        job.life.saving.periodic.wait()

    with caplog.at_level(logging.WARNING):
        job.enter(entry)
    (record,) = (record for record in caplog.records if "could not be saved" in record.message)
    assert (
        "taskd.state.train[optimizers][optimizer][groups][0][mine] is a builtins.object"
        in record.message.replace("'", "")
    )
    assert record.exc_info is None or not record.exc_info
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]


class Noting:
    """A replica that notes what the main thread is said to do when its state is copied."""

    def __init__(self, box):
        self.box, self.tensor, self.phases = box, torch.zeros(10_000), []

    def state_dict(self):
        self.phases.append(self.box.phase)
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]


def test_a_rank_that_waits_for_its_disk_or_copies_is_in_a_checkpoint(job, tmp_path, monkeypatch):
    """Else it would be taken for hung: other ranks have finished their part, and wait for it."""
    box, join = job.life.box, Draft.join

    def join_when_waited_for(draft, rank):
        deadline = time.monotonic() + 10
        while box.phase is not Phase.CHECKPOINT and time.monotonic() < deadline:
            time.sleep(0.001)
        waited.append(box.phase)
        join(draft, rank)

    waited = []
    monkeypatch.setattr(Draft, "join", join_when_waited_for)

    def entry():
        model, noting = nn.Linear(2, 2), Noting(box)
        state = TrainState(model=model, noting=noting, checkpoint_dir=tmp_path, checkpoint_every=2)
        state.restore()
        noting.phases.clear()
        visits = [0]
        for _ in range(4):
            state.commit()
            assert box.phase is Phase.STEP
            visits.append(box.phase_times().get("checkpoint", (0,))[0])
        job.life.saving.periodic.wait()
        assert box.phase is Phase.STEP
        return visits, noting.phases

    (visits, copied), _ = job.enter(entry)
    assert waited == [Phase.CHECKPOINT] * 2
    assert set(copied) == {Phase.CHECKPOINT}
    assert visits == [0, 0, 1, 1, 2]  # once in each commit that saves, else never
    assert len(list(tmp_path.iterdir())) == 2


def test_a_publisher_that_waits_for_the_parts_of_others_goes_on(job, tmp_path, monkeypatch):
    """Their disk may be slow: it is asleep for as long as they write, and gives up by itself."""
    box, missing = job.life.box, Draft.missing

    def missing_until_it_went_on(draft):
        if box.phase is Phase.CHECKPOINT and box.progress_at not in seen:
            seen.append(box.progress_at)
        return [7] if len(seen) < 5 else missing(draft)

    seen = []
    monkeypatch.setattr(Draft, "missing", missing_until_it_went_on)
    monkeypatch.setattr("taskd.worker.saving.periodic._RENEWED_S", 0.0)

    def entry():
        state = TrainState(model=nn.Linear(2, 2), checkpoint_dir=tmp_path, checkpoint_every=1)
        state.restore()
        state.commit()
        job.life.saving.periodic.wait()

    job.enter(entry)
    assert len(seen) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001"]


def test_ranks_without_a_group_are_told_to_make_one(tmp_path):
    job = Job(0, 2)
    job.resume(None)
    try:
        with pytest.raises(
            StateError,
            match=r"checkpoint_every=2\): call init_process_group\(\) "
            r"before restore\(\)",
        ):
            job.enter(
                lambda: TrainState(
                    model=nn.Linear(1, 1), checkpoint_dir=tmp_path, checkpoint_every=2
                ).restore()
            )
    finally:
        job.close()


def test_a_checkpoint_at_once(job, tmp_path):
    """It is on the disk when the call returns, and retention leaves it alone."""

    def entry(stop=False):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(
            model=model,
            optimizer=optimizer,
            checkpoint_dir=tmp_path,
            checkpoint_every=1,
            checkpoint_keep=1,
        )
        restored = state.restore()
        if stop:
            return str(restored)
        paths = []
        while state.step < 3:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            with pytest.raises(StateError, match="between an optimizer step and its commit"):
                state.save()
            state.commit()
            job.life.saving.periodic.wait()
            if state.step == 1:
                paths = [state.save(), state.save(), state.save(tmp_path / "elsewhere")]
                assert all(path.is_dir() for path in paths)
        return paths

    paths, _ = job.enter(entry)
    assert paths == [
        tmp_path / "save-000000000001",
        tmp_path / "save-000000000001-2",
        tmp_path / "elsewhere" / "save-000000000001",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {
        "save-000000000001",
        "save-000000000001-2",
        "elsewhere",
        "step-000000000003",
    }
    job.resume(None)
    assert job.enter(entry, True)[0] == f"read version 3 from {tmp_path / 'step-000000000003'}"


def test_a_checkpoint_at_once_in_a_world_without_the_first_ranks(tmp_path):
    """Files of a checkpoint know ranks by their numbers in the world."""
    job = Job(rank=2, world_size=1)
    job.life.active = (2,)
    job.resume(None)

    def entry():
        model = nn.Linear(2, 2)
        state = TrainState(model=model, checkpoint_dir=tmp_path)
        state.restore()
        state.commit()
        return state.save()

    try:
        assert job.enter(entry)[0] == tmp_path / "save-000000000001"
    finally:
        job.close()


def test_a_checkpoint_at_once_needs_a_job(tmp_path):
    with pytest.raises(StateError, match="for a taskd job"):
        TrainState(model=nn.Linear(1, 1), checkpoint_dir=tmp_path).save()


@pytest.mark.slow
def test_a_checkpoint_at_once_that_one_rank_cannot_write_is_an_error_on_all(world, tmp_path):
    for first, second in world.run(sharded_saving.save_at_once, 1, str(tmp_path), size=2):
        assert first.startswith("rank 1: ")
        assert "not on rank 1" in first
        assert second == str(tmp_path / "save-000000000001")
    assert [path.name for path in tmp_path.iterdir()] == ["save-000000000001"]


@pytest.mark.slow
def test_one_rank_without_its_part_costs_the_others_no_time(world, tmp_path):
    for rank, (problems, left) in enumerate(
        world.run(sharded_saving.save_hurt, 1, str(tmp_path), size=2)
    ):
        assert problems[1] == "", problems
        assert (
            "not on rank 1" in problems[0] if rank == 1 else "rank 1: not on rank 1" in problems[0]
        )
        assert left == ["step-000000000004"]
