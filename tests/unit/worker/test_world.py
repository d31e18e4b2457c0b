"""A worker in a smaller world: which rank it is, what it was told, what it puts back."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import Sampler

import taskd
from taskd.core import commands as do
from taskd.worker.life import Life, set_current
from taskd.worker.objects.named import Named
from taskd.worker.objects.roles import Roles
from taskd.worker.process import world
from taskd.worker.state.extras import decode_part
from taskd.worker.state.holding import Holding


@pytest.fixture
def life(monkeypatch) -> Life:
    """Rank 4 of 6, on the third of three nodes."""
    for name in ("RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    return Life(4, 6, 0)


def test_it_has_another_rank_there_and_its_own_again_afterwards(life) -> None:
    world.enter(life, (0, 1, 4, 5))
    assert (life.rank, life.world_rank, life.world_size) == (4, 2, 4)
    told = ("RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [os.environ[name] for name in told] == ["2", "4", "2", "4", "1", "2"]
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("0", "2")
    world.enter(life, ())
    assert (life.world_rank, life.world_size) == (4, 6)
    assert [os.environ[name] for name in told] == ["4", "6", "4", "6", "2", "3"]


def test_orders_name_the_ranks_of_the_world_there(life) -> None:
    order = do.Dump(
        "c", 3, 7, (0, 4), 4, "why", "3-1", legacies=((5, "box"),), orphaned=((5, 4),),
        arenas=((5, "arena"),),
    )  # fmt: skip
    assert world.in_world(order, life) is order
    world.enter(life, (0, 1, 4, 5))
    there = world.in_world(order, life)
    assert (there.writers, there.legacies) == ((0, 2), ((3, "box"),))
    assert (there.orphaned, there.arenas) == (((3, 2),), ((3, "arena"),))
    assert world.in_world(do.Publish("c", 3, 2, 4, 0), life).rank == 2


class Position(Sampler):
    """A sampler that knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        return iter(())

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _holding(**values: object) -> Holding:
    objects = {"sampler": Position(), "generator": torch.Generator(), **values}
    return Holding("train", Roles.sort("train", objects))


@pytest.mark.parametrize("active", [(), (0, 1)])
def test_a_position_in_the_data_is_put_back_in_the_same_world_alone(caplog, active) -> None:
    before = _holding(epoch=3)
    before.roles.positions["sampler"].at = 5
    before.roles.positions["generator"].manual_seed(9)
    part = decode_part(before.encode())
    assert part.world == ()
    now = _holding(epoch=0)
    now.world = active
    now.load_part(part, Named(now.roles))
    assert now.roles.values == {"epoch": 3}
    assert now.roles.positions["generator"].initial_seed() == 9
    assert now.roles.positions["sampler"].at == (0 if active else 5)
    assert ("sampler" in caplog.text and "is not put back: it is of a world of" in caplog.text) == (
        bool(active)
    )
    assert decode_part(now.encode()).world == active


def test_a_world_of_another_size_is_told_of_once(life, caplog) -> None:
    world.report_step(life)
    world.enter(life, (4, 5))
    world.report_step(life)
    world.report_step(life)
    assert caplog.text.count("the world has 2 of 6 ranks now") == 1
    world.enter(life, (0, 4))
    world.report_step(life)
    assert caplog.text.count("ranks now") == 1, "its first rank says it"


def test_whoever_reads_its_data_with_an_elastic_sampler_is_told_nothing(life, caplog) -> None:
    set_current(life)
    try:
        taskd.ElasticSampler(8, 8).of(0)
    finally:
        set_current(None)
    world.enter(life, (4, 5))
    world.report_step(life)
    assert "ranks now" not in caplog.text
