"""What the text of an exception says of the process, by the rules of MindIO TTP. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindio_ttp.names import ReportState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FORCE_STOP = "FORCE STOP"
ARF_FINISH = "ARF FINISH"
_UCE, _MULTI_BIT = "UCE ERROR", "HBM MULTI BIT ECC"
_TEXTS = {
    FORCE_STOP: ReportState.RS_NORMAL,
    ARF_FINISH: ReportState.RS_PREREPAIR_FINISH,
    "STEP FINISH": ReportState.RS_STEP_FINISH,
}
# with enable_uce only
_TEXTS_OF_RETRY = {
    _UCE: ReportState.RS_UCE,
    _MULTI_BIT: ReportState.RS_UCE,
    "HCCL OP RETRY FAILED": ReportState.RS_HCCL_FAILED,
    "SUSPECT REMOTE ERROR": ReportState.RS_HCCL_FAILED,
    "UB LINK ERROR": ReportState.RS_HCCL_FAILED,
    "HCCS LINK ERROR": ReportState.RS_HCCL_FAILED,
}
MEMORY_IS_DAMAGED = frozenset({ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED})


@dataclass(frozen=True)
class Rule:
    """One of the script's own (`tft_register_exception_handler`)."""

    pattern: str
    state: ReportState
    handle: Callable[[str], object]


@dataclass(frozen=True)
class Report:
    """What is known of an exception. `code`: of the device, or what the script's rule answered."""

    state: ReportState
    code: str = ""


def error_time_us(text: str) -> int | None:
    """When the memory failed ("time us=<n>"), if the text says so."""
    found = re.search(r"time us\s*=\s*(\d+)", text)
    return None if found is None else int(found[1])


def tells_of_damage(text: str, rules: Sequence[Rule] = ()) -> bool:
    """Whether a RuntimeError with this text says that the memory of this rank is damaged.

    Whatever is reported of it: neither `enable_uce` nor a rule of the script makes it whole.
    """
    rule = next((rule for rule in rules if rule.pattern in text), None)
    is_said_so = rule is not None and rule.state in MEMORY_IS_DAMAGED
    return is_said_so or _UCE in text or _MULTI_BIT in text


def chain_of(error: BaseException) -> list[BaseException]:
    """The exception and all that it has replaced, the newest first.

    An interrupt may come while a script handles the error of its device; then the error is only
    what the interrupt has behind it.
    """
    chain: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop(0)
        if one is not None and not any(one is other for other in chain):
            chain.append(one)
            waiting += [one.__cause__, one.__context__]
    return chain


def classify(
    text: str,
    *,
    is_uce_enabled: bool,
    can_repair: Callable[[int | None], bool],
    rules: Sequence[Rule] = (),
) -> Report:
    """What a RuntimeError with this text means.

    Args:
        text: of the exception.
        is_uce_enabled: `enable_uce` of the processor.
        can_repair: of the time at which the memory failed, see `mindio_ttp.utils`.
        rules: those of the script, which come first. What they raise is raised.
    """
    for rule in rules:
        if rule.pattern in text:
            return Report(rule.state, str(rule.handle(text) or ""))
    found = re.search(r"device error type\s*(\w+)", text)
    code = "" if found is None else found[1]
    known = _TEXTS | (_TEXTS_OF_RETRY if is_uce_enabled else {})
    for part, state in known.items():
        if part not in text:
            continue
        if part == _MULTI_BIT and not can_repair(error_time_us(text)):
            return Report(ReportState.RS_UCE_CORRUPTED, code)
        return Report(state, code)
    return Report(ReportState.RS_UNKNOWN, code)
