"""The ring of connections beside the process groups, over loopback."""

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from taskd.transport import peer_link
from taskd.transport.peer_link import PeerLink

LIMIT_S = 20.0


class Store:
    """What a PeerLink needs of torch's store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        """As torch's."""
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        """As torch's."""
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        """As torch's."""
        return self.values[key]


def _connect(store: Store, rank: int, world_size: int) -> PeerLink:
    return PeerLink.connect(
        store,
        "ring",
        rank=rank,
        target=(rank + 1) % world_size,
        towards="127.0.0.1",
        until=time.monotonic() + LIMIT_S,
    )


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process has more of them open than `select` can tell apart."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    held = [os.open(os.devnull, os.O_RDONLY)]
    while held[-1] < 1024:
        held.append(os.dup(held[0]))
    yield
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def ring() -> Iterator[list[PeerLink]]:
    """Three ranks; each one sends to the next."""
    yield from _ring()


def _ring() -> Iterator[list[PeerLink]]:
    store, links = Store(), dict.fromkeys(range(3))

    def connect(rank: int) -> None:
        links[rank] = _connect(store, rank, 3)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield [links[rank] for rank in range(3)]
    for link in links.values():
        link.close()


def _receive(link: PeerLink, count: int) -> list[bytes]:
    found: list[bytes] = []
    deadline = time.monotonic() + LIMIT_S
    while len(found) < count and time.monotonic() < deadline:
        link.wait(0.1)
        found += link.receive()
    return found


def test_each_hears_the_one_before_it(ring: list[PeerLink]) -> None:
    for rank, link in enumerate(ring):
        link.send(f"of {rank}".encode())
    assert [_receive(link, 1) for link in ring] == [[b"of 2"], [b"of 0"], [b"of 1"]]


@pytest.mark.usefixtures("many_files")
def test_in_a_process_with_many_files() -> None:
    with contextlib.contextmanager(_ring)() as ring:
        for rank, link in enumerate(ring):
            link.send(f"of {rank}".encode())
        assert [_receive(link, 1) for link in ring] == [[b"of 2"], [b"of 0"], [b"of 1"]]


def test_of_what_has_to_wait_the_newest_arrives(ring: list[PeerLink]) -> None:
    """Nobody reads: sending goes on, and keeps one frame beside that under way."""
    frames = [bytes([number]) * (1 << 20) for number in range(40)]
    for frame in frames:
        ring[0].send(frame)
    found: list[bytes] = []
    deadline = time.monotonic() + LIMIT_S
    while frames[-1] not in found and time.monotonic() < deadline:
        ring[0].flush()
        ring[1].wait(0.01)
        found += ring[1].receive()
    assert found[-1] == frames[-1]
    assert found[0] == frames[0]
    assert len(found) < len(frames), "nothing had to wait"
    assert found == sorted(found)


def test_what_was_sent_before_the_end_is_heard_before_it(ring: list[PeerLink]) -> None:
    ring[0].send(b"last words")
    ring[0].close()
    deadline = time.monotonic() + LIMIT_S
    found: list[bytes] = []
    with pytest.raises(ConnectionResetError, match="closed"):
        while time.monotonic() < deadline:
            ring[1].wait(0.1)
            found.extend(ring[1].receive())
    assert found == [b"last words"]


@pytest.mark.parametrize("said", [bytes(16), bytes(3), b""], ids=["wrong", "half", "nothing"])
def test_a_stranger_is_turned_away(said: bytes) -> None:
    store, links = Store(), {}

    def connect(rank: int) -> None:
        links[rank] = _connect(store, rank, 2)

    first = threading.Thread(target=connect, args=(0,))
    first.start()
    while not store.check(["ring/0"]):
        time.sleep(0.001)
    host, port, _ = store.get("ring/0").decode().split()
    with socket.create_connection((host, int(port)), LIMIT_S) as stranger:
        stranger.sendall(said)
        second = threading.Thread(target=connect, args=(1,))
        second.start()
        first.join(LIMIT_S / 2)
        second.join(LIMIT_S / 2)
        assert set(links) == {0, 1}, "they wait for him"
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "it was not hung up on"
    links[1].send(b"of 1")
    assert _receive(links[0], 1) == [b"of 1"]
    for link in links.values():
        link.close()


def test_a_token_in_two_parts_is_one() -> None:
    """TCP keeps no bounds of what is said."""
    token, found = bytes(range(16)), []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            found.append(peer_link._accept(listener, token, time.monotonic() + LIMIT_S))

        waiting = threading.Thread(target=accept)
        waiting.start()
        with socket.create_connection(listener.getsockname(), LIMIT_S) as speaker:
            speaker.sendall(token[:5])
            waiting.join(0.1)
            assert waiting.is_alive()
            speaker.sendall(token[5:])
            waiting.join(LIMIT_S)
            (connection,) = found
            connection.close()


def test_nobody_there() -> None:
    with pytest.raises(TimeoutError, match="ring/1"):
        PeerLink.connect(
            Store(), "ring", rank=0, target=1, towards="127.0.0.1", until=time.monotonic() + 0.05
        )
