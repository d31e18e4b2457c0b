"""Telling a victim from a culprit.

Whether an exception is what the death of somebody else looks like.
"""

from taskd.worker.exceptions.text import chain, text_of

# What gloo, NCCL, HCCL and TCPStore say when a peer is gone (torch 2.13). Lower case; any one is
# enough.
_COMMUNICATION_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "gloo",
    "nccl",
    "hccl",
    "tcpstore",
    "failed to recv",
    "failed to send",
    "timed out waiting",
    "application timeout",
    "connectfullmesh",
    "process group",
    "watchdog",
)


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
        if isinstance(found, (RuntimeError, ConnectionError)):
            text = text_of(found).lower()
            if isinstance(found, ConnectionError) or any(
                part in text for part in _COMMUNICATION_TEXTS
            ):
                return True
    return False
