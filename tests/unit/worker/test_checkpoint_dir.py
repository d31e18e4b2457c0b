"""Where the checkpoints of several TrainStates are: in one directory, whoever names it."""

import os

import pytest
import torch
from job import Job
from torch import nn

from taskd.checkpoint.folder import scan
from taskd.core import commands
from taskd.errors import StateError
from taskd.native.arenas import Arenas
from taskd.worker.life import current
from taskd.worker.saving.dumping import Dumping
from taskd.worker.train_state import TrainState


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """Makes jobs, which begin one after the other, in a directory of their own."""
    made = []
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def begin():
        made.append(Job())
        return made[-1]

    yield begin
    for job in made:
        job.close()


def build(name, **options):
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return TrainState(name, model=model, optimizer=optimizer, **options)


def trained(first, second, *, steps=2, save=None):
    """An entry with two TrainStates, which says where each was restored from.

    `first`, `second`: their options. `save`: which of them is asked for a checkpoint at the end.
    """

    def entry():
        states = [build("g", **first), build("d", **second)]
        restored = [str(state.restore()) for state in states]
        for _ in range(steps):
            for state in states:
                state.commit()
        if save is not None:
            states[save].save()
        if current().saving.periodic is not None:
            current().saving.periodic.wait()
        return restored

    return entry


@pytest.mark.parametrize("named_by", [0, 1])
@pytest.mark.parametrize("every_by", [0, 1, None])
def test_the_next_start_finds_them_whichever_state_names_the_directory(
    jobs, tmp_path, named_by, every_by
):
    options = [{}, {}]
    options[named_by]["checkpoint_dir"] = tmp_path / "there"
    if every_by is not None:
        options[every_by]["checkpoint_every"] = 4
    save = 1 - named_by if every_by is None else None
    assert jobs().enter(trained(*options, save=save))[0] == ["nothing: fresh start"] * 2
    (found,) = scan(tmp_path / "there", "").valid
    assert jobs().enter(trained(*options, steps=0))[0] == [f"read version 4 from {found.path}"] * 2
    assert list((tmp_path / "work").iterdir()) == []


def test_two_directories_are_refused_before_anything_is_looked_for(jobs, tmp_path):
    options = {"checkpoint_dir": tmp_path / "g"}, {"checkpoint_dir": tmp_path / "d"}
    with pytest.raises(StateError, match=r"TrainState\('d'\): checkpoint_dir=.*/d' is another"):
        jobs().enter(trained(*options))


def test_the_same_one_may_be_written_in_two_ways(jobs, tmp_path):
    options = {"checkpoint_dir": "../there"}, {"checkpoint_dir": tmp_path / "there"}
    jobs().enter(trained(*options, save=0))
    assert len(scan(tmp_path / "there", "").valid) == 1


def test_a_state_that_is_built_too_late_to_say_where_they_are_is_refused(jobs, tmp_path):
    """The job would begin from the beginning at each start."""

    def entry(options):
        build("g").restore()
        build("d", **options).restore()

    with pytest.raises(StateError, match="build the TrainState that names it before the first"):
        jobs().enter(entry, {"checkpoint_dir": tmp_path / "there"})
    jobs().enter(entry, {"checkpoint_dir": "./taskd_checkpoints"})  # where it has looked


def test_a_process_that_begins_where_the_place_was_deleted_has_the_same_one(jobs, tmp_path):
    """As those have that began before; it is made anew when there is something to save."""
    (tmp_path / "work").rmdir()
    assert jobs().enter(trained({}, {}, save=0))[0] == ["nothing: fresh start"] * 2
    assert len(scan(tmp_path / "work" / "taskd_checkpoints", "").valid) == 1


@pytest.mark.parametrize(
    ("options", "name"), [({}, "taskd_checkpoints"), ({"checkpoint_dir": "there"}, "there")]
)
@pytest.mark.parametrize("is_stored", [False, True])
def test_a_relative_one_stays_the_same_when_the_script_changes_its_directory(
    jobs, tmp_path, options, name, is_stored
):
    """In each entry, for checkpoints of all kinds, made from memory or from a snapshot."""
    where = tmp_path / "work" / name
    (tmp_path / "other").mkdir()
    job = jobs()
    job.life.job_id, job.life.saving.arenas = "job", Arenas.create()

    def entry():
        state = build("g", checkpoint_every=1, snapshot_every=1, **options)
        restored = state.restore().source
        os.chdir(tmp_path / "other")
        while state.step < 2:
            state.commit()
            current().saving.snapshots.wait()  # else the next one is not made
        assert state.save().parent == where
        assert state.save("own").parent == tmp_path / "other" / "own"
        current().saving.periodic.wait()
        return restored

    try:
        assert job.enter(entry)[0] == "nothing"
        job.resume(2)
        assert job.enter(entry)[0] == "memory"
        if is_stored:  # what a replacement of the rank has
            job.replace()
            job.life.job_id = "job"
        dumping = Dumping(job.life, "job")
        order = commands.Dump("", 1, 2, (0,), 1, "a test", "attempt")
        assert dumping.obey(order) == ("written", "")
        assert dumping.obey(commands.Publish("", 1, 0, 0, 0))[0] == "published"
    finally:
        job.life.saving.arenas.close()
    versions = ["dump", "save", "save", "step", "step"]
    assert sorted(path.name[:4] for path in where.iterdir()) == versions
