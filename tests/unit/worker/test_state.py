import random

import numpy as np
import pytest
import torch
from job import Job, Sampler, Stop, digest
from torch import nn

from taskd.errors import Interrupted
from taskd.native.black_box import Phase
from taskd.worker import life as life_module
from taskd.worker.train_state import TrainState


def net():
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)
    )


def adam(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def run(job, steps, stops=(), build=net, make=adam, where="forward", use=None):
    """Train `steps` steps; at each step in `stops` interrupt once at `where`.

    Returns the digest of the final state.
    """
    stops = list(stops)

    def entry():
        model = build()
        optimizer, scheduler = make(model)
        state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler, seen=0)
        restored = state.restore()
        while state.step < steps:
            x = torch.randn(6, 8) + random.random() + np.random.standard_normal()  # noqa: NPY002
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if stops and state.step == stops[0] and where == "forward":
                stops.pop(0)
                raise Stop
            loss.backward()
            if stops and state.step == stops[0] and where == "backward":
                stops.pop(0)
                random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
                if state.step:
                    scheduler.step()
                raise Stop
            optimizer.step()
            scheduler.step()
            state.seen += 6
            state.commit()
        return (
            digest(model),
            scheduler.get_last_lr(),
            state.seen,
            restored,
            torch.rand(1),
            random.random(),
            np.random.rand(),  # noqa: NPY002
        )

    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # plugins of pytest seed them too  # noqa: NPY002
    job.resume(None)
    while True:
        result, report = job.enter(entry)
        if result is not None:
            return result, report
        assert report.clean, report
        job.resume(report.version)


def same(left, right):
    return left[:3] == right[:3] and torch.equal(left[4], right[4]) and left[5:] == right[5:]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stops", [[0], [1], [3], [2, 2, 5]])
def test_an_interrupted_run_ends_with_the_same_bits(job, where, stops):
    plain, _ = run(job, 7)
    again = Job()
    interrupted, report = run(again, 7, stops, where=where)
    assert same(plain, interrupted)
    assert (report.version, report.clean) == (7, True)
    assert str(interrupted[3]) == f"kept in memory at version {stops[-1]}"


class Bounds(nn.BatchNorm1d):
    """Has a buffer that is empty until it is asked for, beside those that each step changes."""

    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("bounds", torch.empty(0, 3, dtype=torch.float64))


def test_an_empty_buffer_beside_those_that_change_is_put_back_too(job):
    def build():
        return nn.Sequential(nn.Linear(8, 16), Bounds(16), nn.ReLU(), nn.Linear(16, 4))

    plain, _ = run(job, 5, build=build)
    again = Job()
    interrupted, report = run(again, 5, [1, 3], build=build)
    assert same(plain, interrupted)
    assert (report.version, report.clean) == (5, True)


def test_an_empty_buffer_is_read_from_a_checkpoint(job, tmp_path):
    def entry():
        model = Bounds(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model=model, optimizer=optimizer, checkpoint_dir=tmp_path)
        restored = state.restore()
        if restored.source == "nothing":
            model(torch.tensor([[1.0, 2.0], [2.0, 4.0]])).sum().backward()
            optimizer.step()
            state.commit()
            state.save()
        return restored.source, digest(model)

    first, _ = job.enter(entry)
    job.resume(None)
    assert job.enter(entry)[0] == ("checkpoint", first[1])


def test_a_model_built_outside_goes_on_with_the_same_bits(job):
    plain, _ = run(job, 5)
    again = Job()
    torch.manual_seed(0)
    model = net()
    pair = adam(model)

    def build():
        net()  # draws as many random numbers as in the plain run
        return model

    outside, _ = run(again, 5, [3], build=build, make=lambda _: pair)
    assert same(plain, outside)


def test_storages_change_hands_and_optimizer_memory_is_not_doubled(job):
    kept = {}

    def entry():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        if not kept:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            state.commit()
            kept["weight"] = model.weight.data_ptr()
            kept["moment"] = optimizer.state[model.weight]["exp_avg"].data_ptr()
            raise Stop
        assert model.weight.data_ptr() == kept["weight"]
        assert optimizer.state[model.weight]["exp_avg"].data_ptr() == kept["moment"]
        assert model.weight.grad is None
        return True

    _, report = job.enter(entry)
    job.resume(report.version)
    assert job.enter(entry)[0]


def test_a_stop_between_step_and_commit_is_reported_as_torn(job):
    def entry():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        model(torch.ones(1, 4)).sum().backward()
        assert state.is_clean
        optimizer.step()
        assert not state.is_clean
        assert job.life.interrupts.is_held
        assert job.life.box.phase is Phase.OPTIMIZER
        raise Stop

    _, report = job.enter(entry)
    assert (report.version, report.clean) == (0, False)
    assert "between optimizer.step() and commit()" in report.reason
    assert not job.life.interrupts.is_held


def test_an_unregistered_optimizer_is_noticed(job):
    def entry():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        for stop in (False, True):
            model(torch.ones(1, 4)).sum().backward()
            other.step()
            if stop:
                raise Stop
            state.commit()

    _, report = job.enter(entry)
    assert not report.clean
    assert "not a registered optimizer" in report.reason


def test_a_held_back_interrupt_is_raised_by_commit_after_the_version_counts(job):
    def entry():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        optimizer.step()
        job.life.interrupts.pending = "rank 2 died"
        with pytest.raises(Interrupted, match="rank 2 died"):
            state.commit()
        assert state.is_clean
        raise Stop

    _, report = job.enter(entry)
    assert (report.version, report.clean) == (1, True)
    assert job.life.box.version == 1


def test_an_interrupt_in_the_middle_of_a_restore_loses_nothing(job, monkeypatch):
    from taskd.worker.restore import moving

    weights = []

    def entry():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        state = TrainState(model=model, optimizer=optimizer)
        restored = state.restore()
        if not weights:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            state.commit()
            weights.append(digest(model))
            raise Stop
        return str(restored), digest(model), len(optimizer.state)

    _, report = job.enter(entry)
    original = moving._move_optimizer

    def interrupted(*args):
        original(*args)
        monkeypatch.undo()
        raise Stop

    monkeypatch.setattr(moving, "_move_optimizer", interrupted)
    job.resume(report.version)
    assert job.enter(entry)[1].version == 1
    job.resume(1)
    assert job.enter(entry)[0] == ("kept in memory at version 1", weights[0], 2)


def test_two_states_in_one_function_are_kept_together(job):
    stops = [True]

    def entry():
        nets = [nn.Linear(4, 4) for _ in range(2)]
        optimizers = [torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in nets]
        states = [
            TrainState(name, model=n, optimizer=o, tag="")
            for name, n, o in zip(("a", "b"), nets, optimizers, strict=True)
        ]
        for state in states:
            state.restore()
        while states[1].step < 3:
            for state, n, optimizer in zip(states, nets, optimizers, strict=True):
                n(torch.rand(2, 4)).sum().backward()
                if stops and states[0].step == 2 and state is states[1]:
                    stops.pop()
                    raise Stop
                if state.step <= min(s.step for s in states):
                    optimizer.step()
                    optimizer.zero_grad()
                    state.tag += "x"
                    state.commit()
        return [s.step for s in states], [s.tag for s in states], job.life.records.version

    _, report = job.enter(entry)
    assert report.version == 3
    job.resume(3)
    assert job.enter(entry)[0] == ([3, 3], ["xxx", "xxx"], 6)


def test_every_kind_of_plain_value_comes_back_as_of_the_commit(job):
    value = {
        "list": [1, 2.5, "three"],
        "bytes": b"4",
        "none": None,
        "tuple": (True, 1j),
        "tensor": torch.arange(3),
    }
    entries = []

    def entry():
        state = TrainState(value=value, epoch=0)
        state.restore()
        entries.append((state.epoch, state.value))
        if len(entries) == 1:
            state.epoch = 3
            state.commit()
            state.value["list"].append("after the commit")
            state.epoch = 4
            raise Stop

    job.enter(entry)
    job.resume(1)
    job.enter(entry)
    epoch, back = entries[1]
    assert epoch == 3
    assert back["list"] == [1, 2.5, "three"]
    assert torch.equal(back["tensor"], torch.arange(3))


def test_a_replacement_finds_rng_and_sampler_of_the_committed_or_pending_version(job):
    drawn = {}

    def entry(stop_at):
        model, sampler, generator = nn.Linear(4, 4), Sampler(), torch.Generator()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model=model, optimizer=optimizer, sampler=sampler, generator=generator)
        state.restore()
        while True:
            drawn.setdefault(job.life.records.version, []).append(
                (
                    sampler.position,
                    torch.rand(1).item(),
                    random.random(),
                    np.random.rand(),  # noqa: NPY002
                    np.random.randn(),  # noqa: NPY002
                    torch.rand(1, generator=generator).item(),
                )
            )
            sampler.position += 1
            loss = model(torch.ones(1, 4)).sum()
            if job.life.records.version == stop_at:
                raise Stop
            loss.backward()
            optimizer.step()
            state.commit()

    job.enter(entry, 4)
    for version in (4, 5):  # 4 is committed, 5 only pending: the forward pass of step 4 is done
        first = job
        second = Job()
        second.life.records.inherited_extras = first.life.box.read_extras()
        assert version in second.life.records.inherited_extras
        random.seed(99), torch.manual_seed(99), np.random.seed(99)  # noqa: NPY002

        def look():
            model, sampler, generator = nn.Linear(4, 4), Sampler(), torch.Generator()
            state = TrainState(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                sampler=sampler,
                generator=generator,
            )
            state.restore()
            return (
                sampler.position,
                torch.rand(1).item(),
                random.random(),
                np.random.rand(),  # noqa: NPY002
                np.random.randn(),  # noqa: NPY002
                torch.rand(1, generator=generator).item(),
            )

        second.resume(version)
        seen = second.enter(look)[0]
        if version == 4:
            assert seen == drawn[4][0]
        else:
            assert seen[0] == 5
            assert seen != drawn[4][0]
        life_module.set_current(first.life)


def test_missing_extras_are_reported_with_rank_and_version(job, caplog):
    def entry():
        TrainState(model=nn.Linear(2, 2)).restore()

    job.resume(7)
    job.enter(entry)
    assert "rank 0: no RNG and sampler state of version 7" in caplog.text


def test_a_scaler_in_the_middle_of_a_step_is_reset(job):
    scales = []

    def entry():
        model, scaler = (
            nn.Linear(4, 4),
            torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = TrainState(model=model, optimizer=optimizer, scaler=scaler)
        state.restore()
        scales.append((scaler.get_scale(), scaler._get_growth_tracker()))
        while state.step < 5:
            optimizer.zero_grad()
            scaler.scale(model(torch.rand(2, 4)).sum()).backward()
            scaler.unscale_(optimizer)
            if state.step == 3 and len(scales) == 1:
                raise Stop
            scaler.step(optimizer)
            scaler.update()
            state.commit()
        return scaler.get_scale(), scaler._get_growth_tracker()

    job.enter(entry)
    job.resume(3)
    assert job.enter(entry)[0] == (4096.0, 1)
    assert scales[1] == (2048.0, 1)


def test_state_outside_taskd_is_a_counter():
    life_module.set_current(None)
    state = TrainState(model=nn.Linear(1, 1), epoch=2)
    assert str(state.restore()) == "nothing: fresh start"
    state.commit()
    state.commit()
    assert (state.step, state.epoch) == (2, 2)
