"""Hosts that do not reach each other: at most one part of a job goes on, and it is known which."""

import os
import random
import re
from collections import Counter

import pytest

from taskd.core.policy.election import Election, Electorate, Won
from taskd.core.votes import Roster
from taskd.testing.partitions import World, play
from tests.simulation.splits import in_every_pattern

SEED = int(os.environ["TASKD_TEST_SEED"])
STORIES = 150


def expected(node_count: int, blocks: dict[int, int]) -> str:
    """Who goes on: the first manager, one that is elected, or nobody."""
    sizes = Counter(blocks.values())
    if 2 * sizes[blocks[0]] >= node_count:
        return "first"
    return "elected" if 2 * max(sizes.values()) > node_count else "nobody"


@pytest.mark.parametrize("node_count", [3, 4, 5])
def test_in_every_pattern_the_larger_part_goes_on_and_no_other(node_count: int) -> None:
    """The part with half of the nodes or more that has the manager, or else more than half."""
    seen = in_every_pattern(
        node_count,
        lambda: World(node_count, random.Random(1)),
        lambda blocks: expected(node_count, blocks),
    )
    assert sum(seen.values()) == {3: 5, 4: 15, 5: 52}[node_count]  # the numbers of Bell
    assert min(seen[who] for who in ("first", "elected", "nobody")) > 0


@pytest.mark.parametrize("node_count", [3, 4, 5, 7])
def test_the_host_of_the_manager_is_lost(node_count: int) -> None:
    """And then that of the next one, as long as more than half of the agents are there."""
    world = World(node_count, random.Random(1))
    for lost in range(2):
        (manager,) = world.who_goes_on()
        world.kill(manager.host)
        world.settle()
        (manager,) = world.who_goes_on()
        assert world.is_whole(manager)
        assert manager.electorate.term == lost + 1


def test_whatever_happens_two_managers_never_bring_the_job_on() -> None:
    """Hosts fall apart, die and meet again; messages are lost; managers begin anew."""
    elected = replaced = 0
    for number in range(STORIES):
        chance = random.Random(SEED + number)
        won, others = play(SEED + number, chance.choice((3, 4, 5)))
        elected, replaced = elected + won, replaced + others
    assert elected > STORIES / 10
    assert replaced > STORIES


@pytest.mark.parametrize(("owner", "rule"), [
    (Electorate, "may_replace"), (Roster, "is_quorum"), (Election, "may_obey"),
])  # fmt: skip
def test_without_one_of_the_rules_the_job_is_there_twice(
    monkeypatch: pytest.MonkeyPatch, owner: type, rule: str
) -> None:
    """What proves that the stories above would show it."""
    monkeypatch.setattr(owner, rule, lambda *_: True)
    with pytest.raises(AssertionError, match=r"[23] managers"):
        for seed in range(1000):
            play(seed, 4)


# What takes a rule away, the nodes of stories that show it, and the first seed that does. Any
# change of the stories changes that.
BEGUN_ANEW = {
    "agents tell what they know": (Electorate, "learn", lambda *_, **__: None, 3, 0),
    "it begins with more than half": (Electorate, "may_begin", lambda *_: True, 3, 1068),
    "it has heard more than half": (Electorate, "is_sure", True, 4, 195),
}


@pytest.mark.parametrize("rule", BEGUN_ANEW)
def test_without_a_rule_for_managers_that_begin_anew_the_job_is_there_twice(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    *taken, node_count, first = BEGUN_ANEW[rule]
    monkeypatch.setattr(*taken)
    assert shows(r"[23] managers", range(first, 5000), node_count)


@pytest.mark.parametrize("is_told", [True, False])
def test_an_elected_manager_that_is_started_again_goes_on_from_the_newest_roster(
    monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """Which the agent that starts it tells it at once, though it may register last.

    Else two who know only the roster before, and have been replaced, would be enough.
    """
    if not is_told:
        monkeypatch.setattr(Won, "again", lambda won, _: won)
    spares = {1: 3, 3: 3}  # by host of the manager: beside which host they are
    mute: set[int] = set()  # what is said to the manager of the same host does not arrive
    monkeypatch.setattr(
        World,
        "_spare_host",
        lambda world, manager: spares[manager.host % 4] + 4 * (len(world.torchruns) + 1),
    )
    monkeypatch.setattr(
        World,
        "_arrives",
        lambda world, one, other: (one != other or one not in mute) and world.reaches(one, other),
    )
    world = World(4, random.Random(1))
    (first,) = world.managers
    world.split({0: 1})
    while len(world.managers) == 1:
        world.turn()
    elected = world.managers[1]
    assert elected.host == 1
    world.split({0: 1, 2: 2})  # before all know its roster
    world.settle()
    assert world.who_goes_on() == [elected]
    first.is_over = True
    world.split({3: 1})  # the two who were replaced, with the agent that starts it
    spares[1] = 0
    mute.add(1)
    world.start_again(elected)
    world.settle()
    hosts = [manager.host % 4 for manager in world.who_goes_on()]
    assert sorted(hosts) == ([3] if is_told else [1, 3])


def test_if_agents_did_not_tell_what_they_know_nobody_would_be_elected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They know newer rosters than those of a manager that numbers them from 1 again."""
    monkeypatch.setattr(Electorate, "learn", lambda *_, **__: None)
    assert shows("no manager", range(1000), 3)


def shows(what: str, seeds: range, node_count: int) -> bool:
    """Whether one of these stories ends so."""
    for seed in seeds:
        try:
            play(seed, node_count)
        except AssertionError as error:
            if re.search(what, str(error)):
                return True
    return False
