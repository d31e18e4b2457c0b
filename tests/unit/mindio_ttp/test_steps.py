"""Steps as a script counts them, rightly and wrongly: a running job is never ended by that."""

import logging

import pytest
from mindio_ttp import framework_ttp as ttp
from mindio_ttp.process import Prepared


def test_a_step_is_begun_and_ended(steps):
    ttp.tft_start_updating_os(0)
    ttp.tft_end_updating_os(1)
    ttp.tft_start_updating_os(1)
    ttp.tft_end_updating_os(2)
    assert steps.calls == ["begin", 1, "begin", 2]


@pytest.mark.parametrize(("calls", "done", "said"), [
    ("s s e1 s e2", ["begin", 1, "begin", 2], "it was called twice"),
    ("s e1 s e1 s e2", ["begin", 1, "begin", 1, "begin", 2], "step 1 has ended behind step 1"),
    ("s e5 s e3", ["begin", 5, "begin", 3], "step 3 has ended behind step 5"),
])  # fmt: skip
def test_steps_that_are_not_in_order_are_counted_all_the_same(steps, caplog, calls, done, said):
    with caplog.at_level(logging.WARNING):
        for call in [*calls.split(), *calls.replace("1", "11").replace("2", "12").split()]:
            if call == "s":
                ttp.tft_start_updating_os()
            else:
                ttp.tft_end_updating_os(int(call[1:]))
    assert steps.calls[: len(done)] == done
    assert [message for message in caplog.messages if said in message] == caplog.messages[:1]
    assert 1 <= len(caplog.records) <= 2


def test_a_step_that_nobody_has_begun_leaves_a_copy_that_is_no_source(steps, record, caplog):
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 11):
            ttp.tft_end_updating_os(number)
    why = "a step ended without tft_start_updating_os"
    assert steps.calls == [("refuse", why), 1, ("refuse", why), 2, ("refuse", why), 11]
    assert record.refusal == why, "so does the next entry, whose first step nobody will begin"
    assert ["step 1 has ended and not begun" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("has_processor", [False, True])
def test_steps_that_nobody_counts_are_named_once(record, caplog, has_processor):
    if has_processor:
        ttp.tft_init_processor(0, 1, False, False)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            ttp.tft_start_updating_os()
            ttp.tft_end_updating_os(step)
    assert len(caplog.records) == 2
    assert all("the step is not counted" in message for message in caplog.messages)
    assert ("no processor" in caplog.messages[0]) is not has_processor


def test_a_replacement_that_begins_a_step_has_prepared_enough(record, caplog):
    record.is_preparing = True
    with caplog.at_level(logging.WARNING), pytest.raises(Prepared):
        ttp.tft_start_updating_os()
    assert "ARF FINISH" in caplog.text


def test_a_processor_that_is_destroyed_in_between_recovers_nothing_more(steps):
    ttp.tft_init_processor(0, 1, False, False)
    ttp.tft_destroy_processor()
    assert steps.calls == [("refuse", "tft_destroy_processor was called")]


def test_a_damaged_memory_that_is_reported_spoils_the_copy(steps, record):
    ttp.tft_report_error(ttp.ReportState.RS_HCCL_FAILED)
    assert record.damage == ""
    ttp.tft_report_error(ttp.ReportState.RS_UCE.value)
    ((what, why),) = steps.calls
    assert what == "spoil"
    assert "RS_UCE" in why
    assert record.damage == why


def test_an_error_code_changes_nothing_and_is_logged(steps, record, caplog):
    with caplog.at_level(logging.INFO):
        ttp.tft_report_error(ttp.ReportState.RS_HCCL_FAILED, "AB12")
        ttp.tft_report_error(ttp.ReportState.RS_UCE, error_code="507053")
    assert [name for name, _ in steps.calls] == ["spoil"]
    assert "RS_HCCL_FAILED" in caplog.messages[0]
    assert "AB12" in caplog.messages[0]
    assert "507053" in caplog.messages[1]


def test_one_that_is_reported_where_no_step_is_counted_is_not_forgotten(record):
    ttp.tft_report_error(ttp.ReportState.RS_UCE_CORRUPTED)
    assert "RS_UCE_CORRUPTED" in record.damage
