"""What is drawn in an entry that goes on in the middle of a pass through data.

It is what plain torch draws in a run without a fault: dropout, the seeds of the loader's processes,
and what the data set draws in this process.
"""

from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from job import Job, Stop, digest
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    dataloader,
    get_worker_info,
)

from taskd.worker import life as life_module
from taskd.worker.state import data_order, extras, passes, phases
from taskd.worker.state.logbook import logbook_of
from taskd.worker.train_state import TrainState

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

SAMPLES, BATCH, EPOCHS = 24, 4, 3
STEPS = SAMPLES // BATCH
TOTAL = STEPS * EPOCHS
FEW = ("middle", "last batch of a pass", "first batch of a pass")  # where processes take their time
STOPS = {
    "first step": [0],
    "second step": [1],
    "middle": [3],
    "last batch of a pass": [STEPS - 1],
    "first batch of a pass": [STEPS],
    "second batch of a pass": [STEPS + 1],
    "twice in one step": [4, 4],
    "in two passes": [2, STEPS + 3],
    "at the edges": [STEPS - 1, STEPS, STEPS, 2 * STEPS, TOTAL - 1],
}


class Noisy(Dataset):
    """Samples as random augmentation makes them, in whichever process."""

    def __init__(self, size: int = SAMPLES, *, is_noisy: bool = True) -> None:
        self.size, self.is_noisy = size, is_noisy

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(1) + random.random() if self.is_noisy else torch.zeros(1)
        info = get_worker_info()
        seed = 0 if info is None else info.seed % 1009
        return torch.cat([torch.tensor([float(index), float(seed)]), noise])


class Training:
    """A script: how its loaders are made, and gone through."""

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        registers: bool = False,
        by_step: bool = False,
        validates: Callable[[], Any] | None = None,
        stops: list[int] | tuple[int, ...] = (),
        always: bool = False,
        behind: str = "batch",
        folder: pathlib.Path | None = None,
    ) -> None:
        self.make, self.registers, self.by_step, self.stops = make, registers, by_step, [*stops]
        self.always = always
        self.validates, self.behind, self.folder = validates, behind, folder
        self.drawn: dict[tuple[int, int], Any] = {}  # by epoch and number of the batch

    def __call__(self) -> bytes:
        torch.manual_seed(3)
        random.seed(3)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        torch.manual_seed(5)
        loader = self.make()
        held = {"loader": loader} if self.registers else {}
        values = {} if self.by_step else {"batch": 0}
        self.state = TrainState(
            model=self.model,
            optimizer=self.optimizer,
            epoch=0,
            checkpoint_dir=self.folder,
            **values,
            **held,
        )
        self.source = self.state.restore().source
        check = None if self.validates is None else self.validates()
        if self.by_step:
            self.by_the_step(loader)
        elif self.registers:
            try:
                self.carried(loader)
            finally:
                end_processes(loader)
        else:
            self.by_epochs(loader, check)
        return digest(self.model)

    def by_epochs(self, loader: Any, check: Any) -> None:
        state = self.state
        for epoch in range(state.epoch, EPOCHS):
            set_epoch(loader, epoch)
            if check is not None and (self.always or state.batch == 0):
                self.validate(check)
            for number, batch in enumerate(loader):
                if number < state.batch:
                    continue
                self.step(epoch, number, batch)
            state.epoch, state.batch = epoch + 1, 0

    def by_the_step(self, loader: Any) -> None:
        state = self.state
        done = state.step % STEPS
        while state.step < TOTAL:
            epoch = state.step // STEPS
            set_epoch(loader, epoch)
            for number, batch in enumerate(loader):
                if number >= done:
                    self.step(epoch, number, batch)
            done = 0

    def carried(self, loader: Any) -> None:
        state = self.state
        while state.step < TOTAL:
            for batch in loader:
                self.step(*divmod(state.step, STEPS), batch)

    def validate(self, loader: Any) -> None:
        self.model.eval()
        with torch.no_grad():
            for batch in loader:
                self.model(batch)
        self.model.train()

    def step(self, epoch: int, number: int, batch: torch.Tensor) -> None:
        self.drawn[epoch, number] = [batch.tolist(), torch.rand(1).item(), random.random()]
        place = epoch * STEPS + number
        self.stop(place, "batch")
        if not self.by_step:
            self.state.batch = number + 1
        self.optimizer.zero_grad()
        self.model(batch / SAMPLES).square().mean().backward()
        self.stop(place, "forward pass")
        self.optimizer.step()
        self.state.commit()

    def stop(self, place: int, behind: str) -> None:
        if behind == self.behind and self.stops and self.stops[0] == place:
            self.stops.pop(0)
            if self.folder is not None:
                self.state.save()
            raise Stop


class Sliced(Training):
    """Its sampler begins where the last entry was."""

    def by_the_step(self, loader: Any) -> None:
        done = self.state.step * BATCH
        rest = [index % SAMPLES for index in range(done, TOTAL * BATCH)]
        for batch in DataLoader(loader.dataset, BATCH, sampler=rest):
            self.step(*divmod(self.state.step, STEPS), batch)


class Fetching(Training):
    """It skips by itself, and draws before each batch."""

    def by_epochs(self, loader: Any, check: Any) -> None:
        state = self.state
        for epoch in range(state.epoch, EPOCHS):
            set_epoch(loader, epoch)
            batches = iter(loader)
            for _ in range(state.batch):
                next(batches)
            for number in range(state.batch, STEPS):
                noise = torch.rand(1)
                self.step(epoch, number, next(batches) + noise)
            state.epoch, state.batch = epoch + 1, 0


def end_processes(loader: Any) -> None:
    """Those of one of torchdata: the garbage collector would wait 5 s for each of them."""
    if hasattr(loader._iterator, "_shutdown_workers"):
        loader._iterator._shutdown_workers()


def set_epoch(loader: Any, epoch: int) -> None:
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)


def distributed(workers: int = 0, *, noisy: bool = True, **options: Any) -> DataLoader[Any]:
    data = Noisy(is_noisy=noisy)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
    return DataLoader(data, BATCH, sampler=sampler, num_workers=workers, **options)


class Two:
    """A pair of loaders, gone through together."""

    def __init__(self) -> None:
        self.pair = distributed(), distributed()
        self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        for loader in self.pair:
            set_epoch(loader, epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for one, other in zip(*self.pair, strict=True):
            yield one + other


def outside(**options: Any) -> Callable[[], Any]:
    loader = distributed(**options)
    return lambda: loader


def validation() -> DataLoader[Any]:
    return DataLoader(Noisy(2 * BATCH), BATCH)


def stateful(workers: int = 0, sampler: Any = None) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    data = Noisy(is_noisy=False)
    options = {"shuffle": True} if sampler is None else {"sampler": sampler(data)}
    return module.StatefulDataLoader(data, BATCH, num_workers=workers, **options)


KINDS: dict[str, Callable[..., Training]] = {
    "in this process": lambda **to: Training(distributed, **to),
    "in two others": lambda **to: Training(lambda: distributed(2), **to),
    "in order": lambda **to: Training(lambda: DataLoader(Noisy(), BATCH), **to),
    "in order, by the step": lambda **to: Training(
        lambda: DataLoader(Noisy(), BATCH), by_step=True, **to
    ),
    "by the step": lambda **to: Training(distributed, by_step=True, **to),
    "persistent": lambda **to: Training(
        lambda: distributed(1, noisy=False, persistent_workers=True), **to
    ),
    "persistent, outside": lambda **to: Training(
        outside(workers=1, noisy=False, persistent_workers=True), **to
    ),
    "outside": lambda **to: Training(outside(), **to),
    "two alike": lambda **to: Training(Two, **to),
    "sliced": lambda **to: Sliced(distributed, by_step=True, **to),
    "a draw before each batch": lambda **to: Fetching(lambda: distributed(noisy=False), **to),
    "with a generator": lambda **to: Training(
        lambda: distributed(noisy=False, generator=torch.Generator()), **to
    ),
    "with a validation": lambda **to: Training(distributed, validates=validation, **to),
    "with one that is alike": lambda **to: Training(distributed, validates=distributed, **to),
    "with a validation in each entry": lambda **to: Training(
        distributed, validates=validation, always=True, **to
    ),
    "with one that is alike in each entry": lambda **to: Training(
        distributed, validates=distributed, always=True, **to
    ),
    "torchdata": lambda **to: Training(stateful, registers=True, **to),
    "torchdata, in two others": lambda **to: Training(lambda: stateful(2), registers=True, **to),
}


SLOW = ("in two others", "persistent", "persistent, outside", "torchdata, in two others")
FAULTS = [
    pytest.param(kind, where, marks=pytest.mark.slow if kind in SLOW else ())
    for kind in KINDS
    for where in (FEW if kind in SLOW else STOPS)
]


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    phases.install()
    data_order.install()
    passes.install()
    torch.set_num_threads(1)
    yield
    life_module.set_current(None)


def plainly(training: Training, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Without a job, and with the iterators that torch has."""
    kind = dataloader._BaseDataLoaderIter
    with monkeypatch.context() as inside:
        for name in ("__init__", "_reset", "__next__"):
            function = getattr(kind, name)
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            inside.setattr(kind, name, function)
        return training()


def in_a_job(training: Training) -> bytes:
    job = Job()
    job.resume(None)
    try:
        while True:
            result, report = job.enter(training)
            if result is not None:
                assert not training.stops, "not every fault has happened"
                return result
            job.resume(report.version)
    finally:
        job.close()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in KINDS]
)
def test_a_run_without_a_fault_is_that_of_plain_torch(kind, monkeypatch) -> None:
    expected, run = KINDS[kind](), KINDS[kind]()
    assert plainly(expected, monkeypatch) == in_a_job(run)
    assert expected.drawn == run.drawn


@pytest.mark.parametrize(("kind", "where"), FAULTS)
def test_a_run_with_faults_is_that_without(kind, where) -> None:
    expected, run = KINDS[kind](), KINDS[kind](stops=STOPS[where])
    assert in_a_job(expected) == in_a_job(run)
    assert expected.drawn == run.drawn


# ---------------------------------------------------------------- other processes


def entered_again(training: Training, ways: dict[int, str]) -> Training:
    """`training` to its end; what becomes of its process after each stop."""
    job = Job()
    job.resume(None)
    result, report = job.enter(training)
    for behind in ways.values():
        assert result is None
        job.replace()
        job.resume(report.version + (behind == "forward pass"))
        result, report = job.enter(training)
    assert result is not None
    job.close()
    return training


@pytest.mark.parametrize("behind", ["batch", "forward pass"])
@pytest.mark.parametrize("place", [1, 3, STEPS - 1, STEPS, 2 * STEPS + 1])
@pytest.mark.parametrize(
    "kind", ["in this process", "in order", "with a validation", "two alike", "outside"]
)
def test_a_replacement_draws_what_its_predecessor_would_have(kind, place, behind) -> None:
    """Also if the others have completed the step in which that was stopped."""
    expected = KINDS[kind]()
    in_a_job(expected)
    run = entered_again(KINDS[kind](stops=[place], behind=behind), {place: behind})
    # its model is another one here, as nobody sends it
    assert run.drawn == expected.drawn


@pytest.mark.parametrize("place", [1, STEPS - 1, STEPS])
def test_so_does_one_that_is_replaced_twice_before_it_commits(place) -> None:
    expected = Training(distributed)
    in_a_job(expected)
    run = Training(distributed, stops=[place, place])
    assert entered_again(run, {0: "batch", 1: "batch"}).drawn == expected.drawn


@pytest.mark.parametrize("place", [2, STEPS - 1, STEPS])
@pytest.mark.parametrize("kind", ["in this process", "torchdata"])
def test_a_start_from_a_checkpoint_goes_on_with_the_pass(kind, place, tmp_path) -> None:
    expected, run = KINDS[kind](), KINDS[kind](stops=[place], folder=tmp_path)
    end = in_a_job(expected)
    for goes_on in (False, True):
        job = Job()
        job.life.job_id = "job"
        job.resume(None)
        result, _ = job.enter(run)
        job.close()
        assert run.source == ("checkpoint" if goes_on else "nothing")
    assert result == end
    assert run.drawn == expected.drawn


# ---------------------------------------------------------------- what is noted


def test_what_was_written_without_passes_is_read_and_the_other_way_round() -> None:
    generators, parts = pickle.dumps({"torch": b""}), {"train": b"part"}
    old = generators + pickle.dumps((parts, ("train",)))
    assert extras.decode(old).passes == ()
    noted = (("name", 0, 1 << 62, None, 3, 6, False, False),)
    new = generators + extras.encode(parts, ["train"], noted)
    assert extras.decode(new) == extras.Extras({"torch": b""}, parts, frozenset({"train"}), noted)
    assert new.startswith(generators + pickle.dumps((parts, ("train",)), extras.PROTOCOL))
    assert extras.encode(parts) == pickle.dumps((parts, ()), extras.PROTOCOL)


def noted_after(job: Job, script: Callable[[TrainState], object]) -> list[tuple[Any, ...]]:
    """What the commit at the end of `script` notes: epoch, batches, length, whether it is over."""

    def entry() -> None:
        state = TrainState(epoch=0)
        state.restore()
        kept = script(state)
        state.commit()
        del kept

    job.resume(None)
    job.enter(entry)
    found = logbook_of(job.life).find(1)
    assert found is not None
    return [passes.Noted(*one)[3:6] for one in found.passes]


def test_a_pass_that_is_under_way_is_noted(job) -> None:
    def begin(_: TrainState) -> Any:
        loader = distributed()
        loader.sampler.set_epoch(7)
        batches = iter(loader)
        next(batches)
        next(batches)
        return batches

    assert noted_after(job, begin) == [(7, 2, STEPS)]


@pytest.mark.parametrize("how", ["dropped", "complete", "ended", "a generator", "shuffled"])
def test_others_are_not(job, how) -> None:
    def begin(_: TrainState) -> Any:
        loader = distributed()
        if how == "dropped":
            next(iter(loader))
            return None
        if how == "complete":
            return list(loader)
        if how == "ended":
            batches = iter(loader)
            list(batches)
            return batches
        if how == "a generator":
            return iter(distributed(generator=torch.Generator()))
        return iter(DataLoader(Noisy(), BATCH, shuffle=True))

    assert noted_after(job, begin) == []


def test_a_stream_has_no_length_and_nobody_is_asked_for_it(job) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(SAMPLES))

        def __len__(self) -> int:
            raise AssertionError

    def begin(_: TrainState) -> Any:
        batches = iter(DataLoader(Stream(), BATCH))
        next(batches)
        return batches

    assert noted_after(job, begin) == [(None, 1, None)]


# ---------------------------------------------------------------- which pass it is


class Resumed:
    """An entry that was interrupted in the pass of `loader` with `epoch`, after `done` batches."""

    def __init__(self, job: Job, done: int, **values: int) -> None:
        self.job, self.done, self.values = job, done, values
        self.others: Callable[[], object] = lambda: None  # that were made before it

    def draws(self, begin: Callable[[TrainState], object], epoch: int | None = None) -> bool:
        """Whether torch's generator moves when `begin` is called in the next entry."""

        def entry() -> list[Any]:
            state = TrainState(**{"seen": -1, **self.values})
            state.restore()
            if state.seen >= 0:
                before = torch.get_rng_state()
                kept = begin(state)
                return [not torch.equal(before, torch.get_rng_state()), kept]
            others = self.others()
            batches = (in_order if epoch is None else in_epoch(epoch))(state)
            for _ in range(self.done):
                next(batches)
            state.seen = 100
            state.commit()
            del others
            raise Stop

        self.job.resume(None)
        self.job.enter(entry)
        self.job.resume(1)
        (is_drawn, _), _ = self.job.enter(entry)
        return is_drawn


def in_order(_: TrainState) -> Any:
    return iter(DataLoader(Noisy(is_noisy=False), BATCH))


def in_epoch(epoch: int) -> Callable[[TrainState], Any]:
    def begin(_: TrainState) -> Any:
        loader = distributed(noisy=False)
        loader.sampler.set_epoch(epoch)
        return iter(loader)

    return begin


def test_the_epoch_tells_whether_the_pass_is_the_same(job) -> None:
    for done in (2, STEPS):
        assert not Resumed(job, done).draws(in_epoch(4), epoch=4)
        assert Resumed(job, done).draws(in_epoch(5), epoch=4)


def test_without_an_epoch_a_pass_with_batches_left_goes_on(job) -> None:
    assert not Resumed(job, STEPS - 1).draws(in_order)


@pytest.mark.parametrize(("number", "is_kept"), [(STEPS, True), (STEPS - 1, True), (2, False)])
def test_one_without_any_left_does_if_the_script_has_their_number(job, number, is_kept) -> None:
    """It can skip them then. Else it begins the next pass."""
    assert Resumed(job, STEPS, batch=number).draws(in_order) is not is_kept


def test_what_two_loaders_that_are_alike_have_begun_is_not_mixed_up(job) -> None:
    def second(_: TrainState) -> Any:
        pair = [DataLoader(Noisy(is_noisy=False), BATCH) for _ in range(2)]
        return pair, iter(pair[1])

    assert Resumed(job, 2).draws(second)  # that of the first one was under way


def test_a_loader_that_is_alone_now_goes_on_with_that_of_the_second(job) -> None:
    run = Resumed(job, 2)
    run.others = lambda: DataLoader(Noisy(is_noisy=False), BATCH)
    assert not run.draws(in_order)


def test_it_goes_on_once(job) -> None:
    assert Resumed(job, 2).draws(lambda state: [in_order(state), in_order(state)])


def test_it_goes_on_in_the_first_step_only(job) -> None:
    def begin(state: TrainState) -> Any:
        state.commit()
        return in_order(state)

    assert Resumed(job, 2).draws(begin)


def test_a_loader_of_other_data_does_not_go_on_with_it(job) -> None:
    assert Resumed(job, 2).draws(lambda _: iter(validation()))


def test_a_pass_for_which_the_script_seeds_is_left_to_it(job) -> None:
    def begin(state: TrainState) -> Any:
        torch.manual_seed(11)
        before = torch.get_rng_state()
        kept = in_order(state)
        assert not torch.equal(torch.get_rng_state(), before)
        return kept

    assert Resumed(job, 2).draws(begin)


def test_an_order_from_the_global_generator_is_drawn_as_ever(job) -> None:
    def begin(_: TrainState) -> Any:
        data = Noisy(is_noisy=False)
        return iter(DataLoader(data, BATCH, sampler=RandomSampler(data)))

    assert Resumed(job, 2).draws(begin)
