"""Whole jobs in virtual time: real machines, bad network, faults at any time.

No step lost, none done twice, it ends.
"""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from taskd.core import commands as do
from taskd.replay import dump_lines, load_lines, replay
from taskd.testing import FaultScript, NetworkQuality, SimulatedJob, Trouble
from taskd.testing.histories import keeps_steps

STEPS = 30
ALL_STEPS = list(range(STEPS))
RECOVERABLE = ("kill", "crash", "exit", "raise", "tear", "freeze", "cut", "manager", "fail start")


def script(*troubles: tuple) -> FaultScript:
    return FaultScript.of(Trouble(*trouble) for trouble in troubles)


def check_replay(job: SimulatedJob) -> None:
    machines = [agent.machine for agent in job.agents]
    if job.manager is not None:
        machines.append(job.manager.machine)
    for machine in machines:
        fresh, entries = load_lines(dump_lines(machine))
        assert replay(fresh, entries) == []


def run(*troubles: tuple, **arguments) -> tuple[SimulatedJob, object]:
    job = SimulatedJob(script=script(*troubles), **{"steps": STEPS, **arguments})
    result = job.run()
    check_replay(job)
    assert not result.missed
    return job, result


def assert_whole(result) -> None:
    assert result.succeeded, result.reason
    assert all(state == ALL_STEPS for state in result.states.values())
    assert {outcome.outcome for outcome in result.outcomes.values()} == {"succeeded"}


class TestSharded:
    """Ranks 0 and 2 hold one part, 1 and 3 the other. One rank at a time dies."""

    @pytest.mark.parametrize("rank", range(4))
    def test_a_death_at_any_moment_costs_no_step(self, rank) -> None:
        """Two steps, in pieces of 0.2 ms: all phases of the vote are among them."""
        advanced = 0
        for moment in range(300):
            job, result = run(
                (0.3 + moment * 0.0002, "kill", rank),
                nodes=2,
                ranks_per_node=2,
                is_sharded=True,
                seed=moment,
            )
            assert_whole(result)
            assert [(record.strategy, record.steps_redone) for record in result.records] == [
                ("recover-in-place", 0)
            ]
            advanced += any(isinstance(command, do.Advance) for command in job.commands)
        assert advanced > 10, "the moment in which some have passed the vote was never met"


class TestSingleTroubles:
    def test_a_quiet_job(self) -> None:
        job, result = run(nodes=2, ranks_per_node=2)
        assert_whole(result)
        assert result.records == []
        assert [type(command) for command in job.commands] == [do.Release, do.EndJob]

    @pytest.mark.parametrize("rank", range(4))
    @pytest.mark.parametrize(
        ("kind", "detail"), [("kill", "SIGKILL"), ("crash", "SIGSEGV"), ("exit", "exit 3")]
    )
    def test_a_rank_dies(self, kind, detail, rank) -> None:
        _, result = run((0.5, kind, rank), nodes=2, ranks_per_node=2)
        assert_whole(result)
        (record,) = result.records
        assert (record.strategy, record.restarts_used) == ("recover-in-place", 1)
        assert [(fault.rank, fault.detail) for fault in record.faults] in (
            [(rank, detail)],
            [(rank, "")],
        )
        assert record.steps_redone <= 1
        assert record.total_s < 0.5

    def test_an_exception_replaces_nobody(self) -> None:
        job, result = run((0.5, "raise", 1))
        assert_whole(result)
        assert result.records[0].strategy == "retry"
        assert not any(isinstance(command, do.ReplaceWorker) for command in job.commands)

    def test_a_torn_copy_is_replaced_by_a_good_one(self) -> None:
        _, result = run((0.5, "tear", 1))
        assert_whole(result)
        assert dict(result.records[0].sources)[1].startswith("rank ")

    def test_two_at_once(self) -> None:
        _, result = run((0.5, "kill", 0), (0.5, "kill", 3))
        assert_whole(result)
        assert len(result.records) == 1
        assert len(result.records[0].faults) == 2

    def test_one_during_the_recovery_of_another(self) -> None:
        _, result = run((0.5, "kill", 0), (0.53, "kill", 3))
        assert_whole(result)

    def test_one_that_was_just_replaced(self) -> None:
        _, result = run((0.5, "kill", 0), (0.7, "kill", 0), (0.9, "kill", 0))
        assert_whole(result)

    def test_twenty_in_one_run(self) -> None:
        troubles = [(0.3 + 0.25 * count, "kill", count % 4) for count in range(20)]
        job = SimulatedJob(script=script(*troubles), steps=300)
        result = job.run()
        assert result.succeeded
        assert all(state == list(range(300)) for state in result.states.values())
        assert result.records[-1].restarts_used == 20

    def test_a_stopped_rank_is_killed_when_others_need_it_out(self) -> None:
        job, result = run((0.4, "freeze", 1), (0.5, "kill", 2))
        assert_whole(result)
        assert any(
            isinstance(command, do.KillWorker) and command.rank == 1 for command in job.commands
        )

    def test_a_replacement_that_cannot_be_started_is_tried_again(self) -> None:
        _, result = run((0.5, "fail start", 1))
        assert_whole(result)
        assert result.records[0].restarts_used == 2

    def test_a_rank_that_leaves_too_early(self) -> None:
        _, result = run((0.5, "exit early", 1))
        assert_whole(result)

    def test_during_boot(self) -> None:
        _, result = run((0.01, "kill", 1))
        assert_whole(result)

    @pytest.mark.parametrize("seed", range(5))
    def test_while_the_others_have_returned(self, seed) -> None:
        job = SimulatedJob(steps=STEPS, seed=seed)
        while not any(worker.phase == "returned" for worker in job.world.workers.values()):
            assert job.clock.run_next()
        victim = next(worker for worker in job.world.workers.values() if worker.phase != "returned")
        victim.die(-9)
        result = job.run()
        assert_whole(result)
        assert dict(result.records[0].sources)[victim.rank].startswith("rank ")

    def test_the_budget_ends_it(self) -> None:
        _, result = run((0.4, "kill", 0), (0.7, "kill", 1), (1.0, "kill", 2), max_restarts=2)
        assert result.succeeded is False
        assert result.reason.startswith("restart budget spent: 2 of 2")
        assert {outcome.outcome for outcome in result.outcomes.values()} == {"failed"}

    def test_everybody_at_once_starts_afresh(self) -> None:
        _, result = run(*[(0.5, "kill", rank) for rank in range(4)])
        assert_whole(result)
        assert result.records[0].strategy == "restart"


class TestManagerAndNodes:
    def test_a_manager_that_comes_back_is_not_noticed(self) -> None:
        _, result = run((0.1, "manager", 0, 0.1), nodes=2, ranks_per_node=2)
        assert all(state == ALL_STEPS for state in result.states.values())

    @pytest.mark.parametrize("delay", [0.0, 0.001, 0.003, 0.01, 0.03, 0.06, 0.1, 0.15])
    def test_a_manager_that_dies_in_the_middle_of_a_recovery(self, delay) -> None:
        job, result = run(
            (0.5, "kill", 1), (0.5 + delay, "manager", 0, 0.2), nodes=2, ranks_per_node=2
        )
        assert all(state == ALL_STEPS for state in result.states.values())
        assert {outcome.outcome for outcome in result.outcomes.values()} == {"succeeded"}
        assert job.agents[0].machine.generation >= 1

    def test_a_fault_while_there_is_no_manager_waits_for_it(self) -> None:
        _, result = run((0.3, "manager", 0, 3.0), (0.5, "kill", 1))
        assert_whole(result)
        assert result.ended_at > 3.0

    def test_without_a_manager_it_trains_and_ends(self) -> None:
        job = SimulatedJob(nodes=2, ranks_per_node=2, steps=STEPS, has_manager=False)
        result = job.run()
        assert all(state == ALL_STEPS for state in result.states.values())
        assert {outcome.outcome for outcome in result.outcomes.values()} == {"succeeded"}

    def test_without_a_manager_a_fault_falls_back(self) -> None:
        _, result = run((0.5, "kill", 1), has_manager=False)
        assert isinstance(result.outcomes[0], do.FallBack)

    def test_a_lost_node_ends_the_job(self) -> None:
        _, result = run((0.5, "agent", 1), nodes=2, ranks_per_node=2)
        assert result.succeeded is False
        assert "node 1 has been silent" in result.reason
        assert result.outcomes[0].outcome == "failed"

    @pytest.mark.parametrize("cut_s", [15.0, 50.0])
    def test_a_node_that_is_cut_off_with_a_fault_does_not_go_on_alone(self, cut_s) -> None:
        """The others wait for 270 s, from when they have lost it. No other takes its place."""
        for seed in range(100):
            job, result = run(
                (0.3, "partition", 1, cut_s),
                (0.4, "kill", 2),
                nodes=2,
                ranks_per_node=2,
                reschedule_s=270.0,
                seed=seed,
            )
            if job.agents[1].machine.agent_incarnation == "agent 1":
                break
        assert_whole(result)
        assert job.agents[1].machine.lives.present[3].incarnation == 0, "it is the same process"

    @pytest.mark.parametrize("delay", [-0.002, 0.0, 0.002, 0.02, 0.08, 0.12])
    def test_a_cut_connection_during_a_recovery(self, delay) -> None:
        _, result = run(
            (0.5, "kill", 1),
            (0.5 + delay, "cut", 0),
            (0.5 + delay, "cut", 1),
            nodes=2,
            ranks_per_node=2,
        )
        assert_whole(result)

    def test_accelerators_wait_for_the_old_process(self) -> None:
        job, result = run((0.5, "kill", 1), wait_for_exit=True)
        assert_whole(result)
        assert job.agents[0].machine.lives.present[1].incarnation == 1

    def test_hundreds_of_nodes(self) -> None:
        job = SimulatedJob(
            nodes=64,
            ranks_per_node=4,
            steps=5,
            script=script((0.12, "kill", 77), (0.13, "kill", 200)),
        )
        result = job.run()
        assert result.succeeded
        assert all(state == list(range(5)) for state in result.states.values())


class TestUndeclared:
    def test_the_group_is_restarted(self) -> None:
        _, result = run((0.3, "kill", 1), nodes=2, ranks_per_node=2, is_declared=False)
        assert_whole(result)
        assert result.records[0].strategy == "restart"

    def test_a_script_that_always_fails_is_given_up(self) -> None:
        _, result = run(
            *[(0.3 + 2.0 * count, "exit", 1) for count in range(3)], is_declared=False, steps=1000
        )
        assert result.succeeded is False
        assert result.reason.startswith("3 equal failures in a row")

    @pytest.mark.parametrize("seed", range(10))
    def test_being_killed_again_and_again_is_no_fault_of_the_script(self, seed) -> None:
        """The others fail as a consequence, and are heard of first."""
        kills = [(0.3 + 2.0 * count, "kill", count % 4) for count in range(8)]
        _, result = run(*kills, is_declared=False, steps=1000, seed=seed)
        assert result.succeeded, result.reason


QUALITIES = st.builds(
    NetworkQuality,
    jitter_s=st.sampled_from([0.001, 0.05]),
    loss=st.sampled_from([0.0, 0.1]),
    duplicate=st.sampled_from([0.0, 0.2]),
)


@settings(max_examples=settings.default.max_examples * 3 // 2)
@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 5),
    QUALITIES,
    st.booleans(),
    st.booleans(),
)
def test_any_script_over_any_network(
    seed, nodes, per_node, count, quality, wait_for_exit, is_sharded
) -> None:
    ranks = nodes * per_node
    faults = FaultScript.random(
        random.Random(seed), count=count, until=1.2, ranks=ranks, nodes=nodes, kinds=RECOVERABLE
    )
    job = SimulatedJob(
        nodes=nodes,
        ranks_per_node=per_node,
        steps=STEPS,
        script=faults,
        seed=seed,
        quality=quality,
        wait_for_exit=wait_for_exit,
        is_sharded=is_sharded,
    )
    result = job.run()
    check_replay(job)
    outcomes = {getattr(outcome, "outcome", None) for outcome in result.outcomes.values()}
    # A manager that was started again after the last agent had left has nothing to end.
    assert result.succeeded is not None or None not in outcomes, (result.ended_at, faults)
    went_on_alone = any(isinstance(outcome, do.FallBack) for outcome in result.outcomes.values())
    if (result.succeeded and not went_on_alone) or outcomes == {"succeeded"}:
        assert all(state == ALL_STEPS for state in result.states.values())
    else:
        # What the rules end on purpose: a failure after Release, or one that came back; or a node
        # that had a fault, found no manager in time, and went on as plain torchrun does, without
        # the others.
        assert any(
            words in result.reason or words in str(result.outcomes)
            for words in (
                "returned everywhere",
                "already ended well",
                "came back",
                "times:",
                "in a row",
                "already left",
                "not known to this manager",
                "no manager answers",
            )
        ), result.reason
    assert all(map(keeps_steps, [None, *result.records], result.records))


@settings(max_examples=settings.default.max_examples // 2)
@given(st.integers(0, 2**32), st.integers(1, 2), st.integers(2, 3), st.integers(0, 3), QUALITIES)
def test_any_script_that_is_not_recoverable(seed, nodes, per_node, count, quality) -> None:
    faults = FaultScript.random(
        random.Random(seed),
        count=count,
        until=0.5,
        ranks=nodes * per_node,
        nodes=nodes,
        kinds=("kill", "exit", "cut"),
    )
    job = SimulatedJob(
        nodes=nodes,
        ranks_per_node=per_node,
        steps=STEPS,
        script=faults,
        seed=seed,
        quality=quality,
        is_declared=False,
    )
    result = job.run()
    check_replay(job)
    assert result.succeeded is not None
    if result.succeeded:
        assert all(state == ALL_STEPS for state in result.states.values())
