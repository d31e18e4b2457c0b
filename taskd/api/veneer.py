"""Turns exceptions into False and a log line, as the documented functions promise."""

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec

from taskd.errors import ConfigError, TransportError

log = logging.getLogger(__name__)

P = ParamSpec("P")


def as_bool(function: Callable[P, bool]) -> Callable[P, bool]:
    """`function` with its exceptions as False.

    What a user can correct costs one line, anything else a traceback.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> bool:
        try:
            return function(*args, **kwargs)
        except (ConfigError, TransportError) as error:
            log.error("%s: %s", function.__name__, error)
        except Exception:
            # The veneer: the documented functions never raise.
            log.exception("%s failed", function.__name__)
        return False

    return wrapped
