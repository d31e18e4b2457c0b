"""What an exit status says about how a process ended.

Owns the numbers: Linux signal names are spelt out here, because a decision must not depend on the machine that replays it.
"""

from taskd.core.faults import Fault, FaultKind

SIGTERM = 15
SIGKILL = 9

_SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
    24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS",
}  # fmt: skip
# Sent from outside, by a person, a scheduler or the OOM killer: says nothing against the script.
_FROM_OUTSIDE = frozenset({1, 2, 9, 15})


def exit_fault(
    rank: int, incarnation: int, status: int, *, version: int | None = None, phase: str | None = None
) -> Fault:
    """The fault behind an exit status (exit code, or minus the signal number) that ended a worker too early."""
    if status < 0:
        kind = FaultKind.KILLED if -status in _FROM_OUTSIDE else FaultKind.CRASHED
        detail = _SIGNAL_NAMES.get(-status, f"signal {-status}")
    elif status == 0:
        kind, detail = FaultKind.EXITED_EARLY, "exit 0 before the job was complete"
    else:
        kind, detail = FaultKind.EXITED, f"exit {status}"
    return Fault(
        kind, rank, incarnation, detail, version=version, phase=phase, signature=detail, exit_code=status
    )
