"""Whether the host of a manager that is silent answers: else this node may be cut off.

Connects to where the manager was, again and again, each time in a thread of its own: to look up a
name may take seconds where no network is. What follows is decided in `taskd.core.node`.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from typing import TYPE_CHECKING

from taskd.core.events import ManagerHostHeard

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_OF_THIS_HOST = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ANSWER_S = 1.0  # as long as a handshake of TCP over a bad network takes, with one repetition


class Reach:
    """`turn` is called with each heartbeat."""

    def __init__(self, *, is_wanted: bool) -> None:
        """`is_wanted`: somebody asks for it."""
        self._is_wanted = is_wanted
        self._is_missed = self._is_doubted = False
        self._said: bool | None = None
        self._try: _Try | None = None

    def miss(self) -> None:
        """The manager has been silent for too long."""
        self._is_missed = self._is_wanted

    def turn(self, now: float, address: str, *, is_over: bool) -> Iterator[ManagerHostHeard]:
        """What is new. `address`: of the manager; `is_over`: it has been heard since."""
        self._is_missed = self._is_missed and not is_over
        if not self._is_missed:
            self._said = self._try = None
            self._is_doubted = False
            return
        if self._try is not None and self._try.is_alive():
            return
        answers = None if self._try is None else self._try.answers
        if answers not in (None, self._said):
            self._said = answers
            yield ManagerHostHeard(now, "reach", bool(answers))
        if self._try is not None and self._try.problem:
            self._doubt(address, self._try.problem)
        self._try = _Try(address)
        try:
            self._try.start()
        except RuntimeError as error:  # the system has no further thread for this process
            self._doubt(address, str(error))
            self._try = None

    def _doubt(self, address: str, problem: str) -> None:
        """Say, once in a silence, that nothing is known of the host."""
        if not self._is_doubted:
            self._is_doubted = True
            log.warning(
                "whether the host of the manager at %s answers is not known: %s. This node waits "
                "for the manager: raise the limits of torchrun (ulimit -n, -u)",
                address,
                problem,
            )


class _Try(threading.Thread):
    answers: bool | None = None
    problem = ""  # of this host, so that nothing is known of the other one

    def __init__(self, address: str) -> None:
        super().__init__(name="taskd-reach", daemon=True)
        self._address = address

    def run(self) -> None:
        """That nobody listens there is an answer, too: of the host."""
        host, _, port = self._address.rpartition(":")
        try:
            socket.socket().close()  # to look up a name without a descriptor ends like no name
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
            self.answers = True
        except ConnectionRefusedError:
            self.answers = True
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _OF_THIS_HOST:
                self.problem = str(error)
            else:
                self.answers = False
