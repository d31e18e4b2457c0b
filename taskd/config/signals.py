"""Which signals TaskD takes in training processes."""

import os
import re
import signal

from taskd.config.names import INTERRUPT_SIGNAL_ENV
from taskd.config.values import Environment, refusal
from taskd.errors import ConfigError

_DEFAULT = 9  # beyond SIGRTMIN: debuggers and C libraries use the lowest ones
_FIRST, _LAST = 4, 25  # room below for the stacks, and above for a signal that is taken already
_NAMED = re.compile(r"(?:SIGRTMIN\+)?(\d{1,2})", re.ASCII)


def interrupt_signal(environment: Environment = os.environ) -> int:
    """The first that is tried to interrupt a main thread; for stacks the search goes down from it.

    Raises ConfigError.
    """
    text = environment.get(INTERRUPT_SIGNAL_ENV)
    if not text:
        return signal.SIGRTMIN + _DEFAULT
    lowest, highest = signal.SIGRTMIN + _FIRST, signal.SIGRTMIN + _LAST
    named = _NAMED.fullmatch(text.strip())
    number = 0 if named is None else int(named[1])
    number += signal.SIGRTMIN if text.strip().startswith("SIGRTMIN") else 0
    if not lowest <= number <= highest:
        raise refusal(
            INTERRUPT_SIGNAL_ENV,
            text,
            f"SIGRTMIN+{_FIRST} to SIGRTMIN+{_LAST}, or its number ({lowest} to {highest})",
        )
    return number


def usable_interrupt_signal() -> int:
    """The same in a training process, where a value that means nothing was refused by its agent."""
    try:
        return interrupt_signal()
    except ConfigError:
        return signal.SIGRTMIN + _DEFAULT
