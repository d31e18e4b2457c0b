"""The environment variables that are read here, with the ranges that are documented for them."""

import os

from mindio_ttp.notices import warn_once

_LIMIT_ENV = "TTP_NORMAL_ACTION_TIME_LIMIT"
_LIMIT_S, _LIMITS_S = 180, (30, 1800)


def action_limit_s() -> int:
    """TTP_NORMAL_ACTION_TIME_LIMIT: for a rebuild, repair or rollback handler, in seconds."""
    text = os.environ.get(_LIMIT_ENV, str(_LIMIT_S))
    low, high = _LIMITS_S
    if text.isdecimal() and low <= int(text) <= high:
        return int(text)
    warn_once(_LIMIT_ENV, f"is a number of seconds from {low} to {high}, not {text!r}: {_LIMIT_S}")
    return _LIMIT_S


def is_for_mindspore() -> bool:
    """MINDIO_FOR_MINDSPORE: the rename handler is told its context, and not the arguments."""
    return os.environ.get("MINDIO_FOR_MINDSPORE", "").lower() in {"true", "1"}
