"""The user's command as a process group of its own, its output in a file, and signals to its job.

Also the commands of whoever owns the machines, for faults that no signal makes. The only module
that starts, signals or ends processes here.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING

from taskd.chaos import target
from taskd.errors import ConfigError

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Sequence

_LOOK_S = 0.001  # the kernel stops a process at once, but tells nobody
_STOPPED_OR_GONE = ("T", "t", "Z", "X", "")
_NOT_RUN = (126, 127)  # of sh(1): not executable, not found
_QUOTED = 300  # characters of what a command has said last
_GRACE_S = 20.0  # for the end of a job that is told to end: workers, then torchrun, then manager


class Command:
    """A context: at its end nobody of the job is left."""

    def __init__(
        self, arguments: Sequence[str], environment: dict[str, str], output: pathlib.Path
    ) -> None:
        """Raises ConfigError: it cannot be started."""
        self.output = output
        try:
            with output.open("wb") as file:
                # a session, and with it a process group: Ctrl-C ends the job by way of us
                self._process = subprocess.Popen(
                    arguments,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(
                f"{arguments[0]} cannot be started: {error.strerror}; what stands behind -- is "
                "started as it is, without a shell"
            ) from error

    def __enter__(self) -> Command:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """Of the command itself."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit code, or minus the signal; None: it runs."""
        return self._process.poll()

    def end(self) -> None:
        """SIGTERM, some time, then SIGKILL for all that is left of it."""
        job = {self.pid, *target.descendants(self.pid, target.parents())}
        handles = [handle for pid in job | target.session(self.pid) if (handle := _open(pid))]
        if self.status is None:
            os.killpg(self.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        for handle in handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        for handle in handles:
            _has_ended(handle, _GRACE_S)
            os.close(handle)
        self._process.wait()


def call(line: str, environment: dict[str, str], output: pathlib.Path, limit_s: float) -> str:
    """Run a line of the shell to its end; what it prints is added to `output`.

    Returns why it has not succeeded; empty: it has. Children that it leaves behind go on.
    """
    with output.open("ab") as file:
        began = file.tell()
        process = subprocess.Popen(
            ["/bin/sh", "-c", line],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    status: int | None = None
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if status is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status == 0:
        return ""
    if status is None:
        trouble = f"had not ended after {limit_s:g} s"
    elif status in _NOT_RUN:
        trouble = f"could not be run ({status})"
    else:
        trouble = f"ended with {status}"
    said = output.read_bytes()[began:].decode(errors="replace").split()
    last = " ".join(said)[-_QUOTED:]
    return f"its command {line!r} {trouble}, and has said {last!r}: see {output}"


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def hit(pid: int, number: signal.Signals, limit_s: float) -> bool:
    """Send a signal, and wait until it has taken effect: the process is gone, or has stopped.

    Returns whether it has. A process that was gone already has not been hit.
    """
    handle = _open(pid)
    if handle is None:
        return False
    try:
        signal.pidfd_send_signal(handle, number)
        if number != signal.SIGSTOP:
            return _has_ended(handle, limit_s)
        left_s = limit_s
        while left_s > 0 and target.state_of(pid) not in _STOPPED_OR_GONE:
            if _has_ended(handle, _LOOK_S):
                break  # it has been killed already, because it had stopped
            left_s -= _LOOK_S
    except ProcessLookupError:
        return False
    else:
        return left_s > 0
    finally:
        os.close(handle)


def _has_ended(handle: int, limit_s: float) -> bool:
    return bool(select.select([handle], [], [], limit_s)[0])
