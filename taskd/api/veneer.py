"""What the documented functions have in common.

Exceptions become False and a log line; settings that nobody reads are named.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, ParamSpec

from taskd.config import unknown
from taskd.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


def warn_of_unknown_keys(
    function: str, config: Mapping[str, object] | None, known: tuple[str, ...]
) -> None:
    """One line for each key of `config` that has no effect and was probably meant to have one."""
    for key, near in unknown(config, known):
        log.warning(
            "%s: %r is no setting of it and has no effect%s",
            function,
            key,
            f": did you mean {near}?" if near else f"; it knows {', '.join(known)}",
        )
