"""Connections on which nobody speaks: they are closed, whatever their handshake has come to.

ZeroMQ bounds the time of a handshake, but old versions of its protocol have none, and after it a
stranger may be silent for ever. It closes no single connection on request either; what the kernel
tells it of one that was shut down has the same effect.
"""

import contextlib
import errno
import os
import socket


class Silence:
    """Connections of one listener by their descriptors, from their start until somebody speaks."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._opened_at: dict[int, float] = {}  # in the order of time

    def __len__(self) -> int:
        return len(self._opened_at)

    @property
    def due_at(self) -> float | None:
        """When `hang_up` has something to do."""
        return next((at + self._limit_s for at in self._opened_at.values()), None)

    def opened(self, connection: int, now: float) -> None:
        """A new one."""
        self._opened_at.pop(connection, None)
        self._opened_at[connection] = now

    def over(self, connection: int) -> None:
        """Somebody has spoken there, or it has ended."""
        self._opened_at.pop(connection, None)

    def all_over(self) -> None:
        """All have ended."""
        self._opened_at.clear()

    def hang_up(self, now: float, port: int) -> int:
        """Close those whose time is over, of the listener on this port. Returns how many.

        To be called when all that has arrived was read.
        """
        overdue = [fd for fd, at in self._opened_at.items() if now >= at + self._limit_s]
        for connection in overdue:
            del self._opened_at[connection]
            shut_down(connection, port)
        return len(overdue)

    def hang_up_oldest(self, port: int) -> None:
        """Close the one that has been silent for longest; there is one."""
        connection = next(iter(self._opened_at))
        del self._opened_at[connection]
        shut_down(connection, port)


def is_open(descriptor: int) -> bool:
    """Whether it is there: ZeroMQ closes that of a connection that has ended."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def shut_down(descriptor: int, port: int) -> None:
    """End a connection. Only if it is one of this port: the number may be another file's by now.

    Nothing, if it has ended meanwhile.
    """
    with contextlib.suppress(OSError):
        copy = _copy_of(descriptor)
        number = descriptor if copy is None else copy
        try:
            connection = socket.socket(fileno=number)
            try:
                is_ours = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_ours and connection.getsockname()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()
        finally:
            if copy is not None:
                os.close(copy)


def _copy_of(descriptor: int) -> int | None:
    """None: there is no free one, as strangers have them all, and these are to be got rid of.

    Then the number itself has to do. It may become another connection's of this port in the instant
    before that is shut down: whoever speaks there connects again.
    """
    try:
        return os.dup(descriptor)
    except OSError as error:
        if error.errno == errno.EMFILE:
            return None
        raise
