"""The way to a store: what waits for one that does not answer can be ended."""

from __future__ import annotations

import contextlib
import fcntl
import resource
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from taskd.worker.process import reaching
from taskd.worker.process.groups import Groups

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = timedelta(seconds=60)


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """Whoever connects gets no answer, as of a host that is gone: there is no room for more."""
    with contextlib.ExitStack() as sockets:
        server = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            one = sockets.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        yield server.getsockname()[1]


@contextlib.contextmanager
def free_port(host: str = "127.0.0.1") -> Iterator[int]:
    """One at which nobody listens, and that the kernel gives to nobody else meanwhile.

    It is bound, so that torch's store, which sets SO_REUSEADDR, can open it all the same.
    """
    with socket.socket(family_of(host)) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, 0))
        yield bound.getsockname()[1]


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@pytest.fixture
def groups() -> Iterator[Groups]:
    """Of a recovery: generation 1, whose ranks meet at the store of generation 0."""
    groups = Groups(0, 0)
    groups.install(lambda call: call())
    groups.begin(1)
    yield groups
    groups.uninstall()


def test_an_abort_ends_the_way_to_a_store_that_is_gone(groups) -> None:
    opened = groups.opened
    with silent_port() as port:
        began = time.monotonic()
        threading.Timer(0.3, groups.abort, (opened,)).start()
        with pytest.raises(dist.DistNetworkError, match=f"127.0.0.1:{port} was left"):
            next(c10d.rendezvous(f"tcp://127.0.0.1:{port}?rank=1&world_size=2", timeout=LIMIT))
        assert 0.3 <= time.monotonic() - began < LIMIT.total_seconds()
    assert opened.before_store is None


def test_an_abort_ends_the_way_to_a_store_that_accepts_and_says_nothing(
    groups, monkeypatch
) -> None:
    """Its host has died between the two connections."""
    monkeypatch.setattr(reaching, "_FIRST_S", 0.1)
    opened = groups.opened
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Timer(0.5, groups.abort, (opened,)).start()
        port = server.getsockname()[1]
        with pytest.raises(RuntimeError):
            next(c10d.rendezvous(f"tcp://127.0.0.1:{port}?rank=1&world_size=2", timeout=LIMIT))
    assert opened.is_aborted


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_store_that_opens_later_is_met_and_has_the_timeout_of_the_user(groups, host) -> None:
    stores: list[dist.TCPStore] = []
    with free_port("127.0.0.1" if host == "localhost" else host) as port:

        def open_store() -> None:
            stores.append(dist.TCPStore(host, port, is_master=True, wait_for_workers=False))

        opening = threading.Timer(0.3, open_store)
        opening.start()
        shown = f"[{host}]" if ":" in host else host
        store, rank, _ = next(
            c10d.rendezvous(f"tcp://{shown}:{port}?rank=1&world_size=2", timeout=LIMIT)
        )
        assert rank == 1
        store.set("a", "b")
        opening.join()
        assert stores[0].get("taskd/1/a") == b"b"
        assert store.timeout == LIMIT


@pytest.mark.usefixtures("groups")
def test_the_timeout_of_the_user_holds_for_all_tries(monkeypatch) -> None:
    monkeypatch.setattr(reaching, "_FIRST_S", LIMIT.total_seconds())
    began = time.monotonic()
    with silent_port() as port, pytest.raises(dist.DistNetworkError, match="timed out"):
        next(
            c10d.rendezvous(
                f"tcp://127.0.0.1:{port}?rank=1&world_size=2", timeout=timedelta(seconds=0.5)
            )
        )
    assert 0.5 <= time.monotonic() - began < LIMIT.total_seconds()


@pytest.mark.parametrize(("generation", "rank"), [(0, 1), (1, 0)])
def test_the_first_start_and_the_host_of_the_store_are_left_to_torch(
    groups, monkeypatch, generation: int, rank: int
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("this is not asked for")

    groups.begin(generation)
    monkeypatch.setattr("taskd.worker.process.groups.reach", refuse)
    with free_port() as port:
        server = dist.TCPStore(
            "127.0.0.1", port, is_master=True, multi_tenant=True, world_size=None
        )
        url = f"tcp://127.0.0.1:{port}?rank={rank}&world_size=1"
        found = next(c10d.rendezvous(url, timeout=LIMIT))
        assert found[1] == rank
        assert server.port == port


def test_a_try_of_torch_that_fails_is_followed_by_a_longer_one() -> None:
    given: list[float] = []
    store = dist.HashStore()

    def create(timeout: timedelta) -> dist.Store:
        given.append(timeout.total_seconds())
        if len(given) < 3:
            raise dist.DistNetworkError("too many at the same time")
        return store

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reaching.reach(create, "127.0.0.1", port, LIMIT, lambda: False) is store
    assert given == [5.0, 10.0, 20.0]
    assert store.timeout == LIMIT


def test_a_process_with_many_descriptors_reaches_it(monkeypatch) -> None:
    """select(2) knows none above 1023."""
    store, made = dist.HashStore(), socket.socket

    def high(*arguments: object) -> socket.socket:
        low = made(*arguments)
        number = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 2000)
        low.close()
        return made(fileno=number)

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2100:
        pytest.skip(f"at most {limits[1]} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2100), limits[1]))
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            monkeypatch.setattr(socket, "socket", high)
            found = reaching.reach(lambda _: store, "127.0.0.1", port, LIMIT, lambda: False)
        assert found is store
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_uninstalling_gives_torch_its_own_back() -> None:
    module = sys.modules["torch.distributed.rendezvous"]
    own = module._create_c10d_store
    groups = Groups(0, 0)
    groups.install(lambda call: call())
    assert module._create_c10d_store is not own
    groups.uninstall()
    assert module._create_c10d_store is own
