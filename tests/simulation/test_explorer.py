"""Every interleaving of small jobs.

No state is stuck, and every invariant of both machines holds in each.
"""

from dataclasses import replace

import pytest

from taskd.core.node.lives import Lives
from taskd.testing.explorer import SCOPES, explore
from taskd.testing.small.rules import Move, Rules
from taskd.testing.small.state import FAULTS, Scope, Violation

SMALL = Scope(per_node=1)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_quiet_job_of_two_nodes_with_two_ranks(is_sharded: bool) -> None:
    report = explore(Scope(faults=0, is_sharded=is_sharded))
    assert report.is_complete
    assert report.ends == {"succeeded": 1}
    assert report.states > 100


@pytest.mark.parametrize("is_sharded", [False, True])
def test_any_fault_at_any_moment_of_two_nodes_with_one_rank(is_sharded: bool) -> None:
    report = explore(replace(SMALL, is_sharded=is_sharded, in_turns=is_sharded))
    print(report)
    assert report.is_complete
    assert report.states > 10_000, report
    assert report.ends["succeeded"] > 10


def test_the_first_fault_may_be_of_some_kinds_and_the_others_of_any() -> None:
    rules = Rules(replace(SMALL, faults=2, first=("manager",)))
    state = rules.first()

    def faults() -> list[Move]:
        return [move for move in rules.moves(state) if move[0].startswith("FAULT")]

    (move,) = faults()
    assert move[0] == "FAULT the manager is killed"
    state = rules.after(state, move)
    assert {name.rpartition(" ")[2] for name, _ in faults()} == {"killed", "exits"}
    one = replace(SMALL, in_turns=True, kinds=("manager",))
    alone, first = explore(one), explore(replace(one, kinds=FAULTS, first=("manager",)))
    assert (first.states, first.ends) == (alone.states, alone.ends)


def test_the_second_fault_may_be_of_some_kinds_too() -> None:
    rules = Rules(replace(SMALL, faults=2, first=("manager",), then=("exit",)))
    state = rules.first()
    for name in ("FAULT the manager is killed", "FAULT rank 0 exits"):
        move = next(move for move in rules.moves(state) if move[0] == name)
        state = rules.after(state, move)
        faults = {name for name, _ in rules.moves(state) if name.startswith("FAULT")}
        assert all(name.endswith(" exits") for name in faults), faults
    assert not faults
    two = replace(SMALL, in_turns=True, kinds=("manager", "lose down"), faults=2)
    alone = explore(replace(two, kinds=("lose down",)))
    both = explore(replace(two, first=("lose down",), then=("lose down",)))
    assert (both.states, both.ends) == (alone.states, alone.ends)


def test_a_node_that_keeps_to_itself_who_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to it is told.

    A rank offers a step, Resume is lost, and the node registers as if it had heard it.
    """
    honest = Lives.reports
    monkeypatch.setattr(
        Lives,
        "reports",
        lambda self, now: tuple(
            replace(report, state="running", may_advance=False) if report.may_advance else report
            for report in honest(self, now)
        ),
    )
    with pytest.raises(
        Violation,
        match=r"(?s)stuck: .*asking.*the manager "
        r"resumed.*FAULT.*registers",
    ):
        explore(replace(SMALL, is_sharded=True, kinds=("raise", "cut"), faults=2))


@pytest.mark.slow
@pytest.mark.extended(
    "test_a_quiet_job_*, test_any_fault_at_any_moment_*; a peer that notices: "
    "TestBrokenCommunication in tests/unit/core/test_recovery.py; an agent that comes late: "
    "tests/unit/core/test_recovery_joining.py"
)
@pytest.mark.parametrize("name", SCOPES)
def test_every_scope(name: str) -> None:
    report = explore(SCOPES[name])
    print(f"{name}: {report}")
    assert report.is_complete
