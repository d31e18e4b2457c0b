"""Entries of the decorated function in one process: who is called before it, and behind it."""

import logging
import threading

import pytest
import torch
from mindio_ttp import framework_ttp as ttp
from mindio_ttp import process
from mindio_ttp.training import Training

from taskd.core.commands import Move
from taskd.errors import Interrupted
from taskd.native.black_box import Phase
from taskd.worker.restore import exchange
from taskd.worker.restore.manifest import Manifest
from tests.unit.mindio_ttp.entries import REGISTER, enter, fail, start, steps


def test_the_handlers_are_called_in_their_order_with_what_they_are_promised(job, called):
    start()
    training = Training(steps(1, 2, then=Interrupted("a fault")), ["args"], {})
    error, report = enter(job, training)
    assert isinstance(error, Interrupted)
    assert (report.version, report.clean) == (2, True)
    assert called == [
        ("stop", ["args"], "ctx of stop"), ("clean", False, ["args"], "ctx of clean"),
    ]  # fmt: skip
    called.clear()
    job.resume(2)
    training._func = steps(3)
    result, report = enter(job, training)
    assert (result, report.version) == ("args", 3)
    assert called == [
        ("rebuild", [], ["args"], "ctx of rebuild"),
        ("rollback", 2, ["args"], "ctx of rollback"),
    ]  # fmt: skip
    assert (ttp.tft_get_repair_step(), ttp.tft_get_repair_type()) == (2, "retry")
    assert process.current().state is None, "behind the function no step is counted"


def test_each_handler_is_told_of_the_present_recovery_and_of_no_other(job, monkeypatch):
    start()
    told = []
    for name, register in REGISTER.items():
        register(lambda *_, name=name: told.append(
            (name, ttp.tft_get_repair_type(), ttp.tft_get_repair_step())
        ))  # fmt: skip
    monkeypatch.setattr(exchange, "receive", lambda *_: Manifest(0, is_present=True))
    training = Training(steps(5, then=RuntimeError("UCE ERROR")), [0], {})
    enter(job, training)
    training._func = steps(6, then=Interrupted("a fault"))
    job.resume(5, {0: Move(0, source=1)})
    enter(job, training)
    nothing = [("stop", "unknow", 0), ("clean", "unknow", 0)]
    # it receives, and all processes are those that were there before
    repaired = [(name, "retry", 5) for name in ("rebuild", "repair", "rollback")]
    assert told == nothing + repaired + nothing


def test_a_replacement_that_receives_makes_it_a_recovery_of_its_kind(job, monkeypatch):
    replacement(job, asks=False)
    types = []
    ttp.tft_register_rebuild_group_handler(lambda *_: types.append(ttp.tft_get_repair_type()))
    ttp.tft_register_repair_handler(lambda *_: None)
    monkeypatch.setattr(exchange, "receive", lambda *_: Manifest(0, is_present=True))
    training = Training(steps(3, then=Interrupted("a fault")), [0], {})
    for version in (2, 3):
        job.resume(version, {0: Move(0, source=1)})
        enter(job, training)
    assert types == ["recover", "retry"]


def test_a_rollback_that_takes_long_is_not_taken_for_a_step_that_hangs(job, called):
    start()
    training = Training(steps(1, then=Interrupted("a fault")), [0], {})
    enter(job, training)
    phases = []
    ttp.tft_register_rollback_handler(lambda *_: phases.append(job.life.box.phase))
    training._func = lambda _: phases.append(job.life.box.phase)
    job.resume(1)
    enter(job, training)
    assert phases == [Phase.ENTERED, Phase.STEP]


def test_handlers_may_exchange_what_the_function_is_called_with(job, called):
    start()
    training = Training(steps(1, then=Interrupted("a fault")), ["old"], {})
    enter(job, training)
    job.resume(1)
    ttp.tft_register_rollback_handler(lambda _step, args, _ctx: args.__setitem__(0, "new"))
    training._func = steps()
    assert enter(job, training)[0] == "new"


def test_interrupts_wait_while_a_clean_handler_runs(job, record):
    start()
    held = []
    ttp.tft_register_clean_handler(lambda *_: held.append(job.life.interrupts.is_held))
    enter(job, Training(steps(then=Interrupted("a fault")), [0], {}))
    assert held == [True]
    assert job.life.interrupts.is_held is False


@pytest.mark.parametrize(("text", "answer", "is_clean", "is_uce"), [
    ("UCE ERROR", 0, False, True),
    ("UCE ERROR", None, False, True),
    ("UCE ERROR", 2, True, True),  # the handler has made it whole
    ("HCCL OP RETRY FAILED", 0, True, False),
    ("anything else", 0, True, False),
])  # fmt: skip
def test_a_damaged_memory_is_no_copy_unless_it_was_made_whole(
    job, record, text, answer, is_clean, is_uce
):
    start()
    told = []
    ttp.tft_register_clean_handler(lambda *given: told.append(given[0]) or answer)
    _, report = enter(job, Training(steps(4, then=RuntimeError(text)), [0], {}))
    assert (report.version, report.clean) == (4, is_clean)
    assert told == [is_uce]


def test_without_enable_uce_a_damaged_memory_is_reported_as_unknown_and_is_no_copy(
    job, record, caplog
):
    start(enable_uce=False)
    told = []
    ttp.tft_register_clean_handler(lambda *given: told.append(given[0]))
    with caplog.at_level(logging.INFO):
        _, report = enter(job, Training(steps(4, then=RuntimeError("UCE ERROR")), [0], {}))
    assert (report.version, report.clean, told) == (4, False, [True])
    assert "UCE ERROR: RS_UNKNOWN" in caplog.text


@pytest.mark.parametrize("clean", [lambda *_: 1, fail])
def test_a_process_that_cannot_be_cleaned_ends(job, record, caplog, clean):
    start()
    ttp.tft_register_clean_handler(clean)
    error, _ = enter(job, Training(steps(1, then=Interrupted("a fault")), [0], {}))
    assert isinstance(error, SystemExit)
    assert error.code == 1
    assert "to be replaced" in caplog.text


def test_a_process_that_cannot_be_cleaned_ends_with_the_error_of_its_script_in_the_log(
    job, record, caplog
):
    """Else nobody would hear of it: the process ends before it can tell the manager."""
    start()
    ttp.tft_register_clean_handler(lambda *_: 1)

    def train(_args):
        raise ValueError("a bad sample")

    error, _ = enter(job, Training(train, [0], {}))
    assert isinstance(error, SystemExit)
    assert "ValueError: a bad sample" in caplog.text
    assert "in train" in caplog.text


def test_a_stop_handler_that_fails_is_said_and_the_step_is_left_all_the_same(job, record, caplog):
    start()
    ttp.tft_register_stop_handler(fail)
    error, report = enter(job, Training(steps(1, then=Interrupted("a fault")), [0], {}))
    assert isinstance(error, Interrupted)
    assert report.clean
    assert "the stop handler has failed" in caplog.text


class TestAStopHandlerInAThread:
    """taskd calls it where the main thread may wait for its device."""

    def test_what_it_has_stopped_is_cleaned_when_it_has_returned(self, job, record):
        start()
        order, is_in, may_go = [], threading.Event(), threading.Event()

        def stop(*_):
            is_in.set()
            order.append("stopped" if may_go.wait(60) else "never")

        ttp.tft_register_stop_handler(stop)
        ttp.tft_register_clean_handler(lambda *_: order.append("clean"))
        threads = []

        def train(_args):
            threads.append(threading.Thread(target=job.life.stop_device))
            threads[0].start()
            assert is_in.wait(60)
            raise Interrupted("a fault")

        training = Training(train, [0], {})

        class Waited:
            """The lock, which says when the main thread waits for it."""

            def __init__(self, lock):
                self.lock = lock

            def __enter__(self):
                if threading.current_thread() is threading.main_thread():
                    may_go.set()
                return self.lock.__enter__()

            def __exit__(self, *what):
                return self.lock.__exit__(*what)

        training._stopping = Waited(training._stopping)
        enter(job, training)
        threads[0].join(60)
        assert order == ["stopped", "clean"]

    def test_one_that_comes_when_the_next_entry_has_begun_stops_nothing(self, job, called):
        start()
        training = Training(steps(1, then=Interrupted("a fault")), [0], {})
        enter(job, training)
        late = job.life.stop_device
        called.clear()
        training._func = lambda _: late()
        job.resume(1)
        enter(job, training)
        assert [name for name, *_ in called] == ["rebuild", "rollback"]

    def test_it_has_the_device_of_the_process(self, job, record, monkeypatch):
        used = []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        # A build of torch with CUDA asks its driver, which need not be there.
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(
            torch.cuda, "set_device", lambda number: used.append((number, threading.get_ident()))
        )
        start()
        assert ttp.ttp_decorator.get_device() == 3

        def train(_args):
            thread = threading.Thread(target=job.life.stop_device)
            thread.start()
            thread.join(60)
            assert used == [(3, thread.ident)]
            return "done"

        ttp.tft_register_stop_handler(lambda *_: used.append(3) if not used else None)
        assert enter(job, Training(train, [0], {}))[0] == "done"


def test_on_a_processor_there_is_no_device(job, record):
    start()
    assert process.current().devices == {}
    assert ttp.ttp_decorator.get_device() is None


def test_an_exception_of_the_scripts_own_rule_is_reported_to_it(job, record):
    start()
    told = []
    ttp.tft_register_exception_handler("PRECISION", "RS_UCE", lambda text: told.append(text) or "7")
    _, report = enter(job, Training(steps(1, then=RuntimeError("PRECISION ERROR")), [0], {}))
    assert told == ["PRECISION ERROR"]
    assert not report.clean


# ---------------------------------------------------------------------- a damaged memory


def test_a_rule_that_fails_makes_the_report_unknown_and_the_memory_no_better(job, called, caplog):
    start()
    ttp.tft_register_exception_handler("PRECISION", "RS_UCE", fail)
    _, report = enter(job, Training(steps(1, then=RuntimeError("PRECISION ERROR")), [0], {}))
    assert (report.version, report.clean) == (1, False)
    assert [name for name, *_ in called] == ["stop", "clean"]
    assert "a rule of the script (tft_register_exception_handler) has failed" in caplog.text


def replaced_by(interrupt):
    """As an interrupt that comes while the script handles the error of its device."""

    def train(_args):
        steps(1)(0)
        try:
            raise RuntimeError("UCE ERROR")
        finally:
            raise interrupt

    return train


@pytest.mark.parametrize("interrupt", [Interrupted("a fault elsewhere"), SystemExit(1)])
def test_a_memory_fault_that_another_exception_has_replaced_is_none_the_less_one(job, interrupt):
    start()
    error, report = enter(job, Training(replaced_by(interrupt), [0], {}))
    assert error is interrupt
    assert (report.version, report.clean) == (1, False)


def test_an_interrupt_before_interrupts_are_held_off_skips_nothing(job, called, monkeypatch):
    start()
    interrupts = [Interrupted("a fault elsewhere")]

    def hold(life):
        if interrupts:
            raise interrupts.pop()
        life.interrupts.is_held = True

    monkeypatch.setattr("mindio_ttp.training.hold_interrupts", hold)
    error, report = enter(job, Training(steps(1, then=RuntimeError("UCE ERROR")), [0], {}))
    assert isinstance(error, Interrupted)
    assert [name for name, *_ in called] == ["stop", "clean"]
    assert (report.version, report.clean) == (1, False)


def report_and_go_on(_args):
    steps(1)(0)
    ttp.tft_report_error(ttp.ReportState.RS_UCE)
    steps(2)(0)
    raise Interrupted("a fault elsewhere")


def test_a_damage_that_was_reported_is_whole_again_when_all_has_been_received(
    job, called, monkeypatch
):
    """A step that is finished meanwhile does not mend it, and a plan that keeps it is refused."""
    start()
    training = Training(report_and_go_on, [0], {})
    _, report = enter(job, training)
    assert (report.version, report.clean) == (2, False)
    training._func = steps(3)
    job.resume(2)
    error, report = enter(job, training)
    assert "is not to receive" in str(error)
    assert (report.version, report.clean) == (2, False)
    monkeypatch.setattr(exchange, "receive", lambda *_: Manifest(0, is_present=True))
    job.life.job_size = job.life.world_size = 1
    job.resume(2, {0: Move(0, source=1)})
    called.clear()
    _, report = enter(job, training)
    (told,) = [given for name, *given in called if name == "repair"]
    assert told[1] is True
    assert told[3]["repair_type"] == ttp.RepairType.RT_UCE_HIGHLEVEL
    assert (report.version, report.clean, process.current().damage) == (3, True, "")


# ---------------------------------------------------------------------- a replacement


def replacement(job, *, asks):
    """The successor of a process that had finished two steps."""
    start()
    enter(job, Training(steps(1, 2, then=Interrupted("a fault")), [0], {}))
    record = process.reset()
    job.replace()
    job.life.is_replacement = True
    start()
    if asks:
        record.is_replacement = record.has_asked = True
    return record


@pytest.mark.parametrize("how", ["ARF FINISH", "a step"])
def test_a_replacement_prepares_itself_before_it_is_repaired(job, how):
    record = replacement(job, asks=True)
    order = []
    ttp.tft_register_rebuild_group_handler(lambda *_: order.append("rebuild"))

    def train():
        order.append("train")
        if how == "ARF FINISH" and len(order) == 1:
            raise RuntimeError("ARF FINISH")
        ttp.tft_start_updating_os()
        ttp.tft_end_updating_os(3)

    job.resume(2)
    _, report = enter(job, Training(train, [], {}))
    assert order == ["train", "rebuild", "train"]
    assert report.version == 3
    assert not record.is_preparing


def test_one_that_has_not_asked_is_repaired_at_once(job):
    replacement(job, asks=False)
    order = []
    ttp.tft_register_rebuild_group_handler(lambda *_: order.append("rebuild"))
    job.resume(2)
    enter(job, Training(lambda: order.append("train"), [], {}))
    assert order == ["rebuild", "train"]


def test_what_it_raises_while_it_prepares_is_raised(job):
    replacement(job, asks=True)
    job.resume(2)
    error, _ = enter(job, Training(fail, [], {}))
    assert isinstance(error, OSError)


def test_a_function_that_goes_on_saying_that_it_is_new_is_told(job, caplog):
    start()
    with caplog.at_level(logging.WARNING):
        error, _ = enter(job, Training(steps(1, then=RuntimeError("ARF FINISH")), [0], {}))
    assert "ARF FINISH" in str(error)
    assert "the rebuild handler is to take back" in caplog.text
