"""Large jobs in virtual time, and the troubles of links that they meet: nothing is lost.

Every invariant holds after each event, nobody is stuck, and no step is done twice.
"""

from __future__ import annotations

import os

import pytest

from taskd.testing import FaultScript, NetworkQuality, SimulatedJob, Trouble, large
from taskd.testing.large import Size

SEED = int(os.environ["TASKD_TEST_SEED"])
SMALL = Size(nodes=64, per_node=8, faults=12)
LEASE_S = 33.0  # after that a node that was not heard has been lost


@pytest.mark.parametrize("part", range(4))
def test_cascades_in_a_job_of_512_ranks(part: int) -> None:
    told = large.play(SEED + part, SMALL)
    print(told)
    # a rank that dies before it has said what it holds may have been the only one to hold it
    is_kept = "0 steps lost" in told or " restart" in told
    assert is_kept, large.replay_command(SEED + part, SMALL)


@pytest.mark.parametrize(
    ("seed", "what"),
    [
        # a restart of all was cut short, so that the next record counts what is done again
        (189860530, "1 restart, 1 retry; 1 steps lost"),
        (189860897, "1 restart, 1 retry; 1 steps lost"),
        # its first answer was late and then cut off, and the next one took two seconds
        (189860717, "the agent of node 47 left (fallback: rank 383 ended with SIGKILL"),
    ],
)
def test_what_the_rules_allow_is_no_failure(seed: int, what: str) -> None:
    assert what in large.play(seed, SMALL)


def test_only_a_slow_node_goes_on_alone() -> None:
    job = large.make(189860717, SMALL)
    result = job.run()
    job.network.slow_down(job.agents[47].address, 0.0)
    with pytest.raises(AssertionError, match=r"nodes \[47\] went on alone"):
        large.judge(job, result)


@pytest.mark.slow
@pytest.mark.extended("test_cascades_in_a_job_of_512_ranks")
@pytest.mark.timeout(3600)
def test_a_cascade_in_a_job_of_65536_ranks() -> None:
    size = Size(faults=12)
    print(large.play(SEED, size))


def test_the_command_tells_its_seed_first_and_how_it_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert large.main(["--nodes", "8", "--per-node", "2", "--faults", "3", "--seed", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "seed 7"
    assert lines[1].startswith("ended after ")
    assert lines[2].startswith("recoveries: ")


def test_it_fails_with_the_command_that_plays_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_job: SimulatedJob, _result: object) -> None:
        raise AssertionError("broken on purpose")

    monkeypatch.setattr(large, "judge", broken)
    assert large.main(["--nodes", "2", "--per-node", "2", "--seed", "7"]) == 1
    told = capsys.readouterr()
    assert "broken on purpose" in told.err
    assert told.out.splitlines()[-1] == (
        "play it again: python -m taskd.testing.large --nodes 2 --per-node 2 --faults 0 "
        "--steps 4 --seed 7"
    )


def test_a_history_follows_from_its_seed_and_size() -> None:
    size = Size(nodes=8, per_node=4, faults=6)
    one, other = large.make(7, size), large.make(7, size)
    assert one.script == other.script
    assert repr(one.run()).split("stories")[0] == repr(other.run()).split("stories")[0]


def job_with(*troubles: Trouble, **arguments: object) -> SimulatedJob:
    """Three nodes with two ranks, that train for 50 s and more."""
    wanted: dict[str, object] = {"nodes": 3, "ranks_per_node": 2, "steps": 2500, **arguments}
    return SimulatedJob(script=FaultScript.of(troubles), **wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["partition", "stall"])
def test_a_node_that_is_not_heard_for_less_than_its_lease_costs_nothing(
    kind: str, seed: int
) -> None:
    job = job_with(Trouble(5.0, kind, 1, 25.0), seed=seed)
    result = job.run()
    assert result.succeeded
    assert (result.records, result.missed) == ([], [])
    assert all(len(state or ()) == 2500 for state in result.states.values())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["partition", "stall"])
def test_for_longer_the_job_ends_with_the_reason(kind: str, seed: int) -> None:
    result = job_with(Trouble(5.0, kind, 1, 60.0), seed=seed).run()
    assert result.succeeded is False
    assert "the agent of node 1 has been silent" in result.reason
    assert 5.0 + LEASE_S - 4 < result.ended_at < 5.0 + LEASE_S + 31.0  # and its processes ended


@pytest.mark.parametrize("kind", ["partition", "stall"])
def test_where_lost_nodes_are_replaced_it_comes_back_or_another_one_does(kind: str) -> None:
    substitutes = 0
    for seed in range(6):
        job = job_with(Trouble(5.0, kind, 1, 60.0), seed=seed, reschedule_s=270.0)
        result = job.run()
        assert result.succeeded, result.reason
        assert all(len(state or ()) == 2500 for state in result.states.values())
        assert [(record.strategy, record.steps_redone) for record in result.records] == [
            ("recover", 0)
        ]
        substitutes += "substitute" in job.agents[1].machine.agent_incarnation
    assert 0 < substitutes < 6


def test_several_nodes_behind_one_switch() -> None:
    job = job_with(Trouble(5.0, "partition", 1, 20.0, count=2))
    result = job.run()
    assert result.succeeded
    assert (result.records, result.missed) == ([], [])


def test_messages_of_a_slow_node_come_late_and_it_is_recovered_like_any_other() -> None:
    job = job_with(Trouble(0.2, "slow", 1, 1.0), Trouble(5.0, "kill", 0), steps=500)
    result = job.run()
    assert result.succeeded
    (record,) = result.records
    assert (record.strategy, record.steps_redone) == ("recover-in-place", 0)
    assert record.total_s > 2.0  # to the slow node and back


@pytest.mark.parametrize("gathers", [False, True])
def test_all_ranks_of_a_node_and_then_others_while_that_is_recovered(gathers: bool) -> None:
    troubles = [
        Trouble(0.3, "kill", 8, count=8), Trouble(0.33, "kill", 0), Trouble(0.36, "kill", 30),
        Trouble(0.37, "partition", 2, 1.0), Trouble(0.4, "cut", 1, count=2),
    ]  # fmt: skip
    job = SimulatedJob(
        nodes=4,
        ranks_per_node=8,
        script=FaultScript.of(troubles),
        quality=NetworkQuality(jitter_s=0.02, loss=0.01, duplicate=0.01),
        gathers=gathers,
    )
    result = job.run()
    assert result.succeeded
    assert not result.missed
    assert all(state == list(range(30)) for state in result.states.values())
    assert sum(record.steps_redone for record in result.records) == 0
