"""Telling a victim from a culprit.

Whether an exception is what the death of somebody else looks like. A victim must not be taken for a
culprit: its exception would count as the script's own. The other way round costs a second, for
which the manager waits for the cause, and a wrong word in the log.
"""

import traceback

from taskd.core.victims import speaks_of_communication
from taskd.worker.exceptions.signature import is_of_library
from taskd.worker.exceptions.text import chain, text_of

_OF_TORCH = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError")
# Whose connections lead to other ranks. All other ones (of a DataLoader to its processes, to where
# data come from) are the script's own.
_BETWEEN_RANKS = ("torch.distributed.", "taskd.transport.")
# In front of the traceback of a process that has no groups; that may name anything.
_IN_LOADER = "in DataLoader worker process"


def is_communication_error(error: BaseException | None) -> bool:
    """True if `error`, or what it was raised from, comes from a broken collective or store."""
    return any(map(_is_broken, chain(error)))


def _is_broken(error: BaseException) -> bool:
    if type(error).__name__ in _OF_TORCH:
        return True
    if isinstance(error, ConnectionError):
        return _is_between_ranks(error)
    if not isinstance(error, RuntimeError):
        return False
    text = text_of(error)
    return speaks_of_communication(text) and _IN_LOADER not in text.partition("\n")[0]


def _is_between_ranks(error: ConnectionError) -> bool:
    """By the libraries that it has come through, up to the script's own code.

    True also where that is not known: it was never raised itself, only named as a cause.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        if not is_of_library(frame.f_code.co_filename):
            return False
        if str(frame.f_globals.get("__name__")).startswith(_BETWEEN_RANKS):
            return True
    return not frames
