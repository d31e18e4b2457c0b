"""Entries of the decorated function that are not repaired: why, and who is told."""

import logging

import pytest
import torch.distributed as dist
from job import Job
from mindio_ttp import framework_ttp as ttp
from mindio_ttp import process
from mindio_ttp.training import Training

from taskd.core.commands import Move
from taskd.errors import IncurableError, Interrupted
from tests.unit.mindio_ttp.entries import enter, fail, start, steps


def no_processor():
    ttp.tft_set_optimizer_replica(0, [{"rank_list": [0], "replica_cnt": 1, "replica_shift": 0}])


def no_replicas():
    start()
    process.current().replicas = None


@pytest.mark.parametrize(("prepare", "why"), [
    (no_processor, "rank 0 has no processor"),
    (lambda: start(1, 2), "was told rank 1 of 2, and this is rank 0 of 1"),
    (no_replicas, "rank 0 has not declared its replicas"),
    (lambda: (start(), ttp.tft_set_optimizer_replica(
        0, [{"rank_list": [0, 1], "replica_cnt": 2, "replica_shift": 0}])),
     "rank 1 is in its rank_list"),
])  # fmt: skip
def test_training_goes_on_and_its_copy_is_none(job, caplog, prepare, why):
    prepare()
    with caplog.at_level(logging.WARNING):
        result, report = enter(job, Training(steps(1, 2), ["done"], {}))
    assert result == "done"
    assert why in caplog.text
    assert (report.version, report.clean) == (2, False)
    assert why in report.reason


def test_a_copy_that_an_interrupt_could_meet_half_written_is_none(job):
    """Nobody says when the optimizer begins to write, so nothing holds interrupts off then."""
    start()

    def train(_args):
        ttp.tft_end_updating_os(1)
        raise Interrupted("a fault in the middle of the next optimizer.step()")

    training = Training(train, [0], {})
    _, report = enter(job, training)
    assert (report.version, report.clean) == (1, False)
    assert "tft_start_updating_os" in report.reason
    training._func = steps(2, then=Interrupted("a fault"))
    job.resume(1)
    _, report = enter(job, training)
    assert (report.version, report.clean) == (2, False), "the script is still the same"


def test_a_decorated_function_before_init_process_group_is_not_recovered(record, caplog):
    job = Job(world_size=2)
    try:
        job.resume(None)
        start(0, 2)
        assert not dist.is_initialized()
        with caplog.at_level(logging.WARNING):
            result, report = enter(job, Training(steps(1), ["done"], {}))
        assert (result, report.clean) == ("done", False)
        assert "before init_process_group()" in caplog.text
    finally:
        job.close()


def test_ranks_that_have_no_decorator_are_not_waited_for_for_ever(record, caplog, monkeypatch):
    monkeypatch.setattr("mindio_ttp.settings.action_limit_s", lambda: 0.2)
    job = Job(world_size=2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job.resume(None)
        start(0, 2)
        with caplog.at_level(logging.WARNING):
            result, report = enter(job, Training(lambda: "done", [], {}))
        assert (result, report.clean) == ("done", False)
        assert "not every rank has entered the decorated function: rank 0 has waited" in caplog.text
    finally:
        job.close()
        dist.destroy_process_group()


@pytest.mark.parametrize("can_save", [True, False])
def test_without_a_repair_handler_a_fault_that_needs_it_is_not_repaired(job, record, can_save):
    """What is held stays whole for a dump; without a save handler there is none to be tried."""
    start()
    if can_save:
        ttp.tft_register_save_ckpt_handler(print)
    training = Training(steps(1, then=Interrupted("a fault")), [0], {})
    enter(job, training)
    job.resume(1, {0: Move(0), 1: Move(1, source=0)})
    error, report = enter(job, training)
    assert "no repair handler" in str(error)
    assert isinstance(error, IncurableError)
    assert (report.version, report.clean) == (1, can_save)


def test_a_smaller_world_is_not_gone_on_with(job, called):
    start()
    training = Training(steps(1, then=Interrupted("a fault")), [0], {})
    enter(job, training)
    job.resume(1)
    job.life.active = (0,)
    error, report = enter(job, training)
    assert "the world has become smaller" in str(error)
    assert isinstance(error, IncurableError)
    assert report.version == 1


@pytest.mark.parametrize("handler", ["rebuild", "rollback"])
def test_handlers_that_fail_are_given_up_after_the_second_time(job, called, handler):
    start()
    training = Training(steps(1, then=Interrupted("a fault")), [0], {})
    enter(job, training)
    process.current().handlers.register(handler, fail, None)
    for _ in range(2):
        job.resume(1)
        error, report = enter(job, training)
        assert isinstance(error, OSError)
        assert (report.version, report.clean) == (1, True)
    job.resume(1)
    error, report = enter(job, training)
    assert "2 recoveries have not come to their end" in str(error)
    assert isinstance(error, IncurableError)
    assert report.version == 1


def test_what_fails_before_any_handler_speaks_against_none(job, called, monkeypatch):
    start()
    training = Training(steps(1, then=Interrupted("a fault")), [0], {})
    enter(job, training)
    for _ in range(4):
        job.resume(1)
        with monkeypatch.context() as patched:
            patched.setattr("mindio_ttp.training.ask_all", fail)
            error, _ = enter(job, training)
        assert isinstance(error, OSError)
    training._func = steps(2)
    job.resume(1)
    assert enter(job, training)[1].version == 2


@pytest.mark.parametrize(("version", "limit_s"), [(None, 50), (1, None)])
def test_replacements_have_the_time_of_a_start(job, called, monkeypatch, version, limit_s):
    """TTP_NORMAL_ACTION_TIME_LIMIT is that of a handler. They build their models meanwhile."""
    monkeypatch.setenv("TTP_NORMAL_ACTION_TIME_LIMIT", "50")
    start()
    training = Training(steps(1, then=Interrupted("a fault")), [0], {})
    if version is not None:
        enter(job, training)
    limits = []
    monkeypatch.setattr(
        "mindio_ttp.training.ask_all", lambda *_, within_s: fail(limits.append(within_s))
    )
    job.resume(version)
    enter(job, training)
    assert limits == [limit_s]


def test_a_fault_that_meets_a_handler_stops_and_cleans_as_well(job, called):
    start()
    training = Training(steps(1, then=Interrupted("a fault")), [0], {})
    enter(job, training)

    def interrupted(*_):
        raise Interrupted("another fault")

    process.current().handlers.register("rebuild", interrupted, None)
    called.clear()
    job.resume(1)
    _, report = enter(job, training)
    assert [name for name, *_ in called] == ["stop", "clean"]
    assert (report.version, report.clean) == (1, True)


def test_a_recovery_that_comes_to_its_end_is_forgiven(job, called):
    start()
    training = Training(steps(1, then=Interrupted("a fault")), [0], {})
    enter(job, training)
    for step in range(2, 8):
        training._func = steps(step, then=Interrupted("a fault"))
        job.resume(step - 1)
        error, report = enter(job, training)
        assert isinstance(error, Interrupted)
        assert (report.version, report.clean) == (step, True)
