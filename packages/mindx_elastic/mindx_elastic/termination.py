"""SIGTERM to this process, noticed whatever its main thread does.

     kernel ── SIGTERM ──▶ C handler of Python ── wake-up descriptor ──▶ our thread
                               │                                            │
                               └── Python handler, when the main thread     └── `late`, if the main
                                   is back in Python: notes it                  thread does not save

A main thread that waits in a collective for a dead peer never runs a Python handler. Our thread is
there for that: it gives the main thread time to come to the end of its step, then saves itself.

Who handled SIGTERM before is called afterwards, and decides what becomes of the process; where
nobody did, SIGTERM ends it, as it would have done without us.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)
_CREDENTIALS = struct.Struct("3i")  # of a writer: pid, uid, gid (unix(7), SCM_CREDENTIALS)
_POLL_S = 1.0  # how late a call of a peer may be heard; msrun looks once a second who has died
_SIGTERM = bytes([signal.SIGTERM])
STEP_WAIT_ENV = "MINDX_ELASTIC_STEP_WAIT_S"
_LEAST_WAIT_S = 5.0  # a step may take as long as that without being stuck
_STEPS_TO_WAIT = 3.0  # times the longest step so far
# The agent of TaskD that has started this process: when another rank has died it leaves this one
# min(5, T/6) seconds between SIGTERM and SIGKILL. A fifth is for the end of the step; what is left
# is for the file.
_AGENT_ENV, _AGENT_T_ENV = "TASKD_DOOR", "TASKD_FAULT_TIMEOUT"
_AGENT_T_S = 30.0  # TaskD's default
_AGENT_GRACE_S, _AGENT_PART_OF_T = 5.0, 1 / 6
_PART_OF_GRACE = 1 / 5
_armed: list[Termination] = []  # the one whose handler is installed, for forked children


def patience_s(longest_step_s: float) -> float:
    """How long the end of a step is waited for when SIGTERM has come, in seconds."""
    if _seconds(STEP_WAIT_ENV) is None and os.environ.get(_AGENT_ENV):
        # However long a step is: later there is no time to save.
        t_s = _seconds(_AGENT_T_ENV) or _AGENT_T_S
        return _PART_OF_GRACE * min(_AGENT_GRACE_S, _AGENT_PART_OF_T * max(0.0, t_s))
    return stuck_after_s(longest_step_s)


def stuck_after_s(longest_step_s: float) -> float:
    """How long a step may take before it counts as stuck, in seconds."""
    chosen_s = _seconds(STEP_WAIT_ENV)
    if chosen_s is not None:
        return max(0.0, chosen_s)
    return max(_LEAST_WAIT_S, _STEPS_TO_WAIT * longest_step_s)


def _seconds(name: str) -> float | None:
    """What a variable says; None: nothing, or no number."""
    try:
        return float(os.environ.get(name, ""))
    except ValueError:
        return None


class Termination:
    """One per training. `arm` in the main thread, `disarm` when it is over."""

    def __init__(
        self,
        late: Callable[[], None],
        patience_s: Callable[[], float],
        is_called: Callable[[], bool] | None = None,
    ) -> None:
        """All of them are called in our thread, and must raise nothing.

        Args:
            late: saves, as the main thread has not.
            patience_s: how long the main thread may take to save, in seconds.
            is_called: whether a peer has asked to save; asked once a second.
        """
        self._late, self._patience_s = late, patience_s
        self._is_called = is_called
        self._ending = threading.Lock()
        self._former: Any = None
        self._thread: threading.Thread | None = None
        self._saved = threading.Event()
        self._over = threading.Event()  # nothing is left to be done about SIGTERM
        self.has_come = False  # SIGTERM
        self.is_called = False  # by a peer
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reader.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        for end in (self._reader, self._writer):
            end.setblocking(False)

    @property
    def is_wanted(self) -> bool:
        """Whether there is a reason to save."""
        return self.has_come or self.is_called

    def arm(self) -> bool:
        """From here on SIGTERM is noticed. False: this is not the main thread, which alone can."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._former = signal.signal(signal.SIGTERM, self._handle)
        signal.siginterrupt(signal.SIGTERM, False)  # system calls of libraries go on
        other = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if other >= 0:  # the script's own event loop: then only the Python handler tells us
            signal.set_wakeup_fd(other)
        _armed.append(self)
        self._thread = threading.Thread(target=self._watch, name="mindx-elastic", daemon=True)
        self._thread.start()
        return True

    def disarm(self) -> None:
        """As if `arm` had not been called. In the main thread."""
        if self not in _armed:
            return
        _armed.remove(self)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._former or signal.SIG_DFL)
        other = signal.set_wakeup_fd(-1)
        if other not in (-1, self._writer.fileno()):
            signal.set_wakeup_fd(other)
        self._over.set()
        self._writer.close()
        if self._thread is not None:
            self._thread.join()

    def saved(self) -> None:
        """What a peer has asked for is done."""
        self._saved.set()

    def end(self) -> None:
        """What SIGTERM would have done without us. May return, where somebody else handles it."""
        with self._ending:
            if self._over.is_set():
                return
            self._over.set()
        if callable(self._former):
            self._former(signal.SIGTERM, None)
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        logging.shutdown()
        # Python's own function is for the main thread alone.
        libc = ctypes.CDLL(None)
        libc.signal(int(signal.SIGTERM), None)  # SIG_DFL
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
        os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, _number: int, _frame: object) -> None:
        self.has_come = True
        with suppress(OSError):
            self._writer.send(_SIGTERM)

    def _watch(self) -> None:
        is_called, timeout = self._is_called, _POLL_S
        while True:
            ready, _, _ = select.select([self._reader], [], [], timeout if is_called else None)
            if ready and not self._read():
                self._reader.close()
                return
            if is_called is not None and is_called():
                is_called = None  # once is enough
                self.is_called = True
                self._wait_for(self._saved)
            if self.has_come:
                is_called = None
                self._wait_for(self._over)

    def _wait_for(self, done: threading.Event) -> None:
        if not done.wait(self._patience_s()):
            self._late()

    def _read(self) -> bool:
        """Take in what has been written; False: the other end is closed."""
        while True:
            try:
                data, sent, _, _ = self._reader.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return True
            if not data:
                return False
            # A child that was forked a moment ago still writes here.
            if data == _SIGTERM and _writer_of(sent) == os.getpid():
                self.has_come = True

    def forget(self) -> None:
        """In a forked child: SIGTERM is none of our business there."""
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._former or signal.SIG_DFL)
        other = signal.set_wakeup_fd(-1)
        if other not in (-1, self._writer.fileno()):
            signal.set_wakeup_fd(other)
        self._reader.close()
        self._writer.close()


def _writer_of(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    return _CREDENTIALS.unpack(ancillary[0][2])[0] if ancillary else None


def _forget_all() -> None:
    for one in _armed:
        one.forget()
    _armed.clear()


os.register_at_fork(after_in_child=_forget_all)
