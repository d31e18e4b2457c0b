"""Every interleaving of small jobs.

No state is stuck, and every invariant of both machines holds in each.
"""

from dataclasses import replace

import pytest

from taskd.core.node.lives import Lives
from taskd.testing.explorer import SCOPES, Scope, Violation, explore

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
@pytest.mark.extended
@pytest.mark.parametrize("name", SCOPES)
def test_every_scope(name: str) -> None:
    report = explore(SCOPES[name])
    print(f"{name}: {report}")
    assert report.is_complete
