"""Telling a victim from a culprit: whether an exception is what the death of somebody else looks like."""

from __future__ import annotations

import traceback

# What gloo, NCCL, HCCL and TCPStore say when a peer is gone (torch 2.13). Lower case; any one is enough.
_COMMUNICATION_TEXTS = (
    "connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "socket closed",
    "gloo", "nccl", "hccl", "tcpstore", "failed to recv", "failed to send", "timed out waiting", "application timeout",
    "connectfullmesh", "process group", "watchdog",
)
_MAX_TRACEBACK_CHARS = 16_000      # a message must stay far below the frame limit
_MAX_DETAIL_CHARS = 500


def is_communication_error(error: BaseException | None) -> bool:
    """True if `error`, or what it was raised from, comes from a broken collective or store."""
    seen = 0
    while error is not None and seen < 16:
        if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError"):
            return True
        if isinstance(error, (RuntimeError, ConnectionError)):
            text = str(error).lower()
            if isinstance(error, ConnectionError) or any(part in text for part in _COMMUNICATION_TEXTS):
                return True
        error = error.__cause__ or error.__context__
        seen += 1
    return False


def describe(error: BaseException) -> str:
    """One line: type and message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_MAX_DETAIL_CHARS] if text else type(error).__name__


def traceback_text(error: BaseException) -> str:
    """The usual traceback, its middle cut out if it is huge."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if len(text) <= _MAX_TRACEBACK_CHARS:
        return text
    half = _MAX_TRACEBACK_CHARS // 2
    return f"{text[:half]}\n... cut ...\n{text[-half:]}"
