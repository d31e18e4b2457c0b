"""One suite for every transport.

Frames between identities, in order, never changed, nothing blocks but `poll`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from taskd.errors import TransportError
from taskd.transport import base, zeromq
from taskd.transport.memory import MemoryDealer, MemoryNetwork, MemoryRouter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = b"0123456789abcdef"


@dataclass
class Transport:
    """How one kind of link is made."""

    router: Callable[[], base.Listener]
    dealer: Callable[[str, str | bytes], base.Link]


@pytest.fixture(params=["memory", "inproc", "tcp", "tcp6", "curve"])
def transport(request) -> Iterator[Transport]:
    opened: list[base.Link] = []

    def keep(link):
        opened.append(link)
        return link

    if request.param == "memory":
        network = MemoryNetwork()
        yield Transport(
            lambda: keep(MemoryRouter(network, "here")),
            lambda address, name: keep(MemoryDealer(network, address, name)),
        )
    elif request.param == "inproc":
        # lends its context: inproc addresses live within one
        first = keep(zeromq.Router("127.0.0.1:0"))
        yield Transport(
            lambda: keep(zeromq.Router("inproc://contract", beside=first)),
            lambda address, name: keep(zeromq.Dealer(address, name, beside=first)),
        )
    else:
        secret = SECRET if request.param == "curve" else None
        host = "[::1]:0" if request.param == "tcp6" else "127.0.0.1:0"
        yield Transport(
            lambda: keep(zeromq.Router(host, secret=secret)),
            lambda address, name: keep(zeromq.Dealer(address, name, secret=secret)),
        )
    for link in reversed(opened):
        link.close()


def await_messages(
    link: base.Link, count: int, others: tuple[base.Link, ...] = (), limit_s: float = 10.0
) -> list:
    """The next `count` messages.

    `others` are served meanwhile (a router answers handshakes while it polls).
    """
    deadline, received = time.monotonic() + limit_s, []
    while len(received) < count:
        assert time.monotonic() < deadline, f"{len(received)} of {count} messages came"
        for other in others:
            other.poll(0.01)
        link.poll(0.05)
        received += link.receive()
    return received


def by_name(received: list) -> list:
    """With a secret the sender's key stands behind its name."""
    return [(peer.partition(b".")[0], data) for peer, data in received]


def test_messages_arrive_whole_in_order_with_the_sender(transport: Transport) -> None:
    router = transport.router()
    dealer = transport.dealer(router.address, "a")
    sent = [bytes([number % 256]) * (number + 1) for number in range(300)]
    for data in sent:
        assert dealer.send(None, data)
    received = await_messages(router, 300)
    assert by_name(received) == [(b"a", data) for data in sent]
    assert len({peer for peer, _ in received}) == 1


def test_answers_go_to_the_one_they_are_meant_for(transport: Transport) -> None:
    router = transport.router()
    dealers = {name: transport.dealer(router.address, name) for name in (b"a", b"b", b"c")}
    for name, dealer in dealers.items():
        dealer.send(None, b"from " + name)
    received = sorted(await_messages(router, 3))
    assert by_name(received) == [(name, b"from " + name) for name in dealers]
    for (peer, _), name in zip(received, dealers, strict=True):
        assert router.send(peer, b"to " + name)
    for name, dealer in dealers.items():
        assert await_messages(dealer, 1, (router,)) == [(b"", b"to " + name)]


def test_a_message_to_nobody_says_so(transport: Transport) -> None:
    router = transport.router()
    assert router.send(b"nobody", b"x") is False
    assert router.send(None, b"x") is False


def test_a_dealer_has_one_peer(transport: Transport) -> None:
    dealer = transport.dealer(transport.router().address, "a")
    with pytest.raises(ValueError, match="one peer"):
        dealer.send(b"b", b"x")


def test_the_largest_frame_fits(transport: Transport) -> None:
    router = transport.router()
    dealer = transport.dealer(router.address, "a")
    data = os.urandom(base.MAX_FRAME_BYTES)
    dealer.send(None, data)
    received = await_messages(router, 1)
    assert by_name(received) == [(b"a", data)]
    assert router.send(received[0][0], data)
    assert await_messages(dealer, 1, (router,)) == [(b"", data)]


def test_receive_and_poll_do_not_block_when_nothing_is_there(transport: Transport) -> None:
    router = transport.router()
    assert router.receive() == []
    assert router.poll(0.0) == set()
    assert router.take_refused() == []


def test_an_address_can_be_bound_once(transport: Transport) -> None:
    router = transport.router()
    with pytest.raises(TransportError, match="taken"):
        type(router)(router._network, router.address) if isinstance(
            router, MemoryRouter
        ) else zeromq.Router(router.address, beside=router)


def test_messages_wait_for_a_router_that_comes_later_and_for_the_one_after_it(
    transport: Transport,
) -> None:
    router = transport.router()
    address = router.address
    router.close()
    dealer = transport.dealer(address, "a")
    dealer.send(None, b"early")
    make = {MemoryRouter: lambda: MemoryRouter(router._network, address)}.get(type(router))
    if make is None:
        if "inproc" in address:
            pytest.skip("a context keeps no address that nobody holds")
        secret = router._secret
        make = lambda: zeromq.Router(address, secret=secret)  # noqa: E731
    for words in (b"early", b"again"):
        later = make()
        if words == b"again":
            dealer.send(None, words)
        # A connection that was cut may lose what was on its way: the contract says so. What is said
        # later arrives.
        received = await_messages(later, 1, (dealer,))
        assert by_name(received)[0] == (b"a", words)
        assert later.send(received[0][0], b"answer")
        await_messages(dealer, 1, (later,))
        later.close()


@pytest.mark.parametrize("kind", ["tcp", "curve"])
def test_poll_wakes_for_a_descriptor_at_once_and_sleeps_otherwise(kind: str) -> None:
    router = zeromq.Router("127.0.0.1:0", secret=SECRET if kind == "curve" else None)
    reader, writer = os.pipe()
    assert router.poll(0.02, [reader]) == set()
    os.write(writer, b"x")
    assert router.poll(3600.0, [reader]) == {reader}
    os.read(reader, 1)
    os.close(writer)  # hang-up counts as readable
    assert router.poll(None, [reader]) == {reader}
    os.close(reader)
    router.close()


def test_a_lossy_network_loses_what_the_filter_says() -> None:
    network = MemoryNetwork(lambda peer, data: data != b"lost")
    router, dealer = MemoryRouter(network, "x"), MemoryDealer(network, "x", "a")
    dealer.send(None, b"lost")
    dealer.send(None, b"kept")
    assert router.receive() == [(b"a", b"kept")]
    assert router.send(b"a", b"lost")
    assert dealer.receive() == []
