"""Connections without a name server (csrc/imports/names.c says why).

torch's store asks for the name of the other side of each connection, for its log; where no resolver
answers that takes as long as the resolver's timeouts. Knows no stores: one call per process, once
torch is loaded.
"""

import logging
import sys
from functools import cache

from taskd.config.names import NUMERIC_NAMES_ENV
from taskd.config.native import are_numeric_names_off
from taskd.errors import NativeLibraryError
from taskd.native import library

log = logging.getLogger(__name__)

_TORCH_LIBRARY = "libtorch_cpu.so"


def use_numeric_names() -> bool:
    """Let torch's connections be described by numbers from now on. Whether they are."""
    return _settle()[0]


def tell_names() -> None:
    """Say in the log how torch's connections are described, where that was asked for.

    For an agent, whose log is set up only when torch has connected already.
    """
    is_numeric, reason = _settle()
    if is_numeric:
        log.info("torch's connections name their peers by number, no name server is asked")
    elif are_numeric_names_off():
        log.info("torch looks up the names of its peers: %s is off", NUMERIC_NAMES_ENV)
    elif reason:
        log.warning(
            "torch looks up the names of its peers (%s): without a name server that takes seconds "
            "for each connection",
            reason,
        )


@cache
def _settle() -> tuple[bool, str]:
    """Whether they are by number, and if libtaskd cannot do it, the reason."""
    binding = library.load() if "torch" in sys.modules and not are_numeric_names_off() else None
    if binding is None:
        return False, ""
    try:
        binding.names_numeric(_TORCH_LIBRARY)
    except NativeLibraryError as error:
        return False, str(error)
    return True, ""
