"""SIGTERM to a training process, where it means that the job is to be saved.

The platform may send it to every process of a pod, and our own agent to one that it ends. Which of
them it was is told by the channel: the agent hangs up with its signal. So a SIGTERM while the agent
listens is the platform's, and the agent is told; one without an agent ends the process, as usual.

The signal is seen by Python's wake-up descriptor, in the runtime's thread, whatever the main thread
does. So the script's own handler, whenever it is installed, stays the handler and is called at the
signal. Where there is none, a handler that does nothing takes the place of the default.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import threading
from contextlib import suppress

_CREDENTIALS = struct.Struct("3i")  # of a writer: pid, uid, gid (unix(7), SCM_CREDENTIALS)


class Sigterm:
    """One per runtime."""

    def __init__(self) -> None:
        self._has_come = False
        self._lock = threading.Lock()
        self._mask = threading.local()  # `former`: of a thread that forks
        self._is_watched = False
        # One message for each signal, with the process that got it: a child that was forked a
        # moment ago still writes here.
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reader.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        for end in (self._reader, self._writer):
            end.setblocking(False)

    @property
    def fd(self) -> int:
        """Readable when `read` is to be called."""
        return self._reader.fileno()

    def watch(self) -> None:
        """From here on SIGTERM does not end this process by itself. Only the main thread can."""
        if self._is_watched or threading.current_thread() is not threading.main_thread():
            return
        self._is_watched = True
        # A child that is terminated as soon as it is there dies of that: it has no handler then.
        os.register_at_fork(
            before=self._hold_back, after_in_parent=self._let_through, after_in_child=self._forget
        )
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)
            signal.siginterrupt(signal.SIGTERM, False)  # libraries do not notice
        former = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if former >= 0:  # the script's own event loop: then only `_note` tells
            signal.set_wakeup_fd(former)

    def read(self) -> bool:
        """Whether SIGTERM has come to this process since the last call."""
        found = False
        with self._lock, suppress(BlockingIOError):
            while True:
                data, sent, _, _ = self._reader.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
                if data == bytes([signal.SIGTERM]) and _writer_of(sent) == os.getpid():
                    found = self._has_come = True
        return found

    @property
    def has_come(self) -> bool:
        """Whether SIGTERM has ever come, for the main thread: its handler may have run first."""
        if self.read():
            self._note(signal.SIGTERM, None)  # for the runtime's thread
        return self._has_come

    def step_aside(self) -> None:
        """The agent has hung up: SIGTERM ends this process, also one that has come already.

        The script's own handler stays. Any thread may call it.
        """
        if signal.getsignal(signal.SIGTERM) != self._note:
            return
        ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # SIG_DFL; Python's is for one thread
        if self.has_come:
            signal.raise_signal(signal.SIGTERM)

    def _hold_back(self) -> None:
        self._mask.former = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))

    def _let_through(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.former)

    def _forget(self) -> None:
        """In a forked child: as if nothing had been done."""
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        former = signal.set_wakeup_fd(-1)
        if former not in (-1, self._writer.fileno()):
            signal.set_wakeup_fd(former)
        self._reader.close()
        self._writer.close()
        self._let_through()

    def _note(self, number: int, _frame: object) -> None:
        with suppress(BlockingIOError):
            self._writer.send(bytes([number]))


def _writer_of(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    return _CREDENTIALS.unpack(ancillary[0][2])[0] if ancillary else None
