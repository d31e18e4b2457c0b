"""Parameters that no optimizer trains, beside trained ones, and what else than it writes them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from job import Job, Stop, digest
from torch import nn

from taskd.core.commands import Move
from taskd.native.arenas import Arenas
from taskd.worker.objects import memory
from taskd.worker.objects.roles import Roles
from taskd.worker.objects.rollback import Rollback
from taskd.worker.train_state import TrainState

IDIOMS = ("assigned", "through data", "in place")


def follow(targets: Any, sources: Any, idiom: str) -> None:
    """A moving average, as it is written in scripts."""
    for target, source in zip(targets, sources, strict=True):
        if idiom == "assigned":
            target.data = target.data * 0.9 + source.data * 0.1
        elif idiom == "through data":
            target.data.mul_(0.9).add_(source.data, alpha=0.1)
        else:
            with torch.no_grad():
                target.mul_(0.9).add_(source, alpha=0.1)


class Pair(nn.Module):
    """As MoCo: the second encoder follows the first one in the forward pass, or `where` it is."""

    def __init__(self, idiom: str, *, is_first: bool = False) -> None:
        super().__init__()
        self.idiom, self.where = idiom, "forward"
        if is_first:  # of the parameters, too
            self.follower = nn.Linear(2, 2)
        self.trained = nn.Linear(2, 2)
        self.follower = copy.deepcopy(self.trained).requires_grad_(False)

    def follow(self, where: str) -> None:
        if self.where == where:
            follow(self.follower.parameters(), self.trained.parameters(), self.idiom)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.trained(x)
        self.follow("forward")
        return (out - self.follower(x) - 1).square().mean()


def train(
    job: Job,
    build: Any,
    stops: tuple[int, ...] = (),
    *,
    owned: str = "all",
    steps: int = 6,
    **options: Any,
) -> tuple[bytes | None, Any]:
    """Stops behind the forward pass of these steps. Returns the end, or why a copy was torn."""
    left = list(stops)

    def entry() -> bytes:
        torch.manual_seed(0)
        model = build()
        parameters = model.parameters() if owned == "all" else model.trained.parameters()
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        state = TrainState(model=model, optimizer=optimizer, **options)
        state.restore()
        while state.step < steps:
            optimizer.zero_grad()
            loss = model(torch.rand(1, 2))
            if left and state.step == left[0]:
                left.pop(0)
                raise Stop
            loss.backward()
            optimizer.step()
            model.follow("late")
            state.commit()
        return digest(model)

    return job.run(entry)


@pytest.mark.parametrize("owned", ["all", "trained"])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_what_the_forward_pass_writes_is_rolled_back(job, idiom, is_first, owned) -> None:
    def build() -> Pair:
        return Pair(idiom, is_first=is_first)

    plain, _ = train(job, build)
    # the second of them in the first step of an entry, which knows from the one before
    again, report = train(Job(), build, (3, 3, 5), owned=owned)
    assert report.clean
    assert again == plain


class Words(nn.Module):
    """An embedding whose forward pass shortens the rows that it looks up."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        if is_first:  # of the parameters, too
            self.table = nn.Embedding(4, 2, max_norm=0.5)
        self.trained = nn.Linear(2, 1)
        if not is_first:
            self.table = nn.Embedding(4, 2, max_norm=0.5)

    def follow(self, where: str) -> None:
        """Nothing does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.table((x[0] * 4).long())).sum() * 3


@pytest.mark.parametrize("is_first", [True, False])
def test_rows_that_an_embedding_shortens_are_rolled_back(job, is_first) -> None:
    def build() -> Words:
        return Words(is_first=is_first)

    written = []

    def build_watched() -> Words:
        words = Words(is_first=is_first)
        before = words.table.weight.detach().clone()
        words(torch.rand(1, 2))
        written.append(not torch.equal(before, words.table.weight))
        return Words(is_first=is_first)

    torch.manual_seed(0)
    build_watched()
    assert written == [True]  # the fault would leave something behind
    plain, _ = train(job, build)
    again, report = train(Job(), build, (0, 3, 3, 5))
    assert report.clean
    assert again == plain


@pytest.mark.parametrize("idiom", IDIOMS)
def test_what_is_written_behind_the_optimizer_is_committed(job, idiom) -> None:
    def build() -> Pair:
        pair = Pair(idiom)
        pair.where = "late"
        return pair

    plain, _ = train(job, build)
    assert train(Job(), build, (2, 3, 3))[0] == plain


@pytest.mark.parametrize("idiom", IDIOMS)
def test_the_first_time_is_noticed(job, idiom) -> None:
    """As many commits have passed that contents are seldom compared."""

    class Late(Pair):
        done = 0

        def follow(self, where: str) -> None:
            if where == "late":
                self.done += 1
            elif self.done == 11:
                super().follow(where)

    plain, report = train(job, lambda: Late(idiom), (11,), steps=20)
    assert (plain, report.clean) == (None, False)
    assert "parameter model.follower." in report.reason
    assert "something else than a registered optimizer" in report.reason


def test_a_frozen_model_stays_clean_and_is_not_copied(job) -> None:
    def build() -> Pair:
        pair = Pair("in place")
        pair.where = "never"
        return pair

    plain, _ = train(job, build)
    again, report = train(Job(), build, (0, 1, 2, 3, 5))
    assert (again, report.clean) == (plain, True)


def test_the_parameter_stays_the_same_object_and_reused_models_too(job) -> None:
    torch.manual_seed(0)
    model = Pair("assigned")
    held = list(model.follower.parameters())
    plain, _ = train(job, lambda: copy.deepcopy(model))
    assert train(Job(), lambda: model, (4,))[0] == plain
    assert all(map(lambda one, other: one is other, held, model.follower.parameters()))


class Rig:
    """A rollback alone."""

    def __init__(self, model: nn.Module, trained: nn.Module, **others: Any) -> None:
        self.optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        self.roles = Roles.sort("train", {"model": model, "optimizer": self.optimizer, **others})
        self.rollback = Rollback(self.roles)
        self.rollback.begin()

    def commit(self, times: int = 1) -> Rig:
        for _ in range(times):
            self.rollback.remember()
        return self

    @property
    def moving(self) -> list[str]:
        return [kept.name for kept in self.rollback.untrained.moving]


def test_weights_that_ddp_spreads_before_the_first_commit_are_no_change() -> None:
    pair = Pair("in place")
    rig = Rig(pair, pair.trained)
    with torch.no_grad():
        for one in pair.parameters():
            one.copy_(one.clone())
    assert rig.rollback.roll_back() == ""
    rig.commit()
    assert rig.moving == []
    assert rig.rollback.roll_back() == ""


def test_memory_that_moves_about_is_no_change() -> None:
    pair = Pair("in place")
    rig = Rig(pair, pair.trained).commit(2)
    for _ in range(20):
        pair.follower.weight.data = pair.follower.weight.data.clone()
        assert rig.rollback.roll_back() == ""
        rig.commit()
    assert rig.moving == []
    pair.follower.weight.data = pair.follower.weight.data + 1
    assert "model.follower.weight" in rig.rollback.roll_back()


def test_of_many_some_are_looked_at_in_each_commit_and_all_in_the_end() -> None:
    model = nn.Module()
    model.trained = nn.Linear(2, 2)
    model.base = nn.ParameterList(
        [nn.Parameter(torch.zeros(2), requires_grad=False) for _ in range(100)]
    )
    rig = Rig(model, model.trained).commit(17)
    with torch.no_grad():
        model.base[90].add_(1)
    assert "model.base.90" in rig.rollback.roll_back()
    rig.commit(4)
    assert rig.moving == ["model.base.90"]
    with torch.no_grad():
        model.base[90].add_(1)
    assert rig.rollback.roll_back() == ""
    assert model.base[90].tolist() == [1, 1]


def test_what_is_thawed_belongs_to_its_optimizer() -> None:
    pair = Pair("in place")
    rig = Rig(pair, pair).commit(3)
    pair.follower.requires_grad_(True)
    pair(torch.ones(1, 2)).backward()
    rig.optimizer.step()
    rig.commit(2)
    assert rig.moving == []
    assert rig.rollback.roll_back() == ""


def test_what_another_state_trains_is_that_ones_business(job) -> None:
    def entry() -> Any:
        torch.manual_seed(0)
        pair = Pair("in place")
        pair.where = "never"
        pair.follower.requires_grad_(True)
        optimizers = [
            torch.optim.SGD(one.parameters(), lr=0.1) for one in (pair.trained, pair.follower)
        ]
        first = TrainState("first", model=pair, optimizer=optimizers[0])
        first.restore()
        second = TrainState("second", model=pair.follower, optimizer=optimizers[1])
        second.restore()
        if second.step:
            return digest(pair), kept
        for state, optimizer in ((first, optimizers[0]), (second, optimizers[1])) * 3:
            optimizer.zero_grad()
            pair(torch.rand(1, 2)).backward()
            optimizer.step()
            state.commit()
        kept.append(digest(pair))
        raise Stop

    kept: list[bytes] = []
    _, report = job.enter(entry)
    assert report.clean, report
    job.resume(report.version)
    assert job.enter(entry)[0] == (kept[0], kept)


def test_no_memory_for_a_copy_costs_no_job(monkeypatch, caplog) -> None:
    pair = Pair("in place")
    rig = Rig(pair, pair.trained).commit(2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", _out_of_memory)
        pair.follow("forward")
        rig.commit()
    assert "there is no memory for copies" in caplog.text
    assert rig.rollback.roll_back() == ""
    pair.follow("forward")
    rig.commit()
    assert rig.rollback.roll_back() == ""
    pair.follow("forward")
    assert "parameter model.follower." in rig.rollback.roll_back()


def _out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("out of memory\nand more")


@pytest.mark.parametrize("idiom", IDIOMS)
def test_averages_of_each_kind_are_named(job, caplog, idiom) -> None:
    """A role without trained parameters stays as it is."""
    left = [True]

    def entry() -> None:
        torch.manual_seed(0)
        model, average = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model=model, optimizer=optimizer, average=average)
        state.restore()
        while state.step < 5:
            model(torch.rand(1, 2)).sum().backward()
            optimizer.step()
            follow(average.parameters(), model.parameters(), idiom)
            state.commit()
            if state.step == 3 and left:
                left.clear()
                follow(average.parameters(), model.parameters(), idiom)
                raise Stop
            if state.step == 4:
                follow(average.parameters(), model.parameters(), idiom)

    _, report = job.enter(entry)
    assert report.clean
    said = "TrainState('train'): average was changed since the last commit() and stays so"
    assert caplog.text.count(said) == 1
    caplog.clear()
    job.resume(3)
    job.enter(entry)
    assert "average was changed after commit() and before the next step" in caplog.text


@pytest.mark.parametrize("idiom", IDIOMS)
def test_a_snapshot_has_it_as_of_the_commit(job, idiom) -> None:
    job.life.saving.arenas = Arenas.create()
    job.resume(None)
    found: list[Any] = []

    def entry(stop: int) -> None:
        torch.manual_seed(0)
        pair = Pair(idiom)
        optimizer = torch.optim.SGD(pair.parameters(), lr=0.1)
        state = TrainState(model=pair, optimizer=optimizer, snapshot_every=1)
        found.append((str(state.restore()).split(" from ")[0], digest(pair)))
        while state.step < stop:
            optimizer.zero_grad()
            pair(torch.rand(1, 2)).backward()
            snapshots = job.life.saving.snapshots
            snapshots.wait()
            optimizer.step()
            state.commit()
            found.append((state.step, digest(pair)))
        assert "train.model.follower.weight" in snapshots._inventory.changing
        pair(torch.rand(1, 2))
        raise Stop

    job.enter(entry, 4)
    job.replace()
    job.resume(4, {0: Move(0, snapshot=4)})
    job.enter(entry, 6)
    assert found[4][0] == 4
    assert found[5] == ("loaded version 4", found[4][1])
    job.life.saving.arenas.close()


def test_a_state_dict_of_copies_is_no_change(job, caplog) -> None:
    """They are gone when somebody looks for them again."""

    class Copies:
        def __init__(self) -> None:
            self.content = torch.rand(10_000)

        def state_dict(self) -> dict[str, Any]:
            return {"content": self.content.clone()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.content = state["content"].clone()

    def entry() -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model=model, optimizer=optimizer, average=Copies())
        assert state._holding.roles.replicas
        state.restore()
        while state.step < 3:
            model(torch.rand(1, 2)).sum().backward()
            optimizer.step()
            state.commit()
        raise Stop

    job.enter(entry)
    assert caplog.text == ""


def test_samples() -> None:
    for tensor in (
        torch.rand(3),
        torch.rand(1000),
        torch.rand(4, 5, 6, 7).to(memory_format=torch.channels_last),
        torch.rand(30, 40).t(),
        torch.rand(7).expand(9, 7).clone().t(),
        torch.full((100,), float("nan")),
        torch.ones(5, dtype=torch.bool),
        torch.ones(5, dtype=torch.complex64).conj(),
        torch.rand(90)[::3],
        torch.empty(0),
        torch.tensor(2),
    ):
        before = memory.sample_of(tensor)
        assert before is not None
        assert before.numel() <= 64 * tensor.element_size()
        assert memory.changed([before], [memory.sample_of(tensor)]) == []
        if tensor.numel():
            tensor.fill_(0)
            assert memory.changed([before], [memory.sample_of(tensor)]) == [0]
    for tensor in (torch.eye(3).to_sparse(), torch.ones(2, device="meta")):
        assert memory.sample_of(tensor) is None
