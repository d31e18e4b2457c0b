"""Telling a victim from a culprit.

Whether an exception is what the death of somebody else looks like.
"""

from taskd.core.victims import speaks_of_communication
from taskd.worker.exceptions.text import chain, text_of


def is_communication_error(error: BaseException | None) -> bool:
    """True if `error`, or what it was raised from, comes from a broken collective or store."""
    for found in chain(error):
        if type(found).__name__ in (
            "DistBackendError",
            "DistNetworkError",
            "DistStoreError",
            "DistQueueEmptyError",
        ):
            return True
        if isinstance(found, ConnectionError):
            return True
        if isinstance(found, RuntimeError) and speaks_of_communication(text_of(found)):
            return True
    return False
