"""What a script reports of itself, and asks of its recovery."""

from __future__ import annotations

import logging

from mindio_ttp import process
from mindio_ttp.arguments import MAX_STEP, whole_number
from mindio_ttp.names import Action, ReportState
from mindio_ttp.notices import warn_once
from mindio_ttp.reports import MEMORY_IS_DAMAGED

log = logging.getLogger(__name__)


def tft_is_reboot_node() -> bool:
    """Whether this process takes the place of one that died, in a job that goes on.

    Then the decorated function is run up to RuntimeError("ARF FINISH") before the state comes, and
    again behind that. True once.
    """
    record = process.current()
    if record.has_asked or record.state is not None:
        return False
    record.is_replacement = record.has_asked = _is_replacement()
    return record.is_replacement


def _is_replacement() -> bool:
    try:
        from taskd.worker.life import current  # noqa: PLC0415
        from taskd.worker.process import runtime  # noqa: PLC0415
    except ImportError:  # no torch: no training process
        return False
    life, present = current(), runtime.current()
    if life is None or present is None or not life.is_replacement:
        return False
    # behind the gate it is known whether there is anything to be repaired
    return present.orders.must_gate or life.plan.version is not None


def tft_get_reboot_type() -> str:
    """Return "arf": there is no hot switch."""
    return "arf"


def tft_get_repair_step() -> int:
    """The step from which the newest recovery goes on, or that is saved; 0: none."""
    return process.current().repair_step


def tft_get_repair_type() -> str:
    """Return "retry" (all processes are kept), "recover", "dump", or "unknow"."""
    return process.current().repair_type


def tft_report_error(error_type: ReportState | int, error_code: str = "") -> None:
    """A damaged memory is noted: in the next recovery this rank receives its state from another.

    Whatever else went wrong is seen by taskd when the exception leaves the decorated function.
    `error_code` is logged, and has no other effect.

    Raises:
        ValueError: no ReportState.
    """
    record, reported = process.current(), ReportState(error_type)
    if error_code:
        log.info("the script reports %s, code %s", reported.name, error_code)
    if reported not in MEMORY_IS_DAMAGED:
        return
    record.damage = f"{reported.name}: reported by the script"
    if record.state is not None:
        record.state.spoil(record.damage)


def tft_wait_next_action() -> int:
    """1 (EXIT): outside the decorator there is nothing to wait for."""
    warn_once(
        "tft_wait_next_action",
        "only tft_exception_handler can enter the training again: let the exception pass to it",
    )
    return int(Action.EXIT)


def tft_report_load_ckpt_step(step: int) -> None:
    """Nothing is repaired from a periodic checkpoint, so nothing is done with it.

    Raises:
        ValueError: `step` is negative, or no number.
    """
    whole_number("step", step, 0, MAX_STEP)
    warn_once(
        "tft_report_load_ckpt_step",
        "a state that no process holds is not repaired: all processes start anew, and load it",
    )


def tft_reset_limit_step() -> None:
    """Nothing to be done: a step is not locked."""
