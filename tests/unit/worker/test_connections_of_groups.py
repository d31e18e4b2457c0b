"""Groups: which connections an abort ends, and which are the script's."""

import os
import socket
import sys

import pytest
from connections import pair

from taskd.worker.process import aborting
from taskd.worker.process.groups import Groups


@pytest.mark.parametrize("is_over", [True, False])
def test_connections_of_the_script_stay_that_another_thread_opens_meanwhile(
    groups, *, is_over: bool
) -> None:
    """A keep-alive connection was cut at the next fault, and its rank failed by itself."""
    from torch.distributed import GroupMember

    # the script's own; and what gloo and the store open, which no Python object has
    ours = []

    def create() -> tuple[int, None]:
        ours.extend(pair())
        for is_inherited in (True, False):
            end, peer = pair()
            end.set_inheritable(is_inherited)
            ours.extend((end.detach(), peer))
        if not is_over:
            groups.abort(groups.opened)
        return GroupMember.NON_GROUP_MEMBER, None

    groups._watched(create)()
    groups.abort(groups.opened)
    end, other, native, native_peer, copy, copy_peer = ours
    try:
        assert (native_peer.recv(1), copy_peer.recv(1)) == (b"", b"")
        end.sendall(b"x")
        assert other.recv(1) == b"x"
    finally:
        for each in (end, other, native_peer, copy_peer):
            each.close()
        os.close(native)
        os.close(copy)


def test_more_connections_to_the_store_are_told_without_a_look_at_all_objects(
    groups, monkeypatch
) -> None:
    """With NCCL each group has one, and a job a hundred groups."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        first, second = (socket.create_connection(server.getsockname()) for _ in range(2))
        with first, second:
            named = {
                end.fileno(): os.readlink(f"/proc/self/fd/{end.fileno()}")
                for end in (first, second)
            }
            later = {second.fileno(): named[second.fileno()]}
            monkeypatch.setattr(aborting.gc, "get_objects", lambda: pytest.fail("it has looked"))
            assert aborting.without_scripts(later, named) == later


@pytest.fixture
def reached(monkeypatch):
    """A function that reaches a store as in a recovery, and calls another one meanwhile."""
    from torch import distributed as dist
    from torch.distributed import distributed_c10d as c10d

    module = sys.modules["torch.distributed.rendezvous"]
    original = module._create_c10d_store
    meanwhile = []

    def create(*args, **kwargs):
        store = original(*args, **kwargs)
        for each in meanwhile:
            each()
        return store

    monkeypatch.setattr(module, "_create_c10d_store", create)
    groups = Groups(1, 0)
    groups.install(lambda call: call())
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def reach(call):
        meanwhile.append(lambda: call(groups))
        url = f"tcp://127.0.0.1:{server.port}?rank=1&world_size=2"
        return groups, next(c10d.rendezvous(url))[0]

    yield reach
    groups.uninstall()


@pytest.mark.parametrize("fault", ["on the way", "in a creation"])
def test_connections_of_the_script_stay_that_are_opened_while_the_store_is_reached(
    reached, fault: str
) -> None:
    """And that of the store is cut as ever."""
    from torch.distributed import GroupMember

    ours = []

    def meanwhile(groups: Groups) -> None:
        ours.extend(pair())
        if fault == "on the way":
            groups.abort(groups.opened)

    def create() -> tuple[int, None]:
        groups.abort(groups.opened)
        return GroupMember.NON_GROUP_MEMBER, None

    groups, store = reached(meanwhile)
    with ours[0], ours[1]:
        if fault == "in a creation":
            groups._watched(create)()
        ours[0].sendall(b"x")
        assert ours[1].recv(1) == b"x"
    with pytest.raises(RuntimeError):
        store.set("key", "value")


def test_a_store_is_reached_without_a_look_at_all_objects(monkeypatch) -> None:
    """A script may have millions, and each recovery would wait for that."""
    from torch import distributed as dist
    from torch.distributed import GroupMember
    from torch.distributed import distributed_c10d as c10d

    monkeypatch.setattr(aborting.gc, "get_objects", lambda: pytest.fail("it has looked"))
    groups, native = Groups(1, 0), []
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()

        def connect(*_args, **_kwargs) -> dist.Store:
            native.append(socket.create_connection((host, port)).detach())
            return dist.HashStore()

        def create() -> tuple[int, None]:
            connect()
            return GroupMember.NON_GROUP_MEMBER, None

        module = sys.modules["torch.distributed.rendezvous"]
        monkeypatch.setattr(module, "_create_c10d_store", connect)
        groups.install(lambda call: call())
        try:
            next(c10d.rendezvous(f"tcp://{host}:{port}?rank=1&world_size=2"))
            groups._watched(create)()
            opened = groups.opened
            assert [[*opened.store_sockets], [*opened.sockets]] == [native[:1], native[1:]]
        finally:
            groups.uninstall()
            for each in native:
                os.close(each)


def test_a_connection_of_the_script_to_the_stores_port_on_another_host_stays() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        with socket.create_server(("127.0.0.2", port)) as other:
            native = socket.create_connection((host, port)).detach()
            try:
                with socket.create_connection(other.getsockname()) as own:
                    both = {fd: names_now()[fd] for fd in (native, own.fileno())}
                    assert aborting.of_store(both, port) == {native: both[native]}
            finally:
                os.close(native)


def test_what_has_the_number_of_a_closed_connection_to_the_store_is_not_the_stores() -> None:
    own, other = pair()
    with own, other:
        sockets = {own.fileno(): names_now()[own.fileno()]}
        assert aborting.without_scripts(sockets, {own.fileno(): "socket:[1]"}) == {}


def names_now() -> dict[int, str]:
    """The kernel's name of each socket of this process."""
    return aborting.open_sockets()


def test_connections_of_multiprocessing_are_the_scripts(groups) -> None:
    """They have a descriptor and no socket object; managers and listeners make them."""
    from multiprocessing.connection import Client, Listener

    from torch.distributed import GroupMember

    ours = []

    def create() -> tuple[int, None]:
        with Listener(("127.0.0.1", 0)) as listener:
            ours.extend((Client(listener.address), listener.accept()))
            closed = Client(listener.address)
            closed.close()
            ours.append(closed)
        groups.abort(groups.opened)
        return GroupMember.NON_GROUP_MEMBER, None

    groups._watched(create)()
    groups.abort(groups.opened)
    end, other, _ = ours
    with end, other:
        end.send("x")
        assert other.recv() == "x"
