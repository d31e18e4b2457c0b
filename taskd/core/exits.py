"""What an exit status says about how a process ended.

Owns the numbers: Linux signal names are spelt out here, because a decision must not depend on the
machine that replays it.
"""

from taskd.core.faults import Fault, FaultKind

SIGTERM = 15
SIGKILL = 9

_SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT",
    7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2",
    13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS",
}  # fmt: skip
# Sent from outside, by a person, a scheduler or the OOM killer: says nothing against the script.
_FROM_OUTSIDE = frozenset({1, 2, 9, 15})


def exit_fault(
    rank: int, incarnation: int, status: int, *, version: int | None = None,
    phase: str | None = None, words: Fault | None = None, detail: str | None = None,
    traceback: str | None = None,
) -> Fault:  # fmt: skip
    """The fault behind an exit status that ended a worker too early.

    `status`: exit code, or minus the signal number. `words`: what the process itself, or the
    kernel, left about it. `detail`, `traceback`: the same, where there is no fault yet. Two faults
    are the same by their status, wherever the address of one lies, unless the words say what makes
    them so.
    """
    if status < 0:
        kind = FaultKind.KILLED if -status in _FROM_OUTSIDE else FaultKind.CRASHED
        exit_text = _SIGNAL_NAMES.get(-status, f"signal {-status}")
    elif status == 0:
        kind, exit_text = FaultKind.EXITED_EARLY, "exit 0 before the job was complete"
    else:
        kind, exit_text = FaultKind.EXITED, f"exit {status}"
    signature = exit_text
    if words is not None:
        detail, signature, traceback = words.detail, words.signature, words.traceback
    return Fault(
        kind, rank, incarnation, detail or exit_text, version=version, phase=phase,
        signature=signature, traceback=traceback, exit_code=status,
    )  # fmt: skip
