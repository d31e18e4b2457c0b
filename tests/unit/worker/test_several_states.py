"""Several TrainStates in one function: a fault between the restore() of one and of the next."""

import pytest
import torch
from job import Job, Sampler, Stop
from torch import nn

from taskd.checkpoint.folder import scan
from taskd.core import events
from taskd.core.commands import Move
from taskd.errors import Interrupted
from taskd.native.arenas import Arenas
from taskd.worker.life import Supervisor, current
from taskd.worker.restore import exchange, restoration
from taskd.worker.restore.manifest import Manifest
from taskd.worker.restore.parking import ParkReport
from taskd.worker.train_state import TrainState

NOTHING = ParkReport(None, clean=True, reason="")
FIRST = {"g": 100.0, "d": 200.0}


class Training:
    """An entry with the states `names`; each of their steps takes 1 from a weight.

    `between`: Stop comes when the first one is restored. `until`: of the steps.
    """

    def __init__(self, until=0, names=("g", "d"), *, between=False, late=False, **options):
        self.until, self.names, self.between = until, names, between
        self.late, self.options = late, options
        self.restored = []

    def __call__(self):
        self.weights, self.states, self.optimizers = {}, {}, {}
        for name in () if self.late else self.names:
            self.build(name)
        for name in self.names:
            if self.late:
                self.build(name)
            self.restored.append(str(self.states[name].restore()))
            if self.between:
                raise Stop
        while self.states[self.names[-1]].step < self.until:
            for name in self.names:
                self.step(name)
        if current().saving.periodic is not None:
            current().saving.periodic.wait()
        raise Stop

    def build(self, name):
        model = self.weights[name] = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, FIRST[name])
        optimizer = self.optimizers[name] = torch.optim.SGD(model.parameters(), lr=1.0)
        self.states[name] = TrainState(
            name, model=model, optimizer=optimizer, seen=0, **self.options
        )

    def step(self, name):
        self.optimizers[name].zero_grad()
        self.weights[name](torch.ones(1, 1)).sum().backward()
        self.optimizers[name].step()
        self.states[name].seen += 1
        self.states[name].commit()

    def found(self):
        return {
            name: (self.states[name].step, one.weight.item()) for name, one in self.weights.items()
        }


def after(steps, names=("g", "d")):
    return {name: (steps, FIRST[name] - steps) for name in names}


@pytest.fixture
def saved(tmp_path):
    """A job that begins from a checkpoint of both after three steps each, and its folder."""
    job = Job()

    def entry():
        training = Training(3, checkpoint_dir=tmp_path)
        try:
            training()
        except Stop:
            training.states["g"].save()

    job.enter(entry)
    job.close()
    job = Job()
    yield job, tmp_path
    job.close()


@pytest.mark.parametrize("late", [True, False])
def test_a_checkpoint_that_was_read_in_part_is_no_version(saved, late):
    job, folder = saved
    _, report = job.enter(Training(between=True, late=late, checkpoint_dir=folder))
    assert report == NOTHING
    assert job.life.box.version is None  # nor is it for a replacement of this process
    job.resume(None)
    again = Training(5, late=late, checkpoint_dir=folder)
    assert job.enter(again)[1].version == 10
    assert [text.split(" from ")[0] for text in again.restored] == ["read version 6"] * 2
    assert again.found() == after(5)


@pytest.mark.parametrize("is_new", [True, False])
def test_what_is_a_ranks_own_is_known_when_the_first_state_was_read(
    saved, monkeypatch, caplog, is_new
):
    """Also of the states behind it: others may have read them all, and send them."""
    job, folder = saved
    expected = torch.get_rng_state()
    torch.manual_seed(99)
    assert job.enter(Training(between=True, late=True, checkpoint_dir=folder))[1] == NOTHING
    if is_new:
        job.replace()
    send_version_6(monkeypatch)
    job.resume(6, {0: Move(0, 1)})
    torch.manual_seed(99)
    again = Training(late=True, checkpoint_dir=folder)
    assert job.enter(again)[1].version == 6
    assert torch.equal(torch.get_rng_state(), expected)
    assert [state.seen for state in again.states.values()] == [3, 3]
    assert "no RNG and sampler state" not in caplog.text


def test_a_periodic_checkpoint_names_the_states_that_were_built_later(saved):
    """It is they that a fresh start waits for."""
    job, folder = saved
    job.enter(Training(4, late=True, checkpoint_dir=folder, checkpoint_every=8))
    newest = scan(folder, job.life.job_id).valid[0].manifest
    assert (newest.version, newest.states) == (8, ("d", "g"))


def test_a_state_that_the_script_has_no_more_is_not_waited_for(saved):
    job, folder = saved
    training = Training(4, names=["g"], checkpoint_dir=folder)
    assert job.enter(training)[1].version == 7
    job.resume(7)
    training = Training(5, names=["g"], checkpoint_dir=folder)
    assert job.enter(training)[1].version == 8
    assert training.restored == ["kept in memory at version 7"]
    assert training.found() == after(5, ["g"])


def test_it_is_not_waited_for_either_when_the_first_step_was_cut_short(saved):
    job, folder = saved

    def entry():
        training = Training(names=["g"], checkpoint_dir=folder)
        with pytest.raises(Stop):
            training()
        training.weights["g"](torch.ones(1, 1)).sum().backward()
        training.optimizers["g"].step()
        raise Stop

    _, report = job.enter(entry)
    assert (report.version, report.clean) == (6, False)


def send_version_6(monkeypatch, *, held=("d", "g")):
    """Rank 1 is at version 6, both states at step 3."""

    def receive(holding, named, source):
        assert source == 1
        with torch.no_grad():
            named.tensors["model.weight"].fill_(FIRST[holding.name] - 3)
        holding.step = 3
        return Manifest(6, is_present=True, step=3, held=held)

    monkeypatch.setattr(exchange, "receive", receive)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_version_that_was_received_in_part_is_none(monkeypatch, late, is_new):
    """By a replacement, or by a survivor that was behind: what it held is no whole version now."""
    send_version_6(monkeypatch)
    job = Job(0, 2)
    assert job.enter(Training(2, late=late))[1].version == 4
    if is_new:
        job.replace()
    job.resume(6, {0: Move(0, 1)})
    assert job.enter(Training(between=True, late=late))[1] == NOTHING
    assert job.life.records.parked == {}
    job.resume(6, {0: Move(0, 1)})
    again = Training(late=late)
    assert job.enter(again)[1].version == 6
    assert again.restored == ["received version 6 from rank 1"] * 2
    assert again.found() == after(3)
    job.close()


@pytest.mark.parametrize(
    ("owner", "name", "version"),
    [
        (restoration.hooks, "attach", None),
        (restoration, "_note_version", None),
        (restoration, "report_restored", 6),
        (restoration, "_begin_saving", 6),
    ],
)
def test_a_version_counts_when_its_last_state_is_there(monkeypatch, owner, name, version):
    """An interrupt may come anywhere in restore()."""
    send_version_6(monkeypatch)
    job = Job(0, 2)
    job.resume(6, {0: Move(0, 1)})
    original, calls = getattr(owner, name), []

    def interrupted(*args, **options):
        original(*args, **options)
        calls.append(name)
        if len(calls) == 2:
            raise Stop

    monkeypatch.setattr(owner, name, interrupted)
    assert job.enter(Training())[1].version == version
    assert len(calls) == 2
    assert sorted(job.life.records.parked) == ([] if version is None else ["d", "g"])
    job.close()


def test_what_was_parked_of_an_older_version_goes_when_a_step_begins_without_it(monkeypatch):
    send_version_6(monkeypatch)
    job = Job(0, 2)
    job.enter(Training(2))
    job.resume(6, {0: Move(0, 1)})
    _, report = job.enter(Training(4, names=["g"]))
    assert report.version == 7
    assert list(job.life.records.parked) == ["g"]
    job.close()


def test_a_state_that_the_sender_has_not_leaves_the_others_missing(monkeypatch):
    job = Job(0, 2)
    job.enter(Training(2, names=["d"]))
    monkeypatch.setattr(exchange, "receive", lambda *_: Manifest(3, is_present=False, held=("d",)))
    job.resume(3, {0: Move(0, 1)})
    assert job.enter(Training(between=True))[1] == NOTHING
    job.close()


def test_a_snapshot_that_was_loaded_in_part_is_no_version():
    job = Job()
    job.life.saving.arenas = Arenas.create()
    job.enter(Training(3, snapshot_every=2))
    assert job.life.saving.arenas.versions() == (4, 6)
    job.replace()
    job.resume(4, {0: Move(0, snapshot=4)})
    assert job.enter(Training(between=True, late=True, snapshot_every=2))[1] == NOTHING
    job.resume(4, {0: Move(0, snapshot=4)})
    again = Training(late=True, snapshot_every=2)
    assert job.enter(again)[1].version == 4
    assert again.found() == after(2)
    job.life.saving.arenas.close()
    job.close()


def test_a_fresh_start_of_what_is_built_is_not_over_with_the_first_of_them(job):
    """Else those that had restored both would keep what the others build anew."""
    assert job.enter(Training(between=True))[1] == NOTHING
    job.resume(None)
    training = Training(1)
    assert job.enter(training)[1].version == 2
    assert training.found() == after(1)


def test_what_is_kept_stays_whole_between_two_restores(job):
    job.enter(Training(2))
    job.resume(4)
    assert job.enter(Training(between=True))[1].version == 4
    job.resume(4)
    training = Training()
    job.enter(training)
    assert training.restored == ["kept in memory at version 4"] * 2
    assert training.found() == after(2)


# ---------------------------------------------------------------- between real ranks


def restore_in_part(member):
    """Rank 1 is new, receives one state, is interrupted, and begins again."""
    job = Job(member.rank, member.size)
    job.resume(None)
    try:
        reports = [job.enter(Training(2, late=True))[1]]
        if member.rank == 1:
            job.replace()
        moves = {0: Move(0), 1: Move(1, 0)}
        for between in (True, False):
            member.connect()
            job.resume(4, moves)
            training = Training(late=True, between=between)
            reports.append(job.enter(training)[1])
        return [report.version for report in reports], training.restored, training.found()
    finally:
        job.close()


@pytest.mark.slow
def test_the_sender_names_all_that_it_has(world):
    kept, received = world.run(restore_in_part, size=2)
    assert kept == ([4, 4, 4], ["kept in memory at version 4"] * 2, after(2))
    assert received == ([4, None, 4], ["received version 4 from rank 0"] * 2, after(2))


# ---------------------------------------------------------------- which part of the state


class Told(Supervisor):
    """Keeps what is said of shards."""

    def __init__(self):
        self.shards = []

    def tell(self, kind, _cause, **fields):
        if kind is events.WorkerHolds:
            self.shards.append(fields["shard"])


def test_the_shard_is_told_when_all_of_it_is_there(monkeypatch):
    """In between it would be another one than that of the ranks with the same content."""
    send_version_6(monkeypatch)
    job, told = Job(0, 2), Told()
    job.life.supervisor = told
    job.enter(Training(2, shard_id="p"))
    (both,) = told.shards
    assert sorted(part.partition("=")[0] for part in both.split(";")) == ["d", "g"]
    job.resume(4)
    job.enter(Training(3, shard_id="p"))
    assert told.shards == [both]
    job.replace()
    job.life.supervisor = told
    job.resume(6, {0: Move(0, 1)})
    job.enter(Training(shard_id="p", between=True, late=True))
    assert told.shards == [both]
    job.resume(6, {0: Move(0, 1)})
    job.enter(Training(shard_id="p", late=True))
    assert told.shards == [both, both]
    job.close()


def test_a_state_that_is_left_out_is_out_of_the_shard_with_the_first_step():
    job, told = Job(), Told()
    job.life.supervisor = told
    job.enter(Training(2, shard_id="p"))
    job.resume(4)
    job.enter(Training(2, names=["g"], shard_id="p"))
    assert len(told.shards) == 1
    job.resume(4)
    job.enter(Training(3, names=["g"], shard_id="p"))
    assert told.shards[1] == next(part for part in told.shards[0].split(";") if part[0] == "g")
    job.close()


# ---------------------------------------------------------------- what is a rank's own


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_rank_that_is_stopped_between_two_commits_has_its_own_of_the_second(
    monkeypatch, caplog, is_dead
):
    """Both forward passes were over, so that the others could come to the second commit."""
    job, drawn = Job(0, 2), []

    def entry(stop_at):
        models = {name: nn.Linear(1, 1, bias=False) for name in ("g", "d")}
        samplers = {name: Sampler() for name in models}
        optimizers = {name: torch.optim.SGD(one.parameters()) for name, one in models.items()}
        states = {
            name: TrainState(
                name, model=models[name], optimizer=optimizers[name], sampler=samplers[name]
            )
            for name in models
        }
        restored = [str(state.restore()) for state in states.values()]
        if stop_at is None:
            return restored, [one.position for one in samplers.values()], torch.rand(1).item()
        while True:
            losses = {}
            for name, model in models.items():
                samplers[name].position += 1
                losses[name] = model(torch.rand(1, 1)).sum()
            for name, state in states.items():
                losses[name].backward()
                optimizers[name].step()
                state.commit()
                if job.life.records.version == stop_at:
                    drawn.append(torch.get_rng_state())
                    raise Stop

    _, report = job.enter(entry, 3)
    assert report.version == 3
    if is_dead:
        job.replace()

    def receive(holding, *_):
        holding.step = 2
        return Manifest(4, is_present=True, step=2, held=("d", "g"))

    monkeypatch.setattr(exchange, "receive", receive)
    job.resume(4, {0: Move(0, 1)})
    torch.manual_seed(99)
    restored, positions, number = job.enter(entry, None)[0]
    assert restored == ["received version 4 from rank 1"] * 2
    assert positions == [2, 2]
    torch.set_rng_state(drawn[0])
    assert number == torch.rand(1).item()
    assert "no RNG and sampler state" not in caplog.text
    job.close()


# ---------------------------------------------------------------- interrupts


def test_an_interrupt_is_held_off_until_no_state_is_half_way(job):
    """Both optimizers step before the first commit: in between one state would be torn."""

    def entry():
        training = Training(1)
        with pytest.raises(Stop):
            training()
        for name in training.names:
            training.weights[name](torch.ones(1, 1)).sum().backward()
            training.optimizers[name].step()
        job.life.interrupts.pending = "rank 2 died"
        training.states["g"].commit()
        with pytest.raises(Interrupted):
            training.states["d"].commit()
        assert not job.life.interrupts.is_held
        raise Stop

    assert job.enter(entry)[1] == ParkReport(4, clean=True, reason="")
