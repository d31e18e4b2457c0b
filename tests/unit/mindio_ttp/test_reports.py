"""What the text of an exception says of the process."""

import pytest
from mindio_ttp.names import ReportState
from mindio_ttp.reports import Report, Rule, chain_of, classify, tells_of_damage


def state_of(text, *, is_uce_enabled=True, can_repair=lambda _: True, rules=()):
    return classify(
        text, is_uce_enabled=is_uce_enabled, can_repair=can_repair, rules=rules
    ).state.name


@pytest.mark.parametrize(("text", "with_uce", "without"), [
    ("rank 3: FORCE STOP.", "RS_NORMAL", "RS_NORMAL"),
    ("ARF FINISH", "RS_PREREPAIR_FINISH", "RS_PREREPAIR_FINISH"),
    ("STEP FINISH", "RS_STEP_FINISH", "RS_STEP_FINISH"),
    ("UCE ERROR at 0x12", "RS_UCE", "RS_UNKNOWN"),
    ("HBM MULTI BIT ECC, time us=17", "RS_UCE", "RS_UNKNOWN"),
    ("HCCL OP RETRY FAILED", "RS_HCCL_FAILED", "RS_UNKNOWN"),
    ("SUSPECT REMOTE ERROR", "RS_HCCL_FAILED", "RS_UNKNOWN"),
    ("UB LINK ERROR", "RS_HCCL_FAILED", "RS_UNKNOWN"),
    ("HCCS LINK ERROR", "RS_HCCL_FAILED", "RS_UNKNOWN"),
    ("force stop", "RS_UNKNOWN", "RS_UNKNOWN"),
    ("", "RS_UNKNOWN", "RS_UNKNOWN"),
])  # fmt: skip
def test_the_documented_texts(text, with_uce, without):
    assert state_of(text) == with_uce
    assert state_of(text, is_uce_enabled=False) == without


def test_memory_is_damaged_for_good_where_the_time_says_so():
    asked = []

    def cannot(time_us):
        asked.append(time_us)
        return False

    assert state_of("HBM MULTI BIT ECC, time us=17.", can_repair=cannot) == "RS_UCE_CORRUPTED"
    assert state_of("HBM MULTI BIT ECC", can_repair=cannot) == "RS_UCE_CORRUPTED"
    assert asked == [17, None]


@pytest.mark.parametrize(("text", "is_damaged"), [
    ("UCE ERROR at 0x12", True), ("HBM MULTI BIT ECC, time us=17", True), ("PRECISION", True),
    ("LINK", False), ("LINK, UCE ERROR", True),  # whatever the script makes of it
    ("HCCL OP RETRY FAILED", False), ("FORCE STOP", False), ("", False),
])  # fmt: skip
def test_a_memory_is_damaged_whatever_is_reported_of_it(text, is_damaged):
    def fail(_text):
        raise OSError("a rule of the script has failed")

    rules = [Rule("PRECISION", ReportState.RS_UCE, fail), Rule("LINK", ReportState.RS_RETRY, fail)]
    assert tells_of_damage(text, rules) is is_damaged


def test_the_chain_of_an_exception_has_all_that_it_has_replaced():
    cause, replaced, last = OSError("cause"), RuntimeError("UCE ERROR"), ValueError("last")
    last.__context__, last.__cause__ = replaced, cause
    replaced.__context__ = last  # a circle, which python itself does not make
    assert chain_of(last) == [last, cause, replaced]


def test_the_code_of_the_device_and_the_rules_of_the_script():
    assert classify(
        "UCE ERROR, device error type 507053.", is_uce_enabled=True, can_repair=bool
    ) == Report(ReportState.RS_UCE, "507053")
    rules = [Rule("PRECISION", ReportState.RS_RETRY, lambda text: text[:4])]
    report = classify(
        "PRECISION ERROR, FORCE STOP", is_uce_enabled=True, can_repair=bool, rules=rules
    )
    assert report == Report(ReportState.RS_RETRY, "PREC")
    assert state_of("FORCE STOP", rules=rules) == "RS_NORMAL"
