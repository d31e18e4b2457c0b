"""What a manager has to obey that an agent has started: its agent, and a manager of the user's.

      agent ── socket pair ──►  automatic manager  ◄── abstract socket ──  python manager.py
             closed: it is gone                         connected: it wants the port

The manager that a user starts has precedence. It finds the port taken, connects to the socket whose
name says job and port, and waits until the other end is closed: then the port is free. Abstract
sockets live in a network namespace, as ports do. Decides nothing about recovery.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

log = logging.getLogger(__name__)

_LEAVE_S = 5.0  # more than its last words take
_DEAF_S = 1.0  # until he is looked at again, who waits for 5 s
_FAREWELL_S = 1.0  # what an agent said last may come after the end of its socket
_CREDENTIALS = struct.Struct("3i")  # pid, user, group: unix(7)


class Starter:
    """See the module."""

    def __init__(self, agent: socket.socket, node_rank: int) -> None:
        """`agent`: closed at the other end when the agent of `node_rank` is gone."""
        self._agent: socket.socket | None = agent
        self._node_rank = node_rank
        self._farewell_until: float | None = None
        self._door: socket.socket | None = None
        self._asking: socket.socket | None = None  # kept open to the end of this process
        self._deaf_until: float | None = None  # who asks cannot be let in before

    def open(self, job_id: str, address: str) -> None:
        """Let others ask for the port of this address, before it is taken.

        Port 0, any free one, is nobody's whom they could ask for.
        """
        if address.endswith(":0"):
            return
        self._door = socket.socket(socket.AF_UNIX)
        try:
            self._door.bind(_door_of(job_id, address))
            self._door.listen()
        except OSError as error:
            log.warning("a manager.py could not ask this manager for the port: %s", error)
            self._door.close()
            self._door = None

    def listens(self, address: str) -> None:
        """Tell the agent that the manager has its port."""
        assert self._agent is not None
        with contextlib.suppress(OSError):  # it is gone: `ends` will see that
            self._agent.sendall(address.encode())

    @property
    def fds(self) -> list[int]:
        """Readable when `ends` has something to look at."""
        door = self._door if self._deaf_until is None else None
        return [end.fileno() for end in (self._agent, door) if end is not None]

    @property
    def next_deadline(self) -> float | None:
        """When `ends` is to look again, whatever is readable."""
        deadlines = (self._farewell_until, self._deaf_until)
        return min((at for at in deadlines if at is not None), default=None)

    def ends(self, ready: Iterable[int], nodes: Iterable[int], now: float) -> bool:
        """Whether the manager is to end now. `nodes`: whose agents are registered.

        The last agent that goes says how its node ended: that is waited for, as the job may have
        succeeded by it, and spares have to be told.
        """
        ready = set(ready)
        if self._agent is not None and self._agent.fileno() in ready:
            self._agent.close()
            self._agent = None
            self._farewell_until = now + _FAREWELL_S
        if self._farewell_until is not None:
            present = set(nodes)
            if present != {self._node_rank} or now >= self._farewell_until:
                self._farewell_until = None
                if not present - {self._node_rank}:
                    log.info("torchrun of node %d has ended: the manager ends", self._node_rank)
                    return True
        if self._deaf_until is not None and now >= self._deaf_until:
            self._deaf_until = None
        return self._is_asked(ready, now)

    def _is_asked(self, ready: set[int], now: float) -> bool:
        """Whether a manager of the user's wants the port."""
        if self._door is None or self._door.fileno() not in ready:
            return False
        try:
            self._asking, _ = self._door.accept()
        except OSError as error:  # no free descriptor; or he has gone
            self._deaf_until = now + _DEAF_S
            log.warning(
                "a manager.py asks for the port, and cannot be answered: %s. This manager stays; "
                "start manager.py again when that is over",
                error,
            )
            return False
        _, user, _ = _CREDENTIALS.unpack(
            self._asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user not in (os.getuid(), 0):
            log.warning("user %d may not end this manager: it stays", user)
            self._asking.close()
            return False
        if _has_gone(self._asking):  # he had to wait for too long, and has ended without the port
            self._asking.close()
            return False
        log.info("a manager.py of this job takes over: this manager ends, training goes on")
        return True


def _has_gone(asking: socket.socket) -> bool:
    """Whether he does not wait any more. He says nothing, so that what can be read is his end."""
    try:
        asking.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def ask_to_leave(job_id: str, address: str) -> bool:
    """Whether a manager that an agent had started for this job has left the port of `address`."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_LEAVE_S)
        try:
            asking.connect(_door_of(job_id, address))
            asking.recv(1)  # until it ends
        except ConnectionResetError:
            return True
        except OSError:
            return False
    return True


def _door_of(job_id: str, address: str) -> str:
    port = address.rpartition(":")[2]
    return f"\0taskd-manager-{port}-{hashlib.blake2b(job_id.encode(), digest_size=16).hexdigest()}"
