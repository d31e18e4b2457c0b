"""Telling a victim from a culprit, by what libraries say when a peer is gone."""

from taskd.core.faults import Fault, FaultKind

# What gloo, NCCL, HCCL and TCPStore say when a peer is gone (torch 2.13). Lower case; any one is
# enough.
COMMUNICATION_TEXTS = (
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


def speaks_of_communication(text: str) -> bool:
    """Whether this is what an exception says where a collective or a store is broken."""
    lower = text.lower()
    return any(part in lower for part in COMMUNICATION_TEXTS)


def may_be_victim(fault: Fault) -> bool:
    """Whether the process may have ended because of somebody else's death.

    It left no better word than that its communication broke.
    """
    return fault.kind is FaultKind.EXITED and speaks_of_communication(fault.detail)
