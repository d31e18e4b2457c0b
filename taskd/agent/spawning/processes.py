"""Facts about Linux processes.

Who holds threads or devices, pidfds, signals to a whole worker, how a process ended.

Owns no process and keeps no state. Must not know torch, messages or policy.
"""

import ctypes
import os
import select
import signal
from collections.abc import Iterable
from contextlib import suppress

# of a process whose parent took the truth to its grave: most likely what killed it too
UNKNOWN_STATUS = -signal.SIGKILL
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_COMM_BYTES = 16  # TASK_COMM_LEN, with the final NUL
_HARMLESS_DEVICES = (
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/console",
    "/dev/kmsg",
    "/dev/ptmx",
    "/dev/pts/",
    "/dev/shm/",  # noqa: S108
    "/dev/fd/",
    "/dev/std",
)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def thread_count() -> int:
    """Number of kernel threads of this process, those that Python knows nothing of included."""
    return len(os.listdir("/proc/self/task"))


def open_descriptors() -> list[int]:
    """Every open descriptor of this process, in order, without the one used for looking."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            os.fstat(int(name))
            found.append(int(name))
    return sorted(found)


def device_files() -> list[str]:
    """Device files that this process holds open.

    A process with a device context must not be forked.
    """
    found = []
    for descriptor in open_descriptors():
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith("/dev/") and not target.startswith(_HARMLESS_DEVICES):
                found.append(target)
    return found


def settle_threads() -> int:
    """Number of threads after those that stop themselves for a fork have done so.

    OpenBLAS (numpy) keeps a pool that its pthread_atfork handler ends before a fork and starts
    again on demand. A fork whose child leaves at once runs exactly these handlers.
    """
    if thread_count() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return thread_count()


def become_subreaper() -> None:
    """Orphaned descendants become our children, not those of pid 1.

    Nothing gets lost when their parent dies.
    """
    libc = _libc()
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")


def end_with_parent() -> None:
    """This process, but none that it forks, is killed when its parent ends."""
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def set_title(arguments: list[str]) -> None:
    """What `ps` shows: the name, and the command line as far as the present one leaves room for it.

    The kernel reads the command line from the memory where execve put it (proc(5), arg_start and
    arg_end).
    """
    name = os.fsencode(os.path.basename(arguments[0]))[: _COMM_BYTES - 1]
    _libc().prctl(_PR_SET_NAME, ctypes.c_char_p(name), 0, 0, 0)
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    arg_start, arg_end = int(fields[45]), int(fields[46])  # fields 48 and 49 of proc(5)
    room = arg_end - arg_start
    if room <= 1:
        return
    text = b"\0".join(os.fsencode(argument) for argument in arguments)[: room - 1]
    ctypes.memmove(arg_start, text.ljust(room, b"\0"), room)


def is_stopped(pid: int) -> bool:
    """Whether the process has been stopped by a signal."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):  # it is gone, or /proc cannot be read
        return False


def has_directory() -> bool:
    """Whether the working directory of this process is still there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def ignored_signals() -> tuple[int, ...]:
    """The signals that this process ignores, as a program that it executes would.

    What is caught here begins with the default there.
    """
    with open("/proc/self/status", "rb") as file:
        mask = next(int(line.split()[1], 16) for line in file if line.startswith(b"SigIgn:"))
    return tuple(number for number in sorted(signal.valid_signals()) if mask >> (number - 1) & 1)


def signal_group(pid: int, signum: int) -> bool:
    """Send a signal to the worker and to everything in its process group.

    False: nobody is there any more.
    """
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        # In the first microseconds of its life the worker has not called setsid() yet.
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            return False
    return True


def signal_alone(pidfd: int, signum: int) -> None:
    """Send a signal to a process, and to nothing else of its group. It may have ended."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signum)


def reap_group(pid: int, pidfd: int) -> int | None:
    """Reap an ended child of ours after killing what is left of its process group.

    None while it lives.

    The number of an unreaped leader cannot be given to another group: that is why the group goes
    first.
    """
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except ChildProcessError:
        # Reaped by a parent that died before it could tell; or (pidfd not readable) not our child
        # yet.
        return None if not select.select([pidfd], [], [], 0)[0] else UNKNOWN_STATUS
    return status_of(result)


def ending(pid: int, pidfd: int) -> int | None:
    """The status of an ended child of ours that somebody else reaps; None while it lives.

    What is left of its process group is killed.
    """
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return UNKNOWN_STATUS  # somebody was quicker
    if result is None:
        return None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return status_of(result)


def status_of(result: os.waitid_result) -> int:
    """Exit code, or minus the signal number, as subprocess has it."""
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def describe_status(status: int) -> str:
    """Text of a status for log lines: "exit 3", "SIGKILL"."""
    if status >= 0:
        return f"exit {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def close_all(descriptors: Iterable[int]) -> None:
    """Close these descriptors; one that is closed already, or -1, is passed over."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
