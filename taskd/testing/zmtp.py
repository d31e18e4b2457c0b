"""The client's half of a ZeroMQ connection without ZeroMQ: one TCP socket, and no thread.

An imitated fleet has thousands of connections in one process, where a ZeroMQ socket for each would
use up more of the processor than the manager that is under test. What a DEALER without encryption
says (ZMTP 3.0, https://rfc.zeromq.org/spec/23): a greeting, READY, then messages of one frame.
"""

from __future__ import annotations

import socket
import struct

_LONG, _COMMAND = 0x02, 0x04  # flags of a frame; 0x01 (more) is not used by a manager
_GREETING_BYTES = 64
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_ENDED = "the manager has ended the connection"
_buffer = memoryview(bytearray(1 << 18))  # what one read takes at most, before it is kept
_LIMIT_S = 60.0  # until a manager at which thousands knock takes what is said


class ZmtpConnection:
    """A DEALER of this identity at `address` ("host:port"). Raises OSError."""

    def __init__(self, address: str, identity: bytes) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=_LIMIT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        properties = _property(b"Socket-Type", b"DEALER") + _property(b"Identity", identity)
        ready = b"\x05READY" + properties
        # Whoever says the next thing before he was answered breaks the protocol.
        self._socket.sendall(_GREETING)
        self._read(_GREETING_BYTES)
        self._socket.sendall(bytes([_COMMAND, len(ready)]) + ready)
        _, size = self._read(2)
        self._read(size)

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """One message. Raises OSError, also if the other side takes nothing any more."""
        if len(data) < 256:
            self._socket.sendall(bytes([0, len(data)]) + data)
        else:
            self._socket.sendall(struct.pack(">BQ", _LONG, len(data)) + data)

    def receive(self) -> list[bytes]:
        """The messages that have come whole. Raises OSError: the connection has ended."""
        try:
            count = self._socket.recv_into(_buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not count:
            raise ConnectionResetError(_ENDED)
        if not self._received and count > 1 and not _buffer[0] and _buffer[1] + 2 == count:
            return [bytes(_buffer[2:count])]  # one short message, as nearly always
        self._received += _buffer[:count]
        return self._whole_messages()

    def close(self) -> None:
        """End the connection without a word."""
        self._socket.close()

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            new = self._socket.recv(count - len(data))
            if not new:
                raise ConnectionResetError(_ENDED)
            data += new
        return data

    def _whole_messages(self) -> list[bytes]:
        found: list[bytes] = []
        held, at = self._received, 0
        while len(held) - at >= 2:
            flags, start = held[at], at + 2
            size = held[at + 1]
            if flags & _LONG:
                start = at + 9
                if len(held) < start:
                    break
                (size,) = struct.unpack_from(">Q", held, at + 1)
            if len(held) < start + size:
                break
            if not flags & _COMMAND:
                found.append(bytes(held[start : start + size]))
            at = start + size
        del held[:at]
        return found


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
