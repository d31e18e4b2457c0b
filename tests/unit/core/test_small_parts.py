"""Timeouts, deadlines, leases, exit statuses: the parts without a story."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given

from taskd.core.commands import Move
from taskd.core.exits import exit_fault
from taskd.core.faults import FaultKind
from taskd.core.job.record import Attempt
from taskd.core.policy.leases import Deadlines, Leases
from taskd.core.timeouts import Timeouts


class TestTimeouts:
    @given(st.floats(1e-3, 1e6))
    def test_the_order_holds_for_every_setting(self, setting) -> None:
        Timeouts.derive(setting).check()

    def test_the_default_is_what_the_documentation_says(self) -> None:
        timeouts = Timeouts.derive()
        assert timeouts.communication_grace_s == timeouts.heartbeat_s == 1.0
        assert timeouts.manager_silence_s == timeouts.fallback_connected_s == 10.0
        assert timeouts.pause_s == timeouts.agent_lease_s == 30.0
        assert (timeouts.start_s, timeouts.fallback_never_connected_s) == (600.0, 2.0)

    @pytest.mark.parametrize("wrong", [0, -1, float("inf"), float("nan")])
    def test_a_senseless_setting_is_refused(self, wrong) -> None:
        with pytest.raises(ValueError, match="positive number of seconds"):
            Timeouts.derive(wrong)

    @given(st.floats(1e-3, 1e6), st.sampled_from([1, 256, 257, 1024, 1025, 8192]))
    def test_the_order_holds_for_every_job(self, setting, nodes) -> None:
        any_job = Timeouts.derive(setting)
        timeouts = any_job.of_job(nodes)
        longest_s = max(any_job.heartbeat_s, any_job.manager_silence_s / 2.5)
        assert any_job.heartbeat_s <= timeouts.heartbeat_s <= longest_s
        assert timeouts.heartbeat_s in (any_job.heartbeat_s, longest_s, nodes / 1200)
        assert timeouts.lease_recheck_s == 2 * timeouts.heartbeat_s
        assert bool(timeouts.gather_s) == (nodes > 256)

    def test_a_manager_of_thousands_hears_so_many_heartbeats_in_a_second(self) -> None:
        timeouts = Timeouts.derive()
        assert timeouts.of_job(1200).heartbeat_s == 1.0
        assert timeouts.of_job(2400).heartbeat_s == 2.0
        assert timeouts.of_job(8192).heartbeat_s == timeouts.manager_silence_s / 2.5 == 4.0

    def test_a_wrong_order_is_found(self) -> None:
        with pytest.raises(AssertionError):
            dataclasses.replace(Timeouts.derive(), pause_s=1000.0).check()


TIMES = st.one_of(st.floats(0, 100), st.sampled_from([10.0, 20.0]))
MOVES = st.tuples(st.integers(0, 5), st.one_of(st.none(), TIMES))


class TestDeadlines:
    @given(st.lists(st.one_of(MOVES, st.tuples(st.lists(st.integers(0, 5)), TIMES))))
    def test_next_is_the_earliest_of_those_that_are_set(self, moves) -> None:
        table, model = Deadlines(), {}
        for move in moves:
            if isinstance(move[0], list):
                table.set_all(*move)
                model.update(dict.fromkeys(*move))
            elif move[1] is None:
                table.discard(move[0])
                model.pop(move[0], None)
            else:
                table.set(*move)
                model[move[0]] = move[1]
            assert table.next() == min(model.values(), default=None)
            assert set(table.pending()) == set(model)
            assert len(table) == len(model)
            assert set(table.overdue(50)) == {key for key, value in model.items() if value <= 50}
            assert all(key in table for key in model)

    def test_clear_forgets_all(self) -> None:
        table = Deadlines()
        table.set(1, 2.0)
        table.clear()
        assert table.next() is None
        assert not len(table)


class TestLeases:
    def test_a_silent_agent_is_lost_after_the_lease(self) -> None:
        leases = Leases(Timeouts.derive(30))
        leases.renew(0, 0.0)
        leases.renew(1, 10.0)
        assert leases.next_deadline() == 28.0
        assert leases.expired(28.0) == []
        assert leases.next_deadline() == 30.0
        assert leases.expired(30.0) == [0]
        assert not leases.is_held(0)
        assert leases.is_held(1)
        assert leases.silence_s(0, 30.0) == 30.0

    def test_a_manager_that_slept_hears_what_waited_before_it_judges(self) -> None:
        leases = Leases(Timeouts.derive(30))
        leases.renew(0, 0.0)
        assert leases.expired(500.0) == []
        leases.renew(0, 500.1)
        assert leases.expired(502.0) == []

    def test_in_a_large_job_it_waits_for_a_longer_heartbeat(self) -> None:
        leases = Leases(Timeouts.derive(30))
        leases.use(Timeouts.derive(30).of_job(2400))
        leases.renew(0, 0.0)
        assert leases.expired(500.0) == []
        assert leases.expired(503.9) == []
        assert leases.expired(504.0) == [0]

    def test_an_agent_that_left_is_not_missed(self) -> None:
        leases = Leases(Timeouts.derive(30))
        leases.renew(0, 0.0)
        leases.drop(0)
        assert leases.next_deadline() is None

    def test_a_manager_is_deserted_when_a_lease_ends_and_nobody_else_was_heard_for_long(
        self,
    ) -> None:
        leases = Leases(Timeouts.derive(30))
        assert not leases.are_deserted(100.0, 10.0), "it never had an agent"
        leases.renew(0, 0.0)
        leases.renew(1, 3.0)
        assert not leases.are_deserted(28.0, 10.0), "what waited has not been heard yet"
        assert leases.expired(28.0) == []
        assert not leases.are_deserted(29.9, 10.0)
        assert leases.are_deserted(30.0, 10.0)
        leases.renew(1, 21.0)
        assert not leases.are_deserted(30.0, 10.0), "one is there: the other node is lost"


def test_a_record_tells_where_each_rank_has_its_state_from() -> None:
    attempt = Attempt("cause", 0.0)
    attempt.resumed(40, (Move(1, 0), Move(2, snapshot=40)), range(3), redone=3)
    attempt.resumed(40, (Move(1, snapshot=40), Move(2, 1)), range(3), redone=1)
    record = attempt.record(1.0, generation=1, restarts_used=0, max_restarts=3)
    assert record.sources == ((0, "kept"), (1, "snapshot"), (2, "rank 1"))
    assert record.steps_redone == 4


@pytest.mark.parametrize(
    ("status", "kind", "detail"),
    [
        (-9, FaultKind.KILLED, "SIGKILL"),
        (-15, FaultKind.KILLED, "SIGTERM"),
        (-1, FaultKind.KILLED, "SIGHUP"),
        (-2, FaultKind.KILLED, "SIGINT"),
        (-11, FaultKind.CRASHED, "SIGSEGV"),
        (-6, FaultKind.CRASHED, "SIGABRT"),
        (-40, FaultKind.CRASHED, "signal 40"),
        (3, FaultKind.EXITED, "exit 3"),
        (0, FaultKind.EXITED_EARLY, "exit 0 before the job was complete"),
    ],
)
def test_exit_statuses_are_read_as_the_kernel_means_them(status, kind, detail) -> None:
    fault = exit_fault(2, 1, status, version=7, phase="step")
    assert (fault.kind, fault.detail, fault.signature) == (kind, detail, detail)
    assert (fault.rank, fault.incarnation, fault.version, fault.phase, fault.exit_code) == (
        2,
        1,
        7,
        "step",
        status,
    )
