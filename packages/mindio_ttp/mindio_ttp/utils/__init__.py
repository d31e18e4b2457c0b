"""When the optimizer has written, by the clock of the device; what that says of a memory fault."""

import logging

from mindio_ttp import process

log = logging.getLogger(__name__)

__all__ = ["tft_can_do_uce_repair", "tft_set_update_end_time", "tft_set_update_start_time"]

_times: dict[str, int | None] = {"start": None, "end": None}


def tft_set_update_start_time(start_time: int | None = None) -> None:
    """Note when the optimizer began to write, by the clock of the device."""
    _times["start"] = start_time


def tft_set_update_end_time(end_time: int | None = None) -> None:
    """Note when it had written."""
    _times["end"] = end_time


def tft_can_do_uce_repair(
    hbm_error_time: int, start_time: int | None = None, end_time: int | None = None
) -> bool:
    """Whether the state can be repaired after the memory failed at this time.

    All times are of the device; without arguments those that were noted. It can if the fault lies
    behind the update, or between its beginning and its end; not without times, nor before the first
    step.
    """
    start = _times["start"] if start_time is None else start_time
    end = _times["end"] if end_time is None else end_time
    state = process.current().state
    if start is None or end is None or state is None or state.step == 0:
        log.info("whether the memory can be repaired is not known: times %s, %s", start, end)
        return False
    return hbm_error_time > end or start <= hbm_error_time <= end
