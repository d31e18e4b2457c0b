"""Messages between the agent and its forkserver, with descriptors that are passed along.

Each message is a 4-byte big-endian length and a msgpack map; descriptors travel with its first byte
(SCM_RIGHTS). Knows neither processes nor torch.
"""

import array
import os
import socket
import struct
from collections import deque
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgpack

from taskd.errors import ForkserverError

MAX_FDS = 16  # per message; a worker gets four
_LENGTH = struct.Struct(">I")
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class SpawnRequest:
    """What a worker is to become.

    `argv` has no interpreter: ["-u", script, ...] or ["-u", "-m", module, ...]. `env` is the whole
    environment, `own` the variables of it that torchrun sets for this worker. `fds` maps names
    ("channel", "box", "previous", "life", …) to descriptors; the sender keeps its own copies.
    `worker` is the bootstrap of the runtime without the descriptor numbers; None starts the script
    without a runtime. `ignored` and `blocked` are the signals that torchrun ignores and blocks: a
    fresh interpreter would inherit that. `prefix` is a command that executes the interpreter
    ("numactl", "--physcpubind=0-7").
    """

    token: int
    argv: tuple[str, ...]
    env: dict[str, str]
    own: tuple[str, ...] = ()
    # None: where torchrun was when it started the forkserver, even if that was removed since
    cwd: str | None = None
    # or "exec": a fresh interpreter, always; "preload": no process, see `Spawner.preload`
    kind: str = "python"
    stdout: str | None = None  # a file to append to
    stderr: str | None = None
    fds: dict[str, int] = field(default_factory=dict)
    worker: dict[str, Any] | None = None
    ignored: tuple[int, ...] = ()
    blocked: tuple[int, ...] = ()
    prefix: tuple[str, ...] = ()

    def bootstrap(self) -> dict[str, Any] | None:
        """`worker` with the descriptors, as the runtime gets it; None without a runtime."""
        if self.worker is None:
            return None
        numbers = {f"{name}_fd": number for name, number in self.fds.items()}
        return {**self.worker, "previous_fd": None, **numbers}


@dataclass(frozen=True, slots=True)
class Ready:
    """The forkserver has imported what it is to import: from now on it answers at once."""


@dataclass(frozen=True, slots=True)
class Note:
    """For the log of the agent."""

    text: str


@dataclass(frozen=True, slots=True)
class PreloadedLost:
    """The forkserver's preloaded process is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Imported:
    """What the first worker has imported, see `taskd.core.events.ImportsKnown`."""

    modules: list[str]
    variables: list[str]


@dataclass(frozen=True, slots=True)
class Forked:
    """From the preloaded process to the forkserver: the worker waits at its gate."""

    token: int
    pid: int


@dataclass(frozen=True, slots=True)
class Started:
    """The worker lives. The receiver owns `pidfd`; -1: it had no descriptor left.

    `note` says why it was not forked warm, if it was not.
    """

    token: int
    pid: int
    pidfd: int
    note: str | None = None


@dataclass(frozen=True, slots=True)
class StartFailed:
    """No process could be made."""

    token: int
    error: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The worker is reaped and the rest of its process group killed.

    `status`: exit code or minus the signal number.
    """

    token: int
    pid: int
    status: int


Reply = Started | StartFailed | Exited
Word = Reply | Ready | Note | PreloadedLost | Imported | Forked  # whatever is not a request
_WORDS = {
    cls.__name__: cls
    for cls in (Ready, Note, PreloadedLost, Imported, Forked, Started, StartFailed, Exited)
}


def packed(plain: object) -> bytes:
    """Plain data as msgpack. Variables, arguments and paths keep bytes that are not UTF-8."""
    data: bytes = msgpack.packb(plain, unicode_errors="surrogateescape")
    return data


def unpacked(data: bytes) -> Any:
    """The other way round."""
    return msgpack.unpackb(data, unicode_errors="surrogateescape")


class Wire:
    """One end of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        """`connection`: a stream socketpair's end; owned from now on."""
        self._socket = connection
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()
        # this process had no room for the descriptors of the message that is arriving
        self._is_cut = False

    def fileno(self) -> int:
        """For poll()."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        """Send all of it, or raise OSError."""
        payload = packed({**message, "fd_count": len(descriptors)})
        data = memoryview(_LENGTH.pack(len(payload)) + payload)
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            if descriptors
            else []
        )
        sent = self._socket.sendmsg([data], rights)
        self._socket.sendall(data[sent:])

    def receive(self, *, wait: bool) -> list[tuple[dict[str, Any], list[int]]] | None:
        """Read once and return the complete messages with their descriptors.

        None at the end of the stream.

        A message whose descriptors did not fit into this process (EMFILE) comes with none of them.
        """
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            data, ancillary, received, _ = self._socket.recvmsg(
                _CHUNK_BYTES, socket.CMSG_SPACE(MAX_FDS * 4), flags
            )
        except BlockingIOError:
            return []
        except ConnectionResetError:
            return None
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._descriptors.extend(numbers)
        if received & socket.MSG_CTRUNC:  # one read brings the descriptors of one message at most
            self._is_cut = True
            self._drop_descriptors()
        if not data:
            return None
        self._buffer += data
        return self._complete()

    def _complete(self) -> list[tuple[dict[str, Any], list[int]]]:
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            message = unpacked(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
            count = message.pop("fd_count")
            if self._is_cut and count:
                self._is_cut, count = False, 0
            if count > len(self._descriptors):
                raise ForkserverError(
                    f"a message announced {count} descriptors, {len(self._descriptors)} arrived"
                )
            messages.append((message, [self._descriptors.popleft() for _ in range(count)]))
        return messages

    def detach(self) -> None:
        """Forget the descriptor without closing it."""
        self._socket.detach()

    def close(self) -> None:
        """Close the socket and what nobody claimed. Twice is once."""
        self._socket.close()
        self._drop_descriptors()

    def _drop_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popleft())


def request_message(request: SpawnRequest) -> tuple[dict[str, Any], tuple[int, ...]]:
    """As a message and its descriptors."""
    message = {item.name: getattr(request, item.name) for item in fields(request)}
    return {**message, "fds": list(request.fds)}, tuple(request.fds.values())


def request_from(message: dict[str, Any], descriptors: list[int]) -> SpawnRequest:
    """The other way round; descriptors are the receiver's.

    Raises ForkserverError if they did not arrive.
    """
    if len(descriptors) != len(message["fds"]):
        raise ForkserverError(
            "too many open files in the forkserver: the descriptors of a worker did not fit"
        )
    tuples = {
        name: tuple(message[name]) for name in ("argv", "own", "ignored", "blocked", "prefix")
    }
    fds = dict(zip(message["fds"], descriptors, strict=True))
    return SpawnRequest(**{**message, **tuples, "fds": fds})


def reply_message(reply: Word) -> tuple[dict[str, Any], tuple[int, ...]]:
    """As a message and its descriptors."""
    values = asdict(reply)
    descriptors = (values.pop("pidfd"),) if isinstance(reply, Started) else ()
    return {**values, "reply": type(reply).__name__}, descriptors


def reply_from(message: dict[str, Any], descriptors: list[int]) -> Word:
    """The other way round; the descriptor is the receiver's."""
    kind = message.pop("reply")
    if kind == Started.__name__:
        message["pidfd"] = descriptors[0] if descriptors else -1
    return _WORDS[kind](**message)
