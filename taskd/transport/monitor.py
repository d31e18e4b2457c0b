"""What ZeroMQ tells of the connections of a socket: begun, refused, ended.

Its events go through a queue within the process. Nobody may have to wait for room there: that would
be the thread that moves all messages, and whoever closes the socket. So the queue has no bound: an
event has a few bytes, and there is one for each connection that comes or goes.
"""

import itertools
import time
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

FAILED_HANDSHAKES = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "broken off",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "not our protocol, or another secret",
    zmq.Event.HANDSHAKE_FAILED_AUTH: (
        "an earlier version of taskd: install the same one on all nodes"
    ),
}
_NO_BOUND = 0  # zmq_setsockopt(3), ZMQ_RCVHWM
_numbers = itertools.count()
_ATTEMPTS = zmq.Event.CONNECTED | zmq.Event.CONNECT_RETRIED
_COME, _GONE = zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.DISCONNECTED


class Monitor:
    """Of one socket, from when it is made until `close`. `socket`: to wait for."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", watched: "zmq.Socket[bytes]", events: int
    ) -> None:
        """`events`: zmq.Event values, added."""
        self._watched = watched
        address = f"inproc://taskd-monitor-{next(_numbers)}"
        watched.monitor(address, events)
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.RCVHWM, _NO_BOUND)
        self.socket.connect(address)

    def wait(self, timeout_s: float) -> bool:
        """Wait until something has happened, at most so many seconds; whether it has."""
        return bool(self.socket.poll(int(timeout_s * 1000)))

    def next(self) -> tuple[zmq.Event, int]:
        """What has happened, and the value that comes with it: a descriptor, as a rule. Waits."""
        told = recv_monitor_message(self.socket)
        return zmq.Event(told["event"]), int(told["value"])

    def read(self) -> Iterator[tuple[zmq.Event, int]]:
        """All that has happened; never waits."""
        while self.wait(0):
            yield self.next()

    def close(self) -> None:
        """Before the watched socket is closed; the context waits for it."""
        if not self._watched.closed:
            self._watched.disable_monitor()
        self.socket.close(linger=0)


class Attempts:
    """What becomes of the attempts of one socket to connect, from when it is made until `close`.

    `connection`: the number of the one that is there, from 1 on; 0: none. `is_connected`: there has
    been one, of TCP at least. `is_turned_away`: somebody listens there, and has ended one.
    `has_failed`: so has the last attempt. `socket`: to wait for; then `serve`.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", watched: "zmq.Socket[bytes]"
    ) -> None:
        told = _ATTEMPTS | _COME | _GONE | sum(FAILED_HANDSHAKES)
        self._monitor = Monitor(context, watched, told)
        self.socket = self._monitor.socket
        self.connection = self._count = 0
        self.is_connected = self.is_turned_away = self.has_failed = False

    def wait(self, timeout_s: float) -> bool:
        """Wait for what is to come of the present attempt, at most so long.

        Whether a connection is there.
        """
        until = time.monotonic() + timeout_s
        while not (self.connection or self.has_failed):
            if not self._monitor.wait(max(0.0, until - time.monotonic())):
                return False
            self.serve()
        return self.connection != 0

    def reaches(self, timeout_s: float) -> bool:
        """Whether somebody listens at the address, as the first attempt shows."""
        is_told = self._monitor.wait(timeout_s)
        return is_told and self._monitor.next()[0] is zmq.Event.CONNECTED

    def serve(self) -> bool:
        """Read what has happened. Whether a connection has come."""
        has_come = False
        for event, _ in self._monitor.read():
            if event == _COME:
                self._count += 1
                self.connection, has_come, self.is_turned_away = self._count, True, False
                self.has_failed = False
            elif event == _GONE:
                self.connection = 0
            elif event == zmq.Event.CONNECTED:
                self.is_connected = True
            else:
                self.has_failed = True
                self.is_turned_away = self.is_turned_away or event in FAILED_HANDSHAKES
        return has_come

    def close(self) -> None:
        """As of a `Monitor`."""
        self._monitor.close()
