"""What is printed for the user, where stdout or stderr may be closed, or read by nobody any more.

A line that nobody can read is no error.
"""

from __future__ import annotations

import sys
from contextlib import suppress


def tell(text: str) -> None:
    """To stderr. Lines have their ends."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()


def flush() -> None:
    """What was printed goes out before a fork, which would print it again, or before `os._exit`."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
