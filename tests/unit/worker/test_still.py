"""A target network that the script sets now and then: a write before the last commit tears nothing.

Of what has stood still for long no copy is kept; when it was written is known all the same.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from job import Job, Stop, digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from taskd.worker.objects.memory import Kept
from taskd.worker.objects.roles import Roles
from taskd.worker.objects.rollback import Rollback
from taskd.worker.objects.still import Still
from taskd.worker.objects.windows import Windows, has_window
from taskd.worker.train_state import TrainState

IDIOMS = ("loaded", "averaged", "copied", "copied through data", "assigned")
BEFORE = 21  # commits in which nothing is written: contents are not compared in the next ones


class Agent(nn.Module):
    """As in DQN or BYOL: what is trained, and beside it what follows it, with buffers."""

    def __init__(self, further: int = 0) -> None:
        super().__init__()
        self.base = nn.ParameterList(
            [nn.Parameter(torch.zeros(2), requires_grad=False) for _ in range(further)]
        )
        self.online = nn.Linear(3, 40)
        self.target = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40).eval())
        self.target.requires_grad_(False).register_buffer("bound", torch.zeros(5))


def follow(target: nn.Module, source: nn.Module, idiom: str) -> None:
    """Set the target, as it is written in scripts."""
    if idiom == "loaded":
        target.load_state_dict(source.state_dict())
        return
    for mine, other in zip(
        (*target.parameters(), *target.buffers()),
        (*source.parameters(), *source.buffers()),
        strict=True,
    ):
        if idiom == "assigned":
            mine.data = other.data.clone()
        elif idiom == "copied through data":
            mine.data.copy_(other.data)
        else:
            with torch.no_grad():
                if idiom == "averaged" and mine.is_floating_point():
                    mine.lerp_(other, 0.5)
                else:
                    mine.copy_(other)


class Rig:
    """A rollback alone, and what the target is set to."""

    def __init__(self, further: int = 0) -> None:
        self.agent = Agent(further)
        self.source = copy.deepcopy(self.agent.target)
        optimizer = torch.optim.SGD(self.agent.online.parameters(), lr=0.1)
        self.rollback = Rollback(Roles.sort("train", {"model": self.agent, "optimizer": optimizer}))
        self.rollback.begin()
        self.commit(BEFORE)

    def commit(self, times: int = 1) -> None:
        for _ in range(times):
            self.rollback.remember()

    def follow(self, idiom: str) -> None:
        """The target is another one behind this."""
        with torch.no_grad():
            for tensor in (*self.source.parameters(), *self.source.buffers()):
                tensor.add_(1)
        follow(self.agent.target, self.source, idiom)

    def target(self) -> bytes:
        return digest(self.agent.target)


@pytest.mark.parametrize("further", [0, 100])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_a_write_before_the_commit_tears_no_later_step(idiom, further) -> None:
    rig = Rig(further)
    for commits in (1, 1, 3):
        rig.follow(idiom)
        rig.commit(commits)
        committed = rig.target()
        assert rig.rollback.roll_back() == ""
        assert rig.target() == committed


@pytest.mark.parametrize("further", [0, 100])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_the_first_write_in_an_interrupted_step_tears_it(idiom, further) -> None:
    rig = Rig(further)
    rig.follow(idiom)
    assert "target." in rig.rollback.roll_back()


@pytest.mark.parametrize("further", [0, 100])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_a_later_write_in_an_interrupted_step_is_undone(idiom, further) -> None:
    rig = Rig(further)
    rig.follow(idiom)
    rig.commit()
    committed = rig.target()
    rig.follow(idiom)
    assert rig.target() != committed
    assert rig.rollback.roll_back() == ""
    assert rig.target() == committed


@pytest.mark.parametrize("idiom", IDIOMS)
def test_a_device_is_not_waited_for_in_each_commit(monkeypatch, idiom) -> None:
    """What its windows showed at the last commit tells at parking when it was written."""
    monkeypatch.setattr(Windows, "is_same", lambda *_: True)  # as of a device
    rig = Rig()
    rig.follow(idiom)
    rig.commit(3)
    committed = rig.target()
    assert rig.rollback.roll_back() == ""
    assert rig.target() == committed
    if idiom != "copied through data":  # the others are seen without
        return
    assert not rig.rollback.untrained.moving
    rig.follow(idiom)
    assert "target." in rig.rollback.roll_back()
    rig.commit(16)  # the contents have been compared
    committed = rig.target()
    rig.follow(idiom)
    assert rig.rollback.roll_back() == ""
    assert rig.target() == committed


@pytest.mark.parametrize(
    ("where", "idiom"),
    [
        ("before the write", "copied through data"),
        ("between", "loaded"),
        ("behind the commit", "averaged"),
        ("behind the commit", "copied through data"),
    ],
)
def test_a_job_whose_target_is_set_at_times(job, where, idiom) -> None:
    def train(job: Job, stops: list[int]) -> Any:
        def entry() -> bytes:
            torch.manual_seed(0)
            agent, source = Agent(), Agent().target
            optimizer = torch.optim.SGD(agent.online.parameters(), lr=0.1)
            state = TrainState(model=agent, optimizer=optimizer)
            state.restore()

            def may_stop(here: str) -> None:
                if stops and (here, state.step) == (where, stops[0]):
                    stops.pop(0)
                    raise Stop

            while state.step < BEFORE + 12:
                optimizer.zero_grad()
                x = torch.rand(4, 3)
                (agent.online(x) - agent.target(x) - 1).square().mean().backward()
                may_stop("before the write")
                optimizer.step()
                if state.step % (BEFORE + 1) == BEFORE:
                    source[0].load_state_dict(agent.online.state_dict())
                    follow(agent.target, source, idiom)
                    may_stop("between")
                state.commit()
                may_stop("behind the commit")
            return digest(agent)

        return job.run(entry)

    plain, _ = train(job, [])
    stops = {"before the write": [3, BEFORE, BEFORE + 5], "between": [BEFORE]}
    again, report = train(Job(), stops.get(where, [BEFORE + 1, BEFORE + 3]))
    if where == "between":
        assert again is None
        assert "between optimizer.step() and commit()" in report.reason
    else:
        assert (again, report.clean) == (plain, True)


# ---------------------------------------------------------------- what is looked at


class Held:
    """Tensors that a `Still` holds, as they hang in a module."""

    def __init__(self, *tensors: torch.Tensor, is_parameter: bool = False) -> None:
        self.module = nn.Module()
        self.kept = []
        for index, tensor in enumerate(tensors):
            self.put(index, tensor, is_parameter=is_parameter)
            self.kept.append(
                Kept(str(index), self.module, f"t{index}", tensor, is_parameter=is_parameter)
            )
            self.kept[-1].note()
        self.still = Still()
        self.still.hold(list(self.kept))

    def put(self, index: int, tensor: torch.Tensor, *, is_parameter: bool = False) -> None:
        if is_parameter:
            self.module.register_parameter(f"t{index}", tensor)
        else:
            self.module.register_buffer(f"t{index}", tensor)

    def written(self) -> list[int]:
        """As parking and a commit see it, which is the same."""
        parked = [self.kept.index(one) for one in self.still.written()]
        assert [self.kept.index(one) for one in self.still.take_written(is_due=False)] == parked
        assert self.still.written() == []
        return parked


def test_another_object_is_a_write_unless_it_is_the_same_memory() -> None:
    held = Held(*(torch.rand(20) for _ in range(4)))
    held.put(1, held.module.t1.detach().clone())
    held.module.t2 = None
    assert held.written() == [1, 2]
    with torch.inference_mode():
        held.module.t0 = torch.rand(20)
    assert held.written() == [0]
    held.module.t3 = held.module.t3.data
    assert held.written() == []


def test_memory_that_goes_and_comes_back_is_no_write() -> None:
    """As with weights that wait elsewhere: what is not there is not looked at."""
    held = Held(torch.rand(1000), torch.rand(1000))
    kept = held.module.t0.clone()
    held.module.t0.untyped_storage().resize_(0)
    assert held.still._marks_now()[1] != held.still._pointers
    held.module.t0.untyped_storage().resize_(4000)
    held.module.t0.data.copy_(kept)
    assert held.written() == []
    held.module.t0.data = kept.clone()
    assert held.written() == []
    held.module.t0.data = kept.clone()
    held.module.t1.data.add_(1)
    assert held.written() == [1]


def test_a_write_is_found_through_each_kind_of_memory() -> None:
    flat = torch.zeros(40, dtype=torch.uint8)
    tensors = [
        flat[3:4],  # these three share a word
        flat[4:6].view(torch.bfloat16),
        flat[6:7],
        torch.rand(3, 5).t(),
        torch.rand(4, 5, 6, 7).to(memory_format=torch.channels_last),
        torch.rand(90)[::3],  # has gaps: no window, only the samples of some commits
        torch.zeros(3, dtype=torch.complex128),
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(1, dtype=torch.bool),
        torch.rand(500, 400),
    ]
    for index, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        held = Held(*tensors)
        tensor.data.copy_(tensor.logical_not())
        assert has_window(tensor) == (index != 5)
        if has_window(tensor):
            assert held.written() == [index]
        else:
            assert held.still.take_written(is_due=True) == [held.kept[index]]


def test_what_is_small_and_beside_it_is_another_ones() -> None:
    flat = torch.zeros(40, dtype=torch.uint8)
    held = Held(flat[3:4], flat[9:15])
    flat.data[:3] = flat.data[4:9] = flat.data[15:] = 1
    assert held.written() == []


def test_words_of_many_tensors_are_spread_and_few() -> None:
    tensors = [torch.zeros(30, 30) for _ in range(600)]
    words = sum(one.numel() for one in Windows(tensors).read())
    assert words == 4 * 600
    assert Windows(tensors[:1]).read()[0].numel() == 64


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_distributed_parameters_are_looked_at_in_their_local_memory(mesh) -> None:
    held = Held(
        *(
            nn.Parameter(distribute_tensor(torch.rand(8, 3), mesh), requires_grad=False)
            for _ in range(5)
        ),
        is_parameter=True,
    )
    assert held.written() == []
    with torch.no_grad():
        held.module.t1.add_(1)
    held.module.t3._local_tensor.data.add_(1)
    assert held.written() == [1, 3]
    assert held.still._distributed == [held.module.t0, held.module.t2, held.module.t4]
    held.module.t4._local_tensor.data = held.module.t4._local_tensor + 1
    assert held.written() == [4]
